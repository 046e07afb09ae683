"""``with atomic:``, a section that neither an abort nor an interruption cuts in half."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from inprocess.exception import RankShouldRestart
from inprocess.interrupt.frames import leave_alone, whereabouts
from inprocess.system import clock

__all__ = ["Atomic"]

#: seconds between two reports that an atomic section is waited for
REPORT_EVERY = 1.0


class Atomic:
    """``with atomic:`` keeps abort and interruption away; any thread, reentrant.

    Entering raises RankShouldRestart once an abort has begun, except within a section that is already held.
    `CallWrapper.atomic` enters and leaves in lines of its own, which have to agree with these.
    """

    __slots__ = ("_holder", "_lock", "closed", "depth", "dropped")

    def __init__(self) -> None:
        #: whether an abort has begun; never false again
        self.closed = False
        #: whether the main thread is through with the gate
        self.dropped = False
        self._lock: Any = threading.RLock()  # held during a section; Any: it is asked, as by `Condition`, who owns it
        #: how many sections deep; changed under the lock
        self.depth = 0
        # under the lock: the thread that is in them (0: none)
        self._holder = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        if self.closed and not self.depth:
            self.refuse()
        self.depth += 1
        self._holder = threading.get_ident()

    def __exit__(self, *exc_info: object) -> None:
        if not self.held():
            return self.leave_unheld()
        self.depth -= 1
        if not self.depth:
            self._holder = 0
        self._lock.release()

    def refuse(self) -> NoReturn:
        """Its lock is taken, and an abort has begun."""
        self._lock.release()
        raise RankShouldRestart("atomic() cannot begin: this iteration was interrupted for a restart")

    def leave_unheld(self) -> None:
        """A generator that was suspended in a section is closed after `drop` took that away; else it is an error."""
        if not self.dropped:
            raise RuntimeError("atomic() is left by a thread that is not inside it")

    def held(self) -> bool:
        """Whether this thread is inside a section."""
        return bool(self._lock._is_owned())

    def close(self, on_wait: Callable[[float, str], None]) -> None:
        """Let no section begin any more, and wait for the one that is held."""
        # before waiting, else a loop of short sections could keep this thread out for long
        self.closed = True
        begin = clock.monotonic()
        while not self._lock.acquire(timeout=REPORT_EVERY):
            on_wait(clock.monotonic() - begin, self._describe_holder())
        self._lock.release()

    def drop(self) -> None:
        """Give up what this thread still holds: Ctrl-C may hit `__enter__` before the section begins."""
        self.dropped = True
        if not self._lock.acquire(blocking=False):
            return  # another thread is in a section
        self.depth = self._holder = 0
        with contextlib.suppress(RuntimeError):  # raised when it holds nothing any more
            while True:
                self._lock.release()

    def detach(self) -> None:
        """In a forked child, where no abort comes, and a section that another thread is in never ends."""
        self.closed = False
        if not self.held():
            self._lock, self.depth, self._holder = threading.RLock(), 0, 0

    def _describe_holder(self) -> str:
        ident = self._holder
        name = next((thread.name for thread in threading.enumerate() if thread.ident == ident), str(ident))
        return f"thread {name!r} at {whereabouts(ident)}"


leave_alone(Atomic.__enter__.__code__, Atomic.__exit__.__code__, Atomic.held.__code__)
