"""How long the slowest restarts take, and in which phase: ``python -m benchmarks.tails`` prints a table of some rows.

Each restart is one fault in a new job, as in ``benchmarks.restart``. A restart counts as slow from the 99th percentile
on; its phase is the one that took the most beyond the median of that phase.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from benchmarks import report
from benchmarks.__main__ import Scripts
from benchmarks.job import here
from benchmarks.plan import HANG, OURS, Case

ROWS = {
    "4 ranks, one raises, in a Python loop": "--fault raise",
    "4 ranks, one raises, in an all-reduce": "--fault raise --where allreduce",
    "4 ranks, one is killed, in a Python loop": "--fault kill",
    "4 ranks, one is killed, in an all-reduce": "--fault kill --where allreduce",
    "8 ranks, Tree, one is killed, a reserve takes its place": (
        "--world-size 8 --spares 1 --setting tree --fault kill --where allreduce"
    ),
}
HEADINGS = ("fault", "restarts", "median", "p90", "p99", "longest", "where the slowest waited")


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not exceeded by more than ``1 - share`` of them."""
    return sorted(values)[max(0, -(-round(share * 1000) * len(values) // 1000) - 1)]


def waited(results: Sequence[Mapping[str, Any]]) -> str:
    """The phases in which the slowest one in a hundred took longer than is usual, and by how much (ms)."""
    usual = {
        name: statistics.median(result["phases"].get(name, 0.0) for result in results) for name in results[0]["phases"]
    }
    bound = quantile([result["values"]["entry"] for result in results], 0.99)
    found: Counter[str] = Counter()
    most: dict[str, float] = {}
    for result in results:
        if result["values"]["entry"] >= bound:
            # the last phase comes after the entry
            more = {name: result["phases"][name] - usual[name] for name in usual if name != "new group"}
            phase = max(more, key=more.__getitem__)
            found[phase] += 1
            most[phase] = max(most.get(phase, 0.0), more[phase])
    return ", ".join(f"{phase}: {count} (+{most[phase]:.0f} ms)" for phase, count in found.most_common())


def row(label: str, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """One row of the table; times from the fault to the entry on the last rank (ms)."""
    entries = [result["values"]["entry"] for result in results]
    shares = [quantile(entries, share) for share in (0.5, 0.9, 0.99, 1.0)]
    return [label, str(len(entries)), *map(report.number, shares), waited(results)]


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restarts", type=int, default=200, help="of each row (default 200)")
    parser.add_argument("--only", default="", help="a word that the row's name contains")
    given = parser.parse_args()
    body = []
    with closing(Scripts(here())) as scripts:
        for label, arguments in ROWS.items():
            if given.only not in label:
                continue
            begin = time.monotonic()
            case = Case("tails", label, "restart", f"{arguments} --limit {HANG}", {})
            results = [scripts.run(case, OURS, number) for number in range(given.restarts)]
            lost = [result["note"] for result in results if not result["values"]]
            print(f"{label}: {time.monotonic() - begin:.0f} s", *lost, sep="\n  ", flush=True)
            if whole := [result for result in results if result["values"]]:
                body.append(row(label, whole))
    print(report.table(HEADINGS, body))


if __name__ == "__main__":
    run()
