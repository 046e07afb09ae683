"""Interruption records: readable in one line, and nothing unchecked comes in from JSON."""

from __future__ import annotations

import json

import pytest

from inprocess.attribution import Interruption, InterruptionRecord

FULL = InterruptionRecord(2, Interruption.EXCEPTION, 3, "ValueError: loss is nan", "train.py:41 in step")


@pytest.mark.parametrize("record", [FULL, *(InterruptionRecord(0, kind) for kind in Interruption)])
def test_json_and_back(record: InterruptionRecord) -> None:
    assert InterruptionRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (FULL, "rank 2 (initially 3): raised an exception: ValueError: loss is nan [train.py:41 in step]"),
        (
            InterruptionRecord(2, Interruption.TERMINATED, 2, "killed\nby SIGKILL"),
            "rank 2: process died: killed by SIGKILL",
        ),
        (InterruptionRecord(0, Interruption.UNRESPONSIVE), "rank 0: does not answer"),
    ],
)
def test_one_line(record: InterruptionRecord, line: str) -> None:
    assert str(record) == line


def test_every_kind_has_words() -> None:
    assert all(str(InterruptionRecord(0, kind)) for kind in Interruption)


def test_long_texts_are_cut() -> None:
    record = InterruptionRecord(0, Interruption.EXCEPTION, message="m" * 5000, where="w" * 5000)
    assert (len(record.message), len(record.where)) == (500, 200)
    assert record.message.endswith("m...")


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
