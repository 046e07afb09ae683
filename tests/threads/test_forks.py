"""A process that is forked below `guarded` ends where it leaves it; what it has of a call is its own."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest

from inprocess.call_wrapper import CallWrapper, Controls
from inprocess.exception import RestartError
from inprocess.interrupt import forks
from inprocess.interrupt.signals import Interrupter
from inprocess.monitor.board import ATOMIC, LEASE, PING, Board

#: the child has come back from `guarded`
CAME_BACK = 99


@pytest.fixture(autouse=True)
def others_run() -> Iterator[None]:
    """Python warns of a fork beside other threads; pytest's own are harmless."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def run_child(child: Callable[[], object]) -> int:
    """The exit status of a process that is forked below `guarded` and calls ``child``."""

    def fork() -> int:
        pid = os.fork()
        if not pid:
            child()
        return pid

    process = os.getpid()
    try:
        pid = forks.guarded(fork)
    finally:
        if os.getpid() != process:
            os._exit(CAME_BACK)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fail() -> None:
    raise ValueError("of the child")


@pytest.mark.parametrize(
    ("child", "status", "said"),
    [
        (lambda: None, 0, ""),
        (fail, 1, "ValueError: of the child\n"),
        (sys.exit, 0, ""),
        (lambda: sys.exit(3), 3, ""),
        (lambda: sys.exit(-1), 255, ""),
        (lambda: sys.exit("text"), 1, "text\n"),
        (lambda: os._exit(7), 7, ""),
    ],
)
def test_a_child_ends(child: Callable[[], object], status: int, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_child(child) == status
    assert capfd.readouterr().err.endswith(said)


def test_what_it_has_printed_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_child(lambda: sys.stdout.write("printed")) == 0
    assert capfd.readouterr().out == "printed"


def test_the_process_itself_goes_through() -> None:
    assert forks.guarded(int, "7") == 7
    with pytest.raises(ValueError, match="of the child"):
        forks.guarded(fail)


def test_a_child_has_a_call_of_its_own() -> None:
    board, interrupter = Board.create(), Interrupter()
    call = CallWrapper(board, lambda: "the rank's")
    Controls(call).gate = gate = interrupter.new_gate()
    board.slots[LEASE] = 1  # the rank would be ended
    before = board.slots.tolist()

    def detach() -> None:
        board.detach()
        interrupter.detach()
        Controls(call).detach()

    def child() -> None:
        call.ping()
        with call.disable_hang_protection(), call.section("save", 3), call.atomic():
            assert call._slots[ATOMIC] == 1
            assert call._slots[PING]
        with pytest.raises(RestartError, match="connect a torch TCPStore"):
            _ = call.store
        sys.exit(5)

    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with gate.atomic:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    forks.tell(detach)
    try:
        assert run_child(child) == 5
    finally:
        forks.tell(None)
        over.set()
        thread.join()
    assert board.slots.tolist() == before
    assert call.store == "the rank's"
    board.close()
