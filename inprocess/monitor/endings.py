"""How a process ended: what the kernel still knows of it, and in words."""

from __future__ import annotations

import contextlib
import os
import signal

from inprocess.monitor import pidfile
from inprocess.system import procfs

__all__ = ["codes", "exit_status", "how_died"]


def exit_status(pid: int, started: str, pidfd: int) -> int | None:
    """As ``wait()`` gives it; None where it is not known: before Linux 6.15, once the parent has asked for it."""
    fields = pidfile.stat_fields(pid)
    if len(fields) < 50 or fields[0] not in "ZX" or fields[19] != started:
        return procfs.exit_status(pidfd)
    return int(fields[49])


def how_died(status: int | None) -> str:
    """In words, as far as it is known."""
    if status is None:
        return "the training process ended"
    if not os.WIFSIGNALED(status):
        return f"the training process exited with code {os.WEXITSTATUS(status)}"
    signum = os.WTERMSIG(status)
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(signum).name}"
    return f"killed by signal {signum}"


def codes(status: int | None) -> dict[str, int | None]:
    """``exit_code`` and ``signal``, each None where it does not apply or is not known."""
    return {
        "exit_code": os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None,
        "signal": os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
    }
