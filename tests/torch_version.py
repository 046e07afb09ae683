"""This library on the torch that is installed, and its rows for docs/versions.md: ``python -m tests.torch_version``.

The quick tier; the README's example; ten restarts of every kind of `tests.growth` with two ranks: nothing may be left
of them, and how long they take is told. `nox -s torch` does so for each version, in an environment of its own.
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import re
import shlex
import statistics
import sys
import time

import torch

from inprocess.testing.server import become_subreaper
from tests import growth
from tests.harness import Run, start_server
from tests.versions import ROOT, counts, run

RESTARTS, RANKS = 10, 2


def example() -> list[str]:
    """The arguments of the README's first command, behind the interpreter."""
    section = (ROOT / "README.md").read_text().partition("## Try it")[2]
    command = re.findall(r"```sh\n(.*?)\n```", section, re.DOTALL)[0].rpartition(".venv/bin/python ")[2]
    return shlex.split(command)


def look(kind: str) -> tuple[str, float]:
    """What is left of ten restarts ("" for nothing), and the median of their latencies in milliseconds."""
    ranks = growth.restart(Run, kind, RANKS, RESTARTS, every=1, deadline=120.0, memory=False, collect=False)
    left = "; ".join(growth.more_than_early(growth.numbers_of(ranks)))
    return left, statistics.median(growth.latencies(ranks)) * 1000


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_version", description=__doc__)
    parser.add_argument("--no-tests", action="store_true", help="leave the quick tier out")
    options, of_pytest = parser.parse_known_args(arguments)
    wrong, passed = [], "not run"
    if not options.no_tests:
        status, summary = run("-m", "pytest", "--quick", "-p", "no:cacheprovider", *of_pytest)
        passed = counts(summary)
        wrong += ["the quick tier"] * (status != 0)
    begin = time.monotonic()
    wrong += ["the README's example"] * (run(*example())[0] != 0)
    print(f"the README's example: {time.monotonic() - begin:.1f} s", flush=True)
    become_subreaper()
    start_server()
    cells = []
    for kind in growth.KINDS:
        try:
            left, milliseconds = look(kind)
        except AssertionError as error:  # the harness's own look at the end of the ranks
            left, milliseconds = str(error), math.nan
        wrong += [f"{kind}: {left}"] * bool(left)
        cells.append(f"{milliseconds:.0f}")
        print(f"{kind}: median {milliseconds:.0f} ms, {left or 'nothing is left'}", flush=True)
    today, build = datetime.date.today(), "CPU build" if torch.version.cuda is None else "CUDA build, no GPU"
    what = "the quick tier, the README's example, ten restarts of every kind"
    print(f"| {today} | {platform.python_version()} | {torch.__version__} | {what} ({build}) | {passed} |")
    print(f"| torch | {' | '.join(growth.KINDS)} |")
    print(f"| {torch.__version__} | {' | '.join(cells)} |")
    print("\n".join(wrong) or "nothing is wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
