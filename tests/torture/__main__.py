"""`python -m tests.torture --seconds 600`: prints seed, windows, interruptions, and what became of them."""

from __future__ import annotations

import argparse
import faulthandler
import platform
import sys
import time
import warnings
from collections.abc import Sequence

from .engine import BOUND, Counts, Lost, Torture, watched
from .placements import everywhere
from .shapes import SHAPES, Shape

#: seconds between two lines of progress
REPORT = 30.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long; default 600")
    parser.add_argument("--seed", type=int, default=None, help="default: the time")
    parser.add_argument(
        "--shape", action="append", choices=sorted(SHAPES), help="only this kind of function; repeatable"
    )
    parser.add_argument("--no-placements", action="store_true", help="leave out the part in which nothing is random")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # an event loop that was interrupted is not closed, a coroutine not awaited
    seed = int(time.time()) if options.seed is None else options.seed
    print(f"Python {platform.python_version()}, seed {seed}, {options.seconds:g} s", flush=True)
    if not options.no_placements:
        place([SHAPES[name] for name in options.shape or SHAPES if SHAPES[name].cheap])
    torture = Torture(seed, options.shape or tuple(SHAPES))
    begin = time.monotonic()
    try:
        with torture:
            play(torture, begin + options.seconds)
    except Lost as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
        report(torture, time.monotonic() - begin)
    return 0


def place(shapes: Sequence[Shape]) -> None:
    """Every placement of every cheap kind of function."""
    with watched([], Counts()):
        counts = [everywhere(shape) for shape in shapes]
    print(f"{sum(counts):,} placements, one at each instruction of {len(counts)} kinds of functions", flush=True)


def play(torture: Torture, end: float) -> None:
    """Storms and aimed batches in turn until `end`."""
    told = time.monotonic()
    storm = True
    while time.monotonic() < end:
        faulthandler.dump_traceback_later(2 * BOUND, exit=True)  # the main thread itself may hang
        torture.batch(storm=storm)
        storm = not storm
        if time.monotonic() > told + REPORT:
            told = time.monotonic()
            print(f"{torture.windows:,} windows, {torture.under_way.total():,} interrupted", flush=True)


def report(torture: Torture, seconds: float) -> None:
    under_way = torture.under_way.total()
    print(f"{torture.windows:,} windows opened and closed in {seconds:.0f} s")
    print(f"{under_way:,} with an interruption under way; {torture.asker.carried_out:,} interruptions carried out")
    print(f"{torture.asker.parked:,} seen parked, {torture.swallowed:,} raised again")
    print(f"{torture.counts.unanswered:,} reported as unanswered")
    for moment, count in sorted(torture.moments.items()):
        print(f"  aimed {moment}: {count:,}")
    kinds = sorted({kind for _, kind in torture.outcomes})
    print(" " * 32 + "".join(f"{kind:>21}" for kind in ["windows", "under way", *kinds]))
    for name in sorted(torture.opened):
        numbers = [torture.opened[name], torture.under_way[name], *(torture.outcomes[name, kind] for kind in kinds)]
        print(f"{name:32}" + "".join(f"{number:21,}" for number in numbers))
    places = ", ".join(f"{name} {count:,}" for name, count in torture.places.most_common(25))
    print(f"raised in {len(torture.places)} functions: {places}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
