"""Keeps a rank that was given up from running on: its own look at the lease, beside its monitor's.

The monitor kills a rank whose lease has run out, but it may have stood still together with it: when a host that was
paused wakes up, both wake at once, and nobody says that the monitor is first. So the training process looks at the
lease itself before it does what cannot be taken back: before it calls user code, and before ``atomic()`` begins.
Whoever sees first that the lease has run out ends the process, by SIGKILL: an exception could be caught.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from inprocess.monitor.board import LEASE, LEFT, Board
from inprocess.protocol.phases import RUNNING
from inprocess.system import clock

__all__ = ["enforce", "kill_self", "remaining"]


def remaining(board: Board) -> int:
    """Nanoseconds until this rank must not run any more, zero or less where it must not now. A very long time where
    nobody goes on without it."""
    until = board.slots[LEASE]
    return until - clock.monotonic_ns() if until else 1 << 62


def enforce(board: Board) -> int:
    """As `remaining`, for another thread than the function's; ends the process if it is time and the function runs."""
    left = remaining(board)
    if left <= 0 and not board.slots[LEFT] and board.snapshot().phase in RUNNING:
        kill_self()
    return left


def kill_self() -> NoReturn:
    """End this process at once. No logging: a handler may wait for the very thread that must not run.

    Process 1 of a container cannot kill itself: the kernel drops the signal.
    """
    text = f"inprocess: process {os.getpid()} was cut off or stood still for too long; the others go on without it\n"
    os.write(2, text.encode())
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)
