"""Keeps a rank that was given up from running on: its own look at the lease, beside its monitor's.

The monitor kills a rank whose lease has run out, but it may have stood still together with it: when a host that was
paused wakes up, both wake at once, and nobody says that the monitor is first. So the training process looks at the
lease itself before it does what cannot be taken back: before it calls user code, and before ``atomic()`` begins.
Whoever sees first that the lease has run out ends the process, by SIGKILL: an exception could be caught.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NoReturn

from inprocess.monitor.board import LEASE, LEFT, Board
from inprocess.protocol.phases import RUNNING
from inprocess.system import clock, procfs

__all__ = ["FENCED", "enforce", "kill_self", "remaining"]

#: why a process ended itself
FENCED = "process %d was cut off or stood still for too long; the others go on without it"


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
    """End this process at once. Nothing is written before: a standard error that is full, or on a disk that does not
    answer, would prevent it. The monitor says why (`FENCED`).

    Process 1 of a container cannot kill itself: the kernel drops the signal.
    """
    os.kill(os.getpid(), signal.SIGKILL)
    try:
        _say(f"inprocess: {FENCED % os.getpid()}\n")
    finally:
        os._exit(128 + signal.SIGKILL)


def _say(text: str) -> None:
    """To the standard error, where that cannot block."""
    with contextlib.suppress(OSError):
        if not os.readlink("/proc/self/fd/2").startswith(("pipe:", "/dev/")):
            return
        with os.fdopen(procfs.open_stderr(), "wb", buffering=0) as file:
            file.write(text.encode())
