"""docs/report.md names what the reports have."""

from __future__ import annotations

from pathlib import Path

from inprocess.reports.incident import PHASES
from inprocess.reports.verdict import CLASSES

PAGE = (Path(__file__).parents[2] / "docs/report.md").read_text()


def names_in(begin: str) -> list[str]:
    """The first cells of the table that comes next after this text."""
    table = PAGE.partition(begin)[2].partition("| ---")[2].partition("\n\n")[0]
    return [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]


def test_classes() -> None:
    assert names_in("## Classes") == list(CLASSES)


def test_phases() -> None:
    assert names_in("## One incident") == list(PHASES)
