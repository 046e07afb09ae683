"""The lease as the training process sees it: what does not begin once it has run out."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from inprocess.call.user_code import UserCode
from inprocess.call_wrapper import CallWrapper, Controls
from inprocess.interrupt.gate import Gate
from inprocess.interrupt.signals import Interrupter
from inprocess.monitor import lease
from inprocess.monitor.board import LEASE, Board
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.events import Joined
from inprocess.monitor.link import Link
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import Decision
from inprocess.protocol.phases import Phase
from inprocess.system.clock import monotonic_ns

S = 1_000_000_000


class Killed(BaseException):
    """In place of SIGKILL."""


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    def kill(pid: int, signum: int) -> None:
        assert (pid, signum) == (os.getpid(), signal.SIGKILL)
        raise Killed

    monkeypatch.setattr(lease.os, "kill", kill)
    made = Board.create()
    yield made
    made.close()


@pytest.fixture
def call(board: Board) -> CallWrapper:
    call = CallWrapper(board, lambda: None)
    Controls(call).gate = Gate(Interrupter())
    return call


def test_atomic_begins_while_there_is_a_lease_or_nobody_to_have_one_from(call: CallWrapper, board: Board) -> None:
    for until in (0, monotonic_ns() + 60 * S):
        board.slots[LEASE] = until
        with call.atomic(), call.atomic():
            pass


def test_no_section_begins_after_the_lease(call: CallWrapper, board: Board) -> None:
    board.slots[LEASE] = monotonic_ns()
    with pytest.raises(Killed), call.atomic():
        raise AssertionError("the section began")


def test_no_user_code_begins_after_the_lease(call: CallWrapper, board: Board) -> None:
    """A rank that had agreed to the iteration and stood still just before its function."""
    thread = SimpleNamespace(enter=lambda: Gate(Interrupter()))
    participant = SimpleNamespace(agents=SimpleNamespace(thread=thread, board=board), call=call)
    user: Any = SimpleNamespace(_participant=participant)
    ran: list[int] = []
    board.slots[LEASE] = monotonic_ns()
    with pytest.raises(Killed):
        UserCode.in_window(user, lambda: ran.append(1))
    assert not ran


def test_a_section_that_is_open_may_end(call: CallWrapper, board: Board) -> None:
    with call.atomic():
        board.slots[LEASE] = monotonic_ns()


@pytest.mark.parametrize(
    ("phase", "stops"), [(Phase.INITIALIZE, True), (Phase.RUN, True), (Phase.JOIN, False), (Phase.LEAVE, False)]
)
def test_the_watch_stops_what_the_others_wait_for(board: Board, phase: Phase, stops: bool) -> None:
    board.enter(phase)
    assert lease.enforce(board) > 0
    board.slots[LEASE] = monotonic_ns() + 60 * S
    assert 59 * S < lease.enforce(board) <= 60 * S
    board.slots[LEASE] = monotonic_ns()
    if stops:
        with pytest.raises(Killed):
            lease.enforce(board)
    else:
        assert lease.enforce(board) <= 0


def test_the_watch_leaves_a_rank_alone_that_has_left(board: Board) -> None:
    board.enter(Phase.RUN)
    board.slots[LEASE] = monotonic_ns()
    board.leave()
    lease.enforce(board)


@pytest.fixture
def link(board: Board) -> Callable[..., Link]:
    posted: list[object] = []

    def make(roster: tuple[int, ...] = (0, 1)) -> Link:
        config = MonitorConfig(member=1, roster=roster, store="", heartbeat_timeout=10.0)
        return Link(config, board, posted.append)

    make.posted = posted  # type: ignore[attr-defined]
    return make


def test_a_heartbeat_gives_a_lease_from_its_beginning(link: Callable[..., Link], board: Board) -> None:
    made, begin = link(), monotonic_ns() / 1e9 - 1.0
    assert made.lease_until is None
    made._beaten(begin)
    assert made.lease_until == board.slots[LEASE] == int(begin * 1e9) + 9 * S
    assert link.posted == [Joined()]  # type: ignore[attr-defined]


def test_a_lease_that_was_ended_stays_so(link: Callable[..., Link], board: Board) -> None:
    """Of a rank that cannot be ended. A heartbeat may be under way at that moment."""
    made = link()
    made._beaten(monotonic_ns() / 1e9)
    made.end_lease()
    made._note_lease()
    made._beaten(monotonic_ns() / 1e9)
    assert made.lease_until == 1 and lease.remaining(board) <= 0


def test_a_heartbeat_has_the_store_of_the_next_restart_made(link: Callable[..., Link], monkeypatch: Any) -> None:
    """Once, on the host of the iterations' stores."""
    made, spawned = link(), list[object]()
    servers = SimpleNamespace(serving=False, has_spare=False, make_ahead=print)
    monkeypatch.setattr(made, "_rendezvous", servers)
    monkeypatch.setattr(made, "spawn", spawned.append)
    for serving, has_spare in ((False, False), (True, False), (True, True)):
        servers.serving, servers.has_spare = serving, has_spare
        made._beaten(monotonic_ns() / 1e9)
    assert spawned == [servers.make_ahead]


@pytest.fixture
def stderr() -> Iterator[Callable[[int], None]]:
    """Makes another descriptor the standard error."""
    kept = os.dup(2)
    yield lambda fd: os.dup2(fd, 2) and None
    os.dup2(kept, 2)
    os.close(kept)


@pytest.mark.parametrize("state", ["broken", "no space", "closed", "full"])
def test_a_standard_error_that_cannot_be_written_keeps_no_rank_alive(
    monkeypatch: pytest.MonkeyPatch, stderr: Callable[[int], None], state: str
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(lease.os, "kill", lambda pid, signum: ended.append(signum))
    monkeypatch.setattr(lease.os, "_exit", ended.append)
    opened = list(os.pipe())
    if state == "full":
        os.set_blocking(opened[1], False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(opened[1], bytes(4096))
        os.set_blocking(opened[1], True)
    elif state == "broken":
        os.close(opened.pop(0))
    elif state == "no space":
        opened.append(os.open("/dev/full", os.O_WRONLY))
    stderr(opened[-1])
    if state == "closed":
        os.close(2)
    lease.kill_self()
    assert ended == [signal.SIGKILL, 137]
    for fd in opened:
        os.close(fd)


def test_process_one_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL to itself does nothing there."""
    codes: list[int] = []
    monkeypatch.setattr(lease.os, "kill", lambda pid, signum: None)
    monkeypatch.setattr(lease.os, "_exit", codes.append)
    lease.kill_self()
    assert codes == [137]


def test_a_lease_that_has_run_out_is_not_renewed(link: Callable[..., Link], board: Board) -> None:
    """A process that was stopped and wakes sends its next heartbeat at once; the others may have gone on."""
    over = board.slots[LEASE] = monotonic_ns()
    made = link()
    assert made.lease_until == over
    made._beaten(monotonic_ns() / 1e9)
    assert made.lease_until == board.slots[LEASE] == over


def test_the_last_of_many_has_a_lease(link: Callable[..., Link], board: Board) -> None:
    """A process that waits to join watches it, and goes on without it where it cannot be heard."""
    made = link()
    made._move(Membership.apply, Decision(removed=(0,)))
    made._beaten(monotonic_ns() / 1e9)
    assert made.membership.roster == (1,) and made.lease_until is not None


def test_who_was_never_with_others_needs_no_lease(link: Callable[..., Link], board: Board) -> None:
    board.slots[LEASE] = monotonic_ns() + S
    made = link((1,))
    made._beaten(monotonic_ns() / 1e9)
    assert made.lease_until is None and board.slots[LEASE] == 0
