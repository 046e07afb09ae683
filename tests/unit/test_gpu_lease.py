"""The lease of a machine with a GPU: what is run, what fits, what is read and written. No row runs here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import lease
from tests.gpu.lease import FAILED, LEFT_OUT, OVER, PASSED, ROWS, SKIPPED, Result, Row

LIBRARY = Path(lease.__file__).parents[2]


def row(name: str = "a", **more: object) -> Row:
    return Row(name, "something", ("-c", "pass"), **{"limit": 60.0, **more})  # type: ignore[arg-type]


def names(rows: list[Row]) -> list[str]:
    return [each.name for each in rows]


def test_rows_are_told_apart_and_teach_in_their_order():
    assert len(set(names(list(ROWS)))) == len(ROWS)
    assert names(list(ROWS[:4])) == ["exception", "kill", "hang in a kernel", "abort times"]
    assert all(each.least <= each.limit for each in ROWS)
    assert len({each.results for each in ROWS if each.results}) + 3 <= 8  # files that may come back


def test_rows_name_tests_that_are_there():
    nodes = [part for each in ROWS for part in each.command if part.startswith("tests/gpu/test_")]
    for node in nodes:
        file, _, test = node.partition("::")
        assert f"def {test.partition('[')[0]}(" in (LIBRARY / file).read_text(), node


def test_rows_are_chosen_by_name():
    rows = [row("a"), row("b"), row("c")]
    assert names(lease.choose(rows, [], "")) == ["a", "b", "c"]
    assert names(lease.choose(rows, ["c", "a"], "")) == ["a", "c"]
    assert names(lease.choose(rows, [], "b")) == ["b", "c"]
    with pytest.raises(ValueError, match="no row 'd'; rows are: a, b, c"):
        lease.choose(rows, [], "d")


@pytest.mark.parametrize(
    ("more", "device", "left", "outcome"),
    [
        ({}, "cuda", 60, ""),
        ({}, "cuda", 25, ""),
        ({}, "cuda", 24, LEFT_OUT),
        ({"limit": 5.0}, "cuda", 6, ""),
        ({"cuda": True}, "cpu", 60, SKIPPED),
        ({"cuda": True}, "cuda", 60, ""),
        ({"module": "json.nothing"}, "cuda", 60, SKIPPED),
        ({"module": "json.decoder"}, "cuda", 60, ""),
    ],
)
def test_what_is_not_begun(more, device, left, outcome):
    assert lease.why_not(row(**more), device, left)[0] == outcome


OUTPUT = """\
a rank's own line
.LEASE {"abort_ms": [30.5]}
LEASE broken
PASSED tests/gpu/test_a.py::test_one[of the function-2]
FAILED tests/gpu/test_a.py::test_two - AssertionError: sum 3
SKIPPED [1] tests/gpu/test_a.py:12: this torch has no nccl2
XFAIL tests/gpu/test_a.py::test_three - nothing ends it
==== 1 failed, 1 passed, 1 skipped, 1 xfailed in 12.34s ====
"""


def test_what_is_read():
    result = Result("a", FAILED)
    lease.read(result, OUTPUT)
    assert result.figures == [{"abort_ms": [30.5]}]
    assert result.tests == {
        "test_a.py::test_one[of the function-2]": "passed",
        "test_a.py::test_two": "failed: AssertionError: sum 3",
        "test_a.py:12": "skipped: this torch has no nccl2",
        "test_a.py::test_three": "xfail: nothing ends it",
    }
    assert result.note == "1 failed, 1 passed, 1 skipped, 1 xfailed"
    assert result.tail.endswith("in 12.34s ====")


@pytest.mark.parametrize(
    ("summary", "outcome"), [("2 skipped in 0.10s", SKIPPED), ("=== 1 passed, 2 skipped in 1.00s ===", PASSED)]
)
def test_a_row_of_which_nothing_ran_is_skipped(summary, outcome):
    result = Result("a", PASSED)
    lease.read(result, summary)
    assert (result.outcome, result.tail) == (outcome, "")


def test_results_of_a_benchmark(tmp_path):
    path = tmp_path / "benchmark.json"
    result = Result("a", PASSED)
    lease.read_file(result, path)  # not there
    path.write_text(json.dumps({"entries": {"restart kill": {"values": {"total": [40]}, "stderr": "long"}}}))
    lease.read_file(result, path)
    assert result.figures == [{"entry": "restart kill", "values": {"total": [40]}}]


def test_the_page():
    results = [
        Result("a", PASSED, 4.5, "1 passed", {"t": "passed"}, [{"ms": 3}]),
        Result("b", OVER, 60, tail="the last ```line```"),
        Result("c", LEFT_OUT, note="3 s are left"),
    ]
    page = lease.page({"gpus": ["a card"], "driver": ""}, [row("a"), row("b"), row("c")], results)
    assert "* gpus: ['a card']" in page and "driver" not in page
    assert "| a | something | passed | 4.5 | 1 passed |" in page
    assert "| c | something | left out | 0 | 3 s are left |" in page
    assert '## a\n\n* `{"ms": 3}`\n' in page
    assert "## b\n\n\n```text\nthe last '''line'''\n```" in page
    assert "## c" not in page
