"""The main thread of a monitor, one event at a time, without the process around it."""

from __future__ import annotations

import os
import queue
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inprocess.monitor import events, program
from inprocess.monitor.board import LEASE, WATCHED, Board
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.dying import DyingRank
from inprocess.protocol.membership import Membership
from inprocess.protocol.phases import Phase


class Monitor(program.Monitor):
    """Of rank 1 of 2, which is this process; the link to the store has not been started."""

    @property
    def shows(self) -> bool:
        """Whether it says on the board that it is there."""
        self._board.slots[WATCHED] = 0
        self._protect()
        return bool(self._board.slots[WATCHED])


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitor]:
    for name in ("locate", "observers"):
        monkeypatch.setattr(program, name, _Nothing())
    monkeypatch.setattr(DyingRank, "await_them", lambda self, dying: None)
    board, training = Board.create(), os.pidfd_open(os.getpid())
    ours, theirs = socket.socketpair()
    config = MonitorConfig(member=1, rank=1, roster=(0, 1), store="", training_pid=os.getpid())
    made = Monitor(config, board, ours, training)
    yield made
    for fd in (training, made._wake):
        os.close(fd)
    for connection in (ours, theirs):
        connection.close()
    board.close()


class _Nothing:
    """Does nothing, and so does whatever it has."""

    def __call__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> _Nothing:
        return self


def test_a_second_connection_leaves_it_on_the_watch(monitor: Monitor) -> None:
    """The store may go away while the job is founded. Taken for one that hangs, a healthy monitor was killed."""
    assert not monitor.shows
    monitor._on_event(events.Connected())
    assert not monitor.shows
    monitor._on_event(events.Joined())
    assert monitor.shows
    monitor._on_event(events.Connected())
    assert monitor.shows


def test_the_rank_moves_where_the_others_had_gone_on_without_it(monitor: Monitor) -> None:
    monitor._link.membership = Membership.founder(1, (0,), 2)
    monitor._on_bye("moved", "")
    assert monitor._exit == program.DONE


@pytest.mark.parametrize("lease, told", [(1, True), (0, False)])
def test_it_says_why_the_rank_has_ended_itself(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch, caplog: Any, lease: int, told: bool
) -> None:
    """The rank itself writes nothing: its standard error may block."""
    monkeypatch.setattr(DyingRank, "status", lambda self: int(signal.SIGKILL))
    monkeypatch.setattr(Monitor, "_go_on_without", lambda self, seen, how: None)
    monitor._board.begin(0)
    monitor._board.enter(Phase.RUN)
    monitor._board.slots[LEASE] = lease
    monitor._on_death()
    assert ("was cut off or stood still for too long; the others go on without it" in caplog.text) is told


def test_it_gives_memory_back_before_it_asks_for_any(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank dies in a full memory cgroup: the kernel ended the monitor, too, and nobody told the others."""
    monkeypatch.undo()
    monkeypatch.setattr(Board, "await_end", lambda self: True)
    before, seen = _resident(), queue.SimpleQueue[int]()
    dying = DyingRank(monitor._config, monitor._board, monitor._training)
    taken = _resident()
    dying.await_them(lambda: seen.put(_resident()))
    assert taken - before > 768
    assert taken - seen.get(timeout=10) > 768


def _resident() -> int:
    """Memory of this process that counts (kB)."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
