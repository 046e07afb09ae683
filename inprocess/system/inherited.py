"""What a program of this library inherits from whoever started it, and cannot work with."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator

__all__ = ["children_are_waited_for", "unblocked"]


@contextlib.contextmanager
def children_are_waited_for() -> Iterator[None]:
    """Where SIGCHLD is ignored the kernel throws the exit status of each child away: it has its default meanwhile, here
    and in what is started. In the main thread; elsewhere this does nothing."""
    ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    if not ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def unblocked(signums: Iterable[int]) -> set[int]:
    """Let these signals through to the calling thread; those that were blocked, to be blocked again in the end."""
    wanted = set(signums)
    return wanted & set(signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted))
