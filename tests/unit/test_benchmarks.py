"""The benchmarks' tables say what was measured, also where a contender fails."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import report, restart, tails
from benchmarks.__main__ import machine
from benchmarks.plan import CASES, OURS, PHASES, Case

CASE = next(case for case in CASES if case.label == "4 ranks, in an all-reduce")


def run(entry: float | None, note: str = "") -> dict[str, Any]:
    if entry is None:
        return {"values": {}, "note": note}
    phases = dict.fromkeys(PHASES, 0.0) | {"detect": entry}
    return {"values": {"entry": entry, "reduced": entry + 5}, "phases": phases, "note": ""}


def results(**contenders: list[dict[str, Any]]) -> dict[str, Any]:
    entries = {name: report.condense(runs) for name, runs in contenders.items()}
    return {"machine": {}, "cases": {report.key(CASE): entries}}


def test_median_spread_ratio_and_target() -> None:
    found = results(inprocess=[run(20), run(10), run(30)], peer=[run(1000), run(3000), run(2000)])
    ours, peer = report.rows(found, [CASE])
    assert ours[2:] == ["**20** (10 to 30)", "**25** (15 to 35)", "", "25 met, 40 met"]
    assert peer[2:] == ["**2,000** (1,000 to 3,000)", "**2,005** (1,005 to 3,005)", "100x", ""]


def test_a_missed_target_is_said() -> None:
    ((*_, verdict),) = report.rows(results(inprocess=[run(26)]), [CASE])
    assert verdict == "25 MISSED, 40 met"


def test_a_contender_that_fails_is_described_not_dropped() -> None:
    found = results(
        inprocess=[run(20)], stuck=[run(None, "kills healthy ranks [0]")] * 3, some=[run(9), run(None, "x")]
    )
    _, other, some = report.rows(found, [CASE])
    assert other[2] == "kills healthy ranks [0]"
    assert some[2] == "**9** (9 to 9); 1 of 2 fail"


@pytest.mark.parametrize("case", CASES, ids=report.key)
def test_plan(case: Case) -> None:
    """Every case has its own name, a script with columns, and this library in it."""
    assert [report.key(other) for other in CASES].count(report.key(case)) == 1
    assert case.script in report.COLUMNS
    assert OURS in case.contenders + case.stuck


@pytest.mark.parametrize("case", CASES, ids=report.key)
def test_tables_of_one_case(case: Case) -> None:
    """As with ``--only``."""
    values = dict.fromkeys([*report.COLUMNS[case.script], "store_wall"], 1.0)
    entry = report.condense([{"values": values, "note": ""}])
    assert "1" in report.tables({"machine": {}, "cases": {report.key(case): {OURS.name: entry}}})


def test_all_tables_of_what_is_there() -> None:
    text = report.tables(results(inprocess=[run(20)]))
    assert "| 4 ranks, in an all-reduce | inprocess | **20** (20 to 20) |" in text


def test_tails() -> None:
    """Of 200 restarts the slowest three: two waited in one phase, one in another. The new group comes later."""
    runs = [run(10.0) for _ in range(197)] + [run(40.0), run(60.0), run(50.0)]
    runs[-1]["phases"] |= {"detect": 10.0, "end round": 40.0, "new group": 1000.0}
    assert tails.row("label", runs) == [
        "label",
        "200",
        "10",
        "10",
        "40",
        "60",
        "detect: 2 (+50 ms), end round: 1 (+40 ms)",
    ]


@pytest.mark.parametrize(("share", "value"), [(0.5, 2), (0.51, 3), (0.99, 4), (1.0, 4), (0.25, 1)])
def test_quantile(share: float, value: float) -> None:
    assert tails.quantile([4, 1, 3, 2], share) == value


def test_rows_of_several_days() -> None:
    """What was measured again alone does not make the others younger."""
    today = machine()["date"]
    assert machine(today)["date"] == today
    assert machine("2026-01-02")["date"] == machine("2026-01-02 to 2026-02-03")["date"] == f"2026-01-02 to {today}"


@pytest.mark.parametrize("arguments", ["--setting tree", "--setting tree --library nvrx --spares 1"])
def test_a_tree_needs_a_reserve_and_this_library(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        restart.parsed(arguments.split())
    assert "--setting tree needs --library inprocess and --spares 1" in capsys.readouterr().err
