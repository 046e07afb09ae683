"""A process learns that a thread of another one begins to end."""

from __future__ import annotations

import copy
import gc
import mmap
import os
import signal
import threading

import pytest

from inprocess.monitor import board as monitor_board
from inprocess.monitor.board import Board
from inprocess.monitor.endings import is_dying
from inprocess.monitor.pidfile import start_time
from inprocess.system import thread_end
from inprocess.system.thread_end import SIZE, Held, await_end


def test_the_end_of_a_thread_is_told_while_its_process_lives() -> None:
    with mmap.mmap(-1, SIZE) as memory:
        holding, end = threading.Event(), threading.Event()

        def hold() -> None:
            held.append(Held(memory, 0))
            held[0].take()
            holding.set()
            end.wait()

        held: list[Held] = []
        thread = threading.Thread(target=hold)
        thread.start()
        holding.wait()
        told: list[bool] = []
        waiting = threading.Thread(target=lambda: told.append(await_end(memory, 0)))
        waiting.start()
        assert not told
        assert not copy.copy(held[0]).let_go(), (
            "another thread holds it: unmapped now, the memory would be written to later"
        )
        assert thread_end._kept.pop() is held[0]._place
        end.set()
        thread.join()
        waiting.join(30)
        assert told == [True]
        held.clear()
        gc.collect()


def test_a_board_that_was_interrupted_before_it_is_held_is_closed() -> None:
    """By Ctrl-C, in the step that is to take the mutex, just before or just after that."""
    for taken in (False, True):
        board = Board.create()
        board._held = Held(board._memory, monitor_board._MUTEX)
        if taken:
            board._held.take()
        board.close()
        assert board._memory.closed


@pytest.mark.parametrize("forks", [False, True])
def test_a_board_that_is_closed_tells_no_end(forks: bool) -> None:
    """A child that was forked before, and has ended, holds nothing."""
    board = Board.create()
    other = Board.attach(os.dup(board.fd))
    board.hold()
    if forks:
        if not (pid := os.fork()):
            os._exit(0)
        os.waitpid(pid, 0)
    told: list[bool] = []
    waiting = threading.Thread(target=lambda: told.append(other.await_end()))
    waiting.start()
    board.close()
    waiting.join(30)
    assert told == [False]
    other.close()


def test_the_end_of_a_killed_process_is_told() -> None:
    board = Board.create()
    pid = os.fork()
    if not pid:
        try:
            board.hold()
            board.slots[0] = 1
            signal.pause()
        finally:
            os._exit(1)
    while board.slots[0] != 1:
        os.sched_yield()
    started = start_time(pid)
    assert not is_dying(pid, started)
    told: list[bool] = []
    waiting = threading.Thread(target=lambda: told.append(board.await_end()))
    waiting.start()
    os.kill(pid, signal.SIGKILL)
    waiting.join(30)
    assert told == [True]
    assert is_dying(pid, started)
    assert not is_dying(pid, "another process with this number")
    os.waitpid(pid, 0)
    assert not is_dying(pid, started)
    board.close()
