"""A monitor and evidence that travels through the store: what is sent, what is kept, and where neither can be."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from inprocess.events import relay
from inprocess.events.digest import MAX_BYTES, cut
from inprocess.events.files import EventFile
from inprocess.events.record import Event, Header
from inprocess.events.relay import Relay
from inprocess.exception import StoreLost
from inprocess.monitor.configuration import MonitorConfig
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.reports.reading import read
from inprocess.stores import serving
from inprocess.stores.connecting import connect
from inprocess.stores.driver import execute
from inprocess.stores.spec import StoreSpec
from inprocess.system import clock

JOB, PID = "job", 4711
WAIT_S = 10.0


class Base:
    """The store, and how often it was asked for a connection."""

    def __init__(self) -> None:
        self.server = serving.serve("127.0.0.1", 0)
        self.store = connect(StoreSpec(port=self.server.port, prefix="call"), 5)
        self.connections = 0

    def use(self, action: Any) -> object:
        self.connections += 1
        return action(self.store)


@pytest.fixture
def base() -> Iterator[Base]:
    made = Base()
    yield made
    del made.store, made.server  # pytest keeps the rest for longer


def _membership(member: int, *roster: int) -> Membership:
    return Membership(member, roster or (0, 1, 2), iteration=0)


class _Due(Relay):
    """Whose monitor's timers strike at once."""

    def happened(self, *what: Any) -> None:
        super().happened(*what)
        self.send()
        self.fetch()


def _relay(member: int, run_dir: Path, with_store: Any, kind: type[Relay] = _Due) -> Relay:
    roster = (0, 1, 2)
    config = MonitorConfig(
        member=member, roster=roster, rank=member, store="", run_dir=str(run_dir), job=JOB, training_pid=PID
    )
    return kind(config, with_store)


def _write(run_dir: Path, rank: int, *kinds: str, job: str = JOB) -> Header:
    header = Header(job, "rank", rank, PID)
    file = EventFile(str(run_dir), header)
    for kind in kinds:
        file.write(Event(clock.monotonic(), clock.wall(), 0, 0, rank, rank, "run", kind, {}))
    file.close()
    return header


def _wait(*threads: threading.Thread | None) -> None:
    for thread in threads:
        assert thread is not None
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_from_one_directory_to_another(base: Base, tmp_path: Path) -> None:
    for rank in range(3):
        _write(tmp_path / str(rank), rank, "interrupted")
    ones = [_relay(member, tmp_path / str(member), base.use) for member in range(3)]
    for member in (1, 2):
        ones[member].happened(0, _membership(member), _membership(member, 0, 1), {2})
        _wait(ones[member]._sends)
    _wait(ones[1]._fetches)
    ones[0].happened(0, _membership(0), _membership(0, 0, 1), {2})
    _wait(ones[0]._fetches, ones[0]._sends)
    names = {name for name in os.listdir(tmp_path / "0" / "events") if name.startswith("relayed-")}
    assert {name.split("-")[1] for name in names} == {"1", "2"}
    before = {name: (tmp_path / "0" / "events" / name).read_bytes() for name in names}
    # what is there already is not added, and the digest of who has gone goes
    ones[0].happened(1, _membership(0, 0, 1), _membership(0, 0, 1), ())
    _wait(ones[0]._fetches)
    assert {name: (tmp_path / "0" / "events" / name).read_bytes() for name in names} == before
    assert execute(verbs.read_digest(2), base.store) == b""
    assert len(execute(verbs.read_digest(1), base.store)) <= MAX_BYTES


def test_a_shared_directory_needs_no_store(base: Base, tmp_path: Path) -> None:
    for rank in range(3):
        _write(tmp_path, rank, "interrupted")
    for member in range(3):
        one = _relay(member, tmp_path, base.use)
        one.happened(0, _membership(member), _membership(member), {2})
        _wait(one._sends, one._fetches)
    assert base.connections == 0


def test_files_of_another_job_are_not_those_of_this_one(base: Base, tmp_path: Path) -> None:
    _write(tmp_path, 2, "interrupted")
    for rank in (0, 1):
        _write(tmp_path, rank, "interrupted", job="before")
    one = _relay(2, tmp_path, base.use)
    one.happened(0, _membership(2), _membership(2), ())
    _wait(one._sends, one._fetches)
    assert base.connections == 2  # one to send, one to fetch
    assert execute(verbs.read_digest(2), base.store)


def test_how_a_rank_died_is_sent_before_its_monitor_ends(base: Base, tmp_path: Path) -> None:
    _write(tmp_path / "2", 2, "interrupted")
    one = _relay(2, tmp_path / "2", base.use, Relay)
    one.happened(0, _membership(2), None, {2})
    assert one._sends is None  # nothing begins while the restart goes on
    one.leave()
    _wait(one._sends)
    assert b'"interrupted"' in execute(verbs.read_digest(2), base.store)
    assert one._fetches is None


def test_a_store_that_is_lost_or_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "LEAVE_S", 0.05)
    answers, released = [StoreLost("gone")], threading.Event()

    def with_store(action: Any) -> None:
        if answers:
            raise answers.pop()
        released.wait(WAIT_S)

    _write(tmp_path, 2, "interrupted")
    one = _relay(2, tmp_path, with_store)
    one.happened(0, _membership(2), None, {2})
    _wait(one._sends)
    one.happened(0, _membership(2), None, {2})
    stuck = one._sends
    begin = clock.monotonic()
    one.happened(1, _membership(2), None, {2})  # no second thread waits
    one.leave()
    assert one._sends is stuck
    assert clock.monotonic() - begin < WAIT_S / 2
    released.set()
    _wait(stuck)


@pytest.mark.parametrize(
    "value",
    ["x", "{}", "\xff", "[" * 4000, "y" * 100_000, cut([(Header("other", "rank", 1, 1), [])]).decode()],
    ids=["text", "object", "no ascii", "deep", "long", "nothing"],
)
def test_a_digest_of_somebody_else(base: Base, tmp_path: Path, value: str) -> None:
    _write(tmp_path, 0, "interrupted")
    execute(verbs.publish_digest(1, value), base.store)
    one = _relay(0, tmp_path, base.use)
    one.happened(0, _membership(0), _membership(0), ())
    _wait(one._fetches, one._sends)
    assert len(os.listdir(tmp_path / "events")) == 1


def test_without_a_directory_nothing_happens(base: Base) -> None:
    config = MonitorConfig(member=0, roster=(0, 1), rank=0, store="", run_dir=None)
    one = Relay(config, base.use)
    one.happened(0, _membership(0, 0, 1), _membership(0, 0, 1), {0})
    one.leave()
    assert one._sends is one._fetches is None


def test_a_file_that_is_full_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process's own one is; nothing that was set aside is written twice."""
    monkeypatch.setattr(relay, "MAX_FILE_BYTES", 1000)
    one, header = _relay(0, tmp_path, None), Header(JOB, "rank", 9, PID, host="far")
    events = [Event(float(time), float(time), 0, 0, 9, 9, "run", "died", {"how": "x" * 100}) for time in range(12)]
    for now, following in pairwise(events):
        one._keep(cut([(header, [now, following])]))
    names = sorted(os.listdir(tmp_path / "events"))
    assert names == ["relayed-9-far-4711.jsonl", "relayed-9-far-4711.jsonl.1"]
    ((trail,), problems) = read(str(tmp_path))
    found = [entry.event.time for entry in trail.entries]
    assert problems == [] and found == sorted(set(found)) and found[-1] == 11.0
