"""The session: each mutant in a copy of the sources, against the tests that should notice it.

First the same tests run on the sources as they are, or a failure would prove nothing. A mutant is killed by a test that
fails; a survivor, a stale snippet, and a run that ends in any other way make the session fail.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from tests.mutants import Mutant
from tests.mutants.catalog import MUTANTS
from tests.mutants.runner import Job, run

#: seconds for one run of pytest, and for the tests of all mutants together on unbroken sources
PER_RUN, PER_CHECK = 240, 1800
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?::\w+(?:\[.*?\])?)(?: - (.*))?$", re.MULTILINE)


def judge(code: int | None, output: str) -> tuple[str, str]:
    """The test that failed and how; no test: what happened instead."""
    failed = _FAILED.search(output)
    if code == 1 and failed:
        return failed[1], failed[2] or ""
    if code == 0:
        return "", "SURVIVED"
    ended = f"not ended after {PER_RUN} s" if code is None else f"pytest ended with {code}"
    return "", f"{ended}: {output[-2000:]}"


class Breakage(Protocol):
    """A mutant: one that was written by hand, or one that was generated."""

    @property
    def name(self) -> str: ...
    @property
    def rule(self) -> str: ...
    @property
    def tests(self) -> tuple[str, ...]: ...
    def apply(self, root: Path) -> None: ...


def check(mutants: Iterable[Breakage]) -> bool:
    """Whether the tests of these mutants pass on the sources as they are."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    (job,) = run([Job(lambda folder: None, tests, PER_CHECK)], 1)
    print(f"without a mutant: {job.output.splitlines()[-1]}" if job.code == 0 else job.output, flush=True)
    if job.code != 0:
        print("these tests do not pass without any mutant")
    return job.code == 0


def show(job: Job) -> bool:
    """Print what became of a mutant; whether it was killed."""
    mutant: Breakage = job.about
    test, why = judge(job.code, job.output)
    print(f"{mutant.name:30} {job.seconds:6.1f} s  {mutant.rule}")
    print(f"{'':30} {'':8}  {test or 'NOT KILLED'}: {why}".rstrip(": "), flush=True)
    return bool(test)


def survivors(mutants: Iterable[Breakage], at_a_time: int) -> list[Breakage]:
    """Try all, and print what became of each; those that were not killed."""
    os.environ["COLUMNS"] = "160"  # for the last words of pytest
    jobs = (Job(mutant.apply, mutant.tests, PER_RUN, mutant) for mutant in mutants)
    return [job.about for job in run(jobs, at_a_time) if not show(job)]


def chosen(names: Sequence[str]) -> list[Mutant]:
    """Mutants whose name, file or test contains one of these; all where none is given."""
    return [
        mutant
        for mutant in MUTANTS
        if not names or any(name in f"{mutant.name} {mutant.edits[0].file} {mutant.tests}" for name in names)
    ]


def main(arguments: Sequence[str]) -> int:
    """Print what became of each mutant; 1 where one was not killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="only mutants whose name, file or test contains one of these")
    parser.add_argument("--at-a-time", type=int, default=2, help="how many; default 2")
    parser.add_argument("--no-check", action="store_true", help="do not run the tests on unbroken sources first")
    options = parser.parse_args(arguments)
    begin, mutants = time.monotonic(), chosen(options.names)
    if not options.no_check and not check(mutants):
        return 1
    alive = [mutant.name for mutant in survivors(mutants, options.at_a_time)]
    minutes = (time.monotonic() - begin) / 60
    print(f"{len(mutants) - len(alive)} of {len(mutants)} mutants killed in {minutes:.0f} min", end="")
    print(f"; alive: {', '.join(alive)}" if alive else "")
    return 1 if alive or not mutants else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
