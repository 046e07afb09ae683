"""Interruption records: readable in one line, and nothing unchecked comes in from JSON."""

from __future__ import annotations

import json

import pytest

from inprocess.attribution import Interruption, InterruptionRecord, summary

FULL = InterruptionRecord(2, Interruption.EXCEPTION, 3, "ValueError: loss is nan", "train.py:41 in step", 7)


@pytest.mark.parametrize("record", [FULL, *(InterruptionRecord(0, kind) for kind in Interruption)])
def test_json_and_back(record: InterruptionRecord) -> None:
    assert InterruptionRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (FULL, "rank 2 (initial rank 3): raised an exception: ValueError: loss is nan [train.py:41 in step]"),
        (
            InterruptionRecord(2, Interruption.TERMINATED, 2, "killed\nby SIGKILL"),
            "rank 2: process died: killed by SIGKILL",
        ),
        (InterruptionRecord(0, Interruption.UNRESPONSIVE), "rank 0: did not answer"),
    ],
)
def test_one_line(record: InterruptionRecord, line: str) -> None:
    assert str(record) == line


def test_every_kind_has_words() -> None:
    assert all(str(InterruptionRecord(0, kind)) for kind in Interruption)


def test_long_texts_are_cut() -> None:
    """Their beginning and their end are shown: an error often says last what is wrong."""
    record = InterruptionRecord(0, Interruption.EXCEPTION, message="E: " + "m" * 5000 + " the end", where="w" * 5000)
    assert (len(record.message), len(record.where)) == (500, 200)
    assert record.message.startswith("E: mm") and "m...m" in record.message and record.message.endswith("m the end")
    assert "m the end" in summary([record]) and len(summary([record])) < 400


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rank": "1"}, "rank"),
        ({"rank": -1}, "rank"),
        ({"rank": True}, "rank"),
        ({"rank": None}, "rank"),
        ({"initial_rank": 1.5}, "initial_rank"),
        ({"interruption": "sleepy"}, "interruption"),
        ({"interruption": 3}, "interruption"),
        ({"interruption": ["exception"]}, "interruption"),
        ({"message": None}, "message"),
        ({"where": 3}, "where"),
        ({"pings": -1}, "pings"),
        ({"pings": True}, "pings"),
        ({"who": 3}, "who"),
        ({1: 3}, "1"),
    ],
)
def test_wrong_fields_are_named(change: dict, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        InterruptionRecord.from_dict({**FULL.to_dict(), **change})


@pytest.mark.parametrize("data", [None, [], "x", {}, {"rank": 1}, {"interruption": "exception"}])
def test_no_record_at_all(data: object) -> None:
    with pytest.raises(ValueError, match="interruption record"):
        InterruptionRecord.from_dict(data)


def test_a_record_is_made_of_an_interruption() -> None:
    with pytest.raises(ValueError, match="interruption"):
        InterruptionRecord(0, "exception")


def record(rank: int, kind: Interruption, message: str = "", where: str = "", initial: int | None = None):
    initial = rank if initial is None else initial
    return InterruptionRecord(rank, kind, initial_rank=initial, message=message, where=where)


def test_summary_names_the_cause_and_counts_who_saw_it():
    records = [
        record(0, Interruption.EXCEPTION, "RuntimeError: Connection closed by peer"),
        record(2, Interruption.TERMINATED, "killed by SIGKILL"),
    ]
    assert summary(records, 4) == "rank 2 process died: killed by SIGKILL (also reported by 3 ranks)"


def test_summary_tells_a_first_exception_from_its_echo():
    records = [
        record(0, Interruption.EXCEPTION, "RuntimeError: Connection reset by peer"),
        record(1, Interruption.EXCEPTION, "ValueError: nan", "/a/b/train.py:7 in step"),
    ]
    assert (
        summary(records) == "rank 1 raised an exception: ValueError: nan [train.py:7 in step] (also reported by 1 rank)"
    )


def test_summary_of_a_request():
    request = record(1, Interruption.REQUESTED, "the loss is too high", "/a/b/train.py:7 in step")
    echo = record(0, Interruption.EXCEPTION, "RuntimeError: Connection closed by peer")
    assert summary([echo, request]) == (
        "rank 1 asked for a restart: the loss is too high [train.py:7 in step] (also reported by 1 rank)"
    )


def test_summary_joins_ranks_that_report_the_same():
    records = [record(rank, Interruption.EXCEPTION, "OSError: disk", initial=rank + 1) for rank in (1, 0)]
    assert summary(records) == "ranks 0, 1 (initial ranks 1, 2) raised an exception: OSError: disk"


def test_summary_of_silence_accuses_nobody():
    records = [record(rank, Interruption.SOFT_TIMEOUT, "no progress for 2 s") for rank in (1, 0)]
    assert summary(records, 3) == "no progress for 2 s; first noticed on ranks 0, 1"


def test_summary_of_an_error_for_which_the_others_waited():
    """Its clean-up waited for them, until nobody had made progress for long."""
    silence = [record(rank, Interruption.SOFT_TIMEOUT, "no progress for 2 s") for rank in (0, 1)]
    error = record(1, Interruption.EXCEPTION, "ValueError: nan", "/a/b/train.py:7 in step")
    assert summary([*silence, error], 3) == (
        "rank 1 raised an exception: ValueError: nan [train.py:7 in step] (also reported by 2 ranks)"
    )


def test_summary_without_records_or_with_only_echoes():
    assert summary([]) == "interrupted"
    assert summary([record(0, Interruption.EXCEPTION, "connection closed by peer")]).startswith("rank 0 raised")
