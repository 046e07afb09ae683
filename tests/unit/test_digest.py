"""What of a process's events travels through the store: at most 4 kB, the most important first, whatever is in them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inprocess.events.digest import MAX_BYTES, cut, lines_of
from inprocess.events.record import KINDS, Event, Header, parse

JOB = "job"
ENTRY = "/lib/inprocess/call/loop.py:80 in _run"


def _header(role: str = "rank", job: str = JOB) -> Header:
    return Header(job, role, 2, 99, host="far", time=1.0, wall_time=2.0)


def _event(kind: str, time: float = 1.0, **attributes: Any) -> Event:
    return Event(time, time, 0, 0, 2, 2, "run", kind, attributes)


def _frames(number: int, long: int = 0) -> list[dict[str, Any]]:
    frames = [f"file{'x' * long}.py:{line} in f" for line in range(number)]
    return [
        {"name": "other", "main": False, "frames": ["never"] * 40},
        {"name": "MainThread", "main": True, "frames": [*frames, ENTRY, "/train.py:1 in <module>"]},
    ]


def _events(data: bytes) -> list[Event]:
    found = [parse(line) for line in data.splitlines()]
    return [each for each in found if isinstance(each, Event)]


def test_what_a_report_needs_is_there_in_order() -> None:
    cause = {"rank": 0, "interruption": "exception", "initial_rank": 0, "message": "ValueError: x"}
    rank = [
        _event("call", 0.5),
        _event("interrupted", 1.0, cause=cause),
        _event("stacks", 1.1, threads=_frames(3), where="file.py:0 in f", waits=True, pings=7),
        _event("restart", 1.2, restart=1, why="w" * 4000, records=[cause] * 100, pings=7, kept=3, world_size=3),
        _event("run", 1.3, world_size=3, before=3, reserve=False),
    ]
    monitor = [_event("no_progress", 0.9, record=cause, silent_for=3.0)]
    data = cut([(_header(), rank), (_header("monitor"), monitor)])
    assert len(data) <= MAX_BYTES
    found = _events(data)
    assert [event.kind for event in found] == ["interrupted", "stacks", "restart", "run", "no_progress"]
    assert found[0].attributes == {"cause": cause}
    (thread,) = found[1].attributes["threads"]
    assert thread == {"name": "MainThread", "main": True, "frames": [f"file.py:{line} in f" for line in range(3)]}
    assert found[2].attributes == {"restart": 1, "pings": 7, "kept": 3, "world_size": 3}
    header, lines = lines_of(data, JOB)
    assert header == _header()
    assert b"".join(lines) == data


@pytest.mark.parametrize("number", [0, 1, 16, 17, 1000])
@pytest.mark.parametrize("long", [0, 100, 100_000])
@pytest.mark.parametrize("text", ["", "é" * 5000, "\x00" * 5000, '"' * 100_000])
def test_nothing_is_longer_than_it_may_be(number: int, long: int, text: str) -> None:
    """The innermost line of the main thread is there in any case."""
    hostile = {
        "message": text,
        "where": text,
        "lines": [text] * 1000,
        "record": {text + str(i): text for i in range(99)},
    }
    events = [_event(kind, threads=_frames(number, long), text=text, cause=[[[[text]]]], **hostile) for kind in KINDS]
    data = cut([(_header(), events), (_header("monitor"), events)])
    assert 0 < len(data) <= MAX_BYTES
    kinds = {event.kind for event in _events(data)}
    assert "died" in kinds
    if not text and not long:
        (stacks, *_) = [event for event in _events(data) if event.kind == "stacks"]
        frames = stacks.attributes["threads"][0]["frames"]
        assert frames[:1] == ["file.py:0 in f"][:number] or number == 0
        assert len(frames) <= 16


@pytest.mark.parametrize("threads", [None, 3, "x", [1, None], [{"main": True}], [{"main": True, "frames": 3}]])
def test_stacks_that_are_none(threads: object) -> None:
    (event,) = _events(cut([(_header(), [_event("stacks", threads=threads, where="here")])]))
    assert event.attributes == {"threads": [], "where": "here"}


@pytest.mark.parametrize("limit", [0, 100, 300, 500, 1000])
def test_other_limits(limit: int) -> None:
    events = [_event(kind, time) for kind in KINDS for time in (1.0, 2.0)]
    assert len(cut([(_header(), events)], limit)) <= limit


def test_a_header_without_room_for_its_events() -> None:
    assert cut([(_header(job="j" * 5000), [_event("died", how="killed")])]) == b""
    assert cut([(_header(), [])]) == b""


def test_the_latest_incident_comes_first() -> None:
    long = {"message": "m" * 290, "where": "w" * 290}
    data = cut([(_header(), [_event("raised", float(time), **long) for time in range(50)])])
    times = [event.time for event in _events(data)]
    assert times == sorted(times)
    assert times[-1] == 49.0
    assert times[0] > 40.0


@pytest.mark.parametrize(
    "data",
    [b"x", b"{}", b"\xff\n", b"[" * 4000, cut([(_header(), [_event("died")])]) * 30, json.dumps([1]).encode()],
)
def test_what_is_no_digest(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        lines_of(data, JOB)


def test_a_digest_of_another_job_is_not_kept() -> None:
    assert lines_of(cut([(_header(job="other"), [_event("died")])]), JOB) == (None, [])
