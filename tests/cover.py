"""Line and branch coverage of what decides: `python -m tests.cover`. Each file must have LEAST percent of both.

Measured are the quick tests, in this one process; what runs in processes of its own counts for nothing here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).parent.parent
FILES = (
    "inprocess/protocol/*.py",
    "inprocess/protocol/verbs/rounds.py",
    "inprocess/protocol/verbs/watching.py",
    "inprocess/protocol/verbs/joining.py",
    "inprocess/interrupt/gate.py",
    "inprocess/interrupt/signals.py",
    "inprocess/interrupt/frames.py",
    "inprocess/interrupt/atomic.py",
    "inprocess/interrupt/judging.py",
    "inprocess/monitor/policy.py",
    "inprocess/monitor/timeouts.py",
)
TESTS = (
    "tests/unit",
    "tests/sim",
    "tests/threads/test_interrupt.py",
    "tests/threads/test_interrupt_atomic.py",
    "tests/threads/test_parked.py",
)
#: percent
LEAST = 95.0


def measure(tests: Sequence[str], folder: Path) -> tuple[int, dict[str, Any]]:
    """Run the tests; answers pytest's exit code and, for each file, what was covered and what was not."""
    measuring = coverage.Coverage(
        data_file=None, config_file=False, branch=True, include=[str(ROOT / name) for name in FILES]
    )
    measuring.start()
    _unlock(measuring)
    try:
        code = pytest.main(["-q", "-p", "no:cacheprovider", *tests])
    finally:
        measuring.stop()
    report = folder / "coverage.json"
    measuring.json_report(outfile=str(report))
    return int(code), json.loads(report.read_text())["files"]


def _unlock(measuring: coverage.Coverage) -> None:
    """Take away the lock that coverage's tracer holds for a moment, in Python code, at each call.

    An interruption that is raised just there would leave it locked, and the next call would wait for ever. It guards
    a dictionary that several threads write to, which the interpreter lock does as well.
    """
    collector = measuring._collector
    assert collector is not None and collector.data_lock is not None, "another coverage than that of constraints.txt?"
    collector.data_lock = None


def shares(summary: dict[str, Any]) -> tuple[float, float]:
    """Percent of lines and of branches; a file without any is covered."""
    pairs = (("covered_lines", "num_statements"), ("covered_branches", "num_branches"))
    lines, branches = (100.0 * summary[have] / summary[all_] if summary[all_] else 100.0 for have, all_ in pairs)
    return lines, branches


def row(name: str, found: dict[str, Any]) -> str:
    lines, branches = shares(found["summary"])
    missing = [*map(str, found["missing_lines"]), *(f"{here}->{there}" for here, there in found["missing_branches"])]
    return f"{name:36} {lines:7.1f} {branches:9.1f}  {' '.join(missing)}".rstrip()


def main(arguments: Sequence[str]) -> int:
    """Print the table; 1 where a test failed or a file has less than it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.cover", description=__doc__)
    parser.add_argument("tests", nargs="*", default=TESTS, help="files and folders; default: the quick tests")
    with tempfile.TemporaryDirectory() as folder:
        code, files = measure(parser.parse_args(arguments).tests, Path(folder))
    print(f"{'file':36} {'lines %':>7} {'branches %':>9}  missing")
    for name, found in files.items():
        print(row(name, found))
    low = [name for name, found in files.items() if min(shares(found["summary"])) < LEAST]
    if low:
        print(f"below {LEAST:g} % of lines or branches: {', '.join(low)}")
    return 1 if code or low or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
