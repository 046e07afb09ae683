"""The long test: simulated jobs by seed, then real ranks with random faults. `python -m tests.soak --help`.

A failing real round prints its seed; `--restarts-seed SEED` with `--restarts 1` runs just that round again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
import time

from tests.harness import At, Exit, Fault, Hang, Kill, Raise, Ranks, Run, Uncopyable, Unpicklable, start_server
from tests.harness.launch import HASTY, become_subreaper
from tests.ranks import targets

#: iterations with faults in one job
CHAIN = 12
GENTLE: list[Fault] = [Raise(ValueError, "soak"), Raise(Uncopyable, "soak"), Raise(Unpicklable)]
HANGING: list[Fault] = [Hang("sleep"), Hang("queue"), Hang("recv")]
DEADLY: list[Fault] = [Kill(), Exit(5)]
STEPS: tuple[int | str, ...] = ("enter", 0, 1, 2)


def schedule(seed: int, world_size: int) -> dict[At, Fault]:
    """Random faults: many exceptions, some at once, a hang now and then, deaths of all ranks but one at most."""
    chance = random.Random(seed)
    alive = list(range(world_size))
    faults: dict[At, Fault] = {}
    for iteration in range(CHAIN):
        step = chance.choice(STEPS)
        draw = chance.random()
        if draw < 0.15 and len(alive) > 1:
            victim = chance.choice(alive)
            alive.remove(victim)
            faults[At(victim, iteration, step)] = chance.choice(DEADLY)
        elif draw < 0.25:
            faults[At(chance.choice(alive), iteration, step)] = chance.choice(HANGING)
        else:
            for rank in chance.sample(alive, chance.randint(1, len(alive))):
                faults[At(rank, iteration, step)] = chance.choice(GENTLE)
    return faults


def restarts_of(ranks: Ranks) -> int:
    """How often the job restarted: the last iteration that anybody entered."""
    return max(iteration for rank in ranks for iteration, _, _ in rank.entries())


def play(seed: int) -> int:
    """One job with the faults of a seed. Returns the number of restarts; raises AssertionError with the story."""
    world_size = 2 + seed % 3
    faults = schedule(seed, world_size)
    ranks = Run(targets.run_train, world_size, faults=faults, wrapper=HASTY, args={"full_exit": True}).wait(120)
    doomed = {at.rank for at, fault in faults.items() if isinstance(fault, Kill | Exit)}
    for rank in ranks:
        ended_well = rank.exception is None and rank.exitcode == 0 and rank.value is not None
        assert ended_well or (rank.rank in doomed and not rank.done), f"rank {rank.rank}: {rank.exception} {rank.trace}"
    return restarts_of(ranks)


def soak_ranks(restarts: int, first_seed: int) -> None:
    """Play jobs until there were that many restarts."""
    become_subreaper()
    start_server()
    seed, count = first_seed, 0
    while count < restarts:
        start = time.monotonic()
        story = io.StringIO()
        try:
            with contextlib.redirect_stdout(story):
                found = play(seed)
        except AssertionError:
            print(story.getvalue(), f"failed with --restarts-seed {seed}", sep="\n", flush=True)
            raise
        count += found
        seconds = time.monotonic() - start
        print(f"seed {seed}: {found} restarts in {seconds:.1f} s, {count} of {restarts} in all", flush=True)
        seed += 1


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5000, help="number of simulated jobs")
    parser.add_argument("--restarts", type=int, default=200, help="number of restarts of real ranks")
    parser.add_argument("--restarts-seed", type=int, default=0, help="seed of the first job with real ranks")
    options = parser.parse_args(arguments)
    if options.seeds:
        from tests.sim import seeds, soak

        print(f"{soak(seeds(range(options.seeds)))} simulated jobs", flush=True)
    if options.restarts:
        soak_ranks(options.restarts, options.restarts_seed)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
