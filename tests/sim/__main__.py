"""``python -m tests.sim SEED`` prints one story; ``--soak N`` plays the seeds 0..N-1 (or from SEED on)."""

from __future__ import annotations

import argparse
import sys

from tests import sim


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, default=0, help="seed to play (default 0)")
    parser.add_argument("--members", type=int, default=4, help="number of ranks (default 4)")
    parser.add_argument("--faults", type=int, default=3, help="faults per job (default 3)")
    parser.add_argument("--soak", type=int, metavar="N", help="play N seeds and print only a failure")
    options = parser.parse_args()
    try:
        if options.soak is not None:
            seeds = range(options.seed, options.seed + options.soak)
            print(sim.soak(seeds, options.members, options.faults), "seeds, no invariant broken")
        else:
            print(sim.story(sim.run(sim.random_scenario(options.seed, options.members, options.faults))))
    except sim.Failure as failure:
        print(failure)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
