"""``python -m tests.sim SEED`` prints one story.

``--soak N`` plays the seeds from SEED on, ``--crash-points`` every stop of every life; both use all processors and
print the first failure.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from tests import sim
from tests.sim import crashes
from tests.sim.scenario import Scenario

T = TypeVar("T")
#: seeds, or first stops, for one task of a process
SHARE = 100


def soak(seeds: range, members: int, faults: int) -> None:
    """Play the random scenario of each seed."""
    parts = [seeds[start : start + SHARE] for start in range(0, len(seeds), SHARE)]
    total = _spread(sim.soak, (list(sim.seeds(part, members, faults)) for part in parts), f"{members} members")
    print(f"{total} seeds with {members} members and {faults} faults each, no invariant broken")


def crash_points(sizes_of_pairs: tuple[int, ...]) -> None:
    """All single stops of every life with 2, 3 and 4 members, and all pairs of stops of some with fewer."""
    total = 0
    for members, name in itertools.product((2, 3, 4), crashes.LIVES):
        calm = crashes.life(name, members)
        count = _spread(_play_all, _shares(crashes.singles(calm)), f"{members} members, {name}")
        print(f"{members} members, {name}: {count} single stops", flush=True)
        total += count
    for members, name in itertools.product(sizes_of_pairs, crashes.IN_PAIRS):
        calm = crashes.life(name, members)
        firsts = crashes.singles(calm, targets=("training", "host"))
        count = _spread(_play_pairs, ((calm, first) for first in firsts), f"{members} members, pairs")
        print(f"{members} members, {name}: {count} pairs of stops", flush=True)
        total += count
    print(f"{total} schedules, each ended within its bound with every invariant intact")


def _play_all(scenarios: Iterable[Scenario]) -> int:
    return sum(1 for scenario in scenarios if crashes.play(scenario))


def _play_pairs(job: tuple[Scenario, Scenario]) -> int:
    return _play_all(crashes.pairs(*job))


def _shares(scenarios: Iterable[Scenario]) -> Iterator[list[Scenario]]:
    rest = iter(scenarios)
    while share := list(itertools.islice(rest, SHARE)):
        yield share


def _spread(task: Callable[[T], int], jobs: Iterable[T], what: str) -> int:
    """Sum over all jobs, on all processors; says how far it is, now and then."""
    total, shown = 0, time.monotonic()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            for count in pool.map(task, jobs):
                total += count
                if time.monotonic() - shown > 30:
                    shown = time.monotonic()
                    print(f"  {what}: {total} so far", flush=True)
        except sim.Failure:
            pool.shutdown(cancel_futures=True)
            raise
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, default=0, help="seed to play (default 0)")
    parser.add_argument("--members", type=int, default=4, help="number of ranks (default 4)")
    parser.add_argument("--faults", type=int, default=3, help="faults per job (default 3)")
    parser.add_argument("--soak", type=int, metavar="N", help="play N seeds and print only a failure")
    parser.add_argument("--crash-points", action="store_true", help="stop members at every store operation of a life")
    parser.add_argument(
        "--pairs", type=int, nargs="*", default=(2, 3), help="members, for pairs of stops (default 2 3)"
    )
    options = parser.parse_args()
    try:
        if options.crash_points:
            crash_points(tuple(options.pairs))
        if options.soak is not None:
            soak(range(options.seed, options.seed + options.soak), options.members, options.faults)
        if not options.crash_points and options.soak is None:
            print(sim.story(sim.run(sim.random_scenario(options.seed, options.members, options.faults))))
    except sim.Failure as failure:
        print(failure)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
