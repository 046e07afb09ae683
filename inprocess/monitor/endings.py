"""How a process ended: what the kernel still knows of it, and in words."""

from __future__ import annotations

import os

from inprocess.exception import signal_name
from inprocess.monitor import pidfile
from inprocess.system import procfs

__all__ = ["codes", "exit_status", "how_died", "is_dying"]

#: among the kernel's flags of a thread: it ends, and its exit status is known
PF_EXITING = 0x4


def exit_status(pid: int, started: str, pidfd: int) -> int | None:
    """As ``wait()`` gives it; None where it is not known: before Linux 6.15, once the parent has asked for it."""
    fields = pidfile.stat_fields(pid)
    return int(fields[49]) if len(fields) > 49 and _ends(fields, started) else procfs.exit_status(pidfd)


def is_dying(pid: int, started: str) -> bool:
    """Whether the main thread of this process ends, or has ended. Where it becomes another program it does not; where
    another thread makes the process another program, the main thread ends first."""
    return _ends(pidfile.stat_fields(pid), started)


def _ends(fields: list[str], started: str) -> bool:
    return len(fields) > 19 and fields[19] == started and bool(int(fields[6]) & PF_EXITING)


def how_died(status: int | None) -> str:
    """In words, as far as it is known."""
    if status is None:
        return "the training process ended"
    if not os.WIFSIGNALED(status):
        return f"the training process exited with code {os.WEXITSTATUS(status)}"
    return f"killed by {signal_name(os.WTERMSIG(status))}"


def codes(status: int | None) -> dict[str, int | None]:
    """``exit_code`` and ``signal``, each None where it does not apply or is not known."""
    return {
        "exit_code": os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None,
        "signal": os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
    }
