"""An event of which one thread waits, and which Ctrl-C in the thread that sets it cannot leave half set.

`threading.Event.set` takes a lock in Python code. An exception of a signal handler right behind that leaves the lock
taken for ever (Python 3.10 to 3.13), and the next `set` waits for it.
"""

from __future__ import annotations

import contextlib
import threading

__all__ = ["Latch"]


class Latch:
    """As `threading.Event`, without `clear`, and for one waiting thread."""

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        with contextlib.suppress(RuntimeError):  # it was set before
            self._lock.release()

    def wait(self, timeout: float = -1) -> bool:
        """Whether it is set, within so many seconds; -1: without a limit."""
        return self._is_set or self._lock.acquire(timeout=timeout) or self._is_set
