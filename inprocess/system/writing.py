"""A thread that writes what other threads hand over: to a log, a disk, a callback of the user's. Nobody waits for it.

Handing a line over takes no lock and waits for nothing; `interrupt` does not raise inside it. So it may happen at any
moment: in a signal handler, in a destructor, while another line is being handed over. The lines go through a bounded
queue; those for which there is no place are dropped and counted. A thread that blocks is waited for `FLUSH_LIMIT_S` at
the end and then abandoned; while it is blocked there is no other one.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Generic, TypeVar

from inprocess.system import clock

__all__ = ["Writer", "whole"]

T = TypeVar("T")
#: lines that wait at most; more are dropped
MAX_QUEUED = 1000
#: seconds for which the thread is waited for at the end of a call or of the process
FLUSH_LIMIT_S = 0.5
#: seconds for which a fork waits for the line that is being written
FORK_LIMIT_S = 0.5
#: seconds without a line after which the thread ends, outside a call
IDLE_LIMIT_S = 1.0
_SLOW = "they were not written as fast as they came"


class Writer(Generic[T]):
    """The lines that wait, and the thread that writes them.

    Args:
        name: of the thread.
        deliver: writes one line, in the thread; may block, and may raise anything.
        dropped: the line that tells how many were dropped and why, or None; in the thread.
        what: what ``deliver`` calls, for that reason.
        linger: seconds for which the first line after a pause waits for more, so that the thread does not get in the
            way of what is just going on.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[T], None],
        dropped: Callable[[int, str], T | None],
        what: str,
        linger: float = 0.0,
    ) -> None:
        self._name, self._deliver_to, self._dropped, self._what = name, deliver, dropped, what
        self._linger = linger
        self.renew()

    def renew(self) -> None:
        """In a forked child: the lines are the parent's, and so is the thread."""
        self._lines: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        # the thread is to end: no line lingers
        self._hurry = threading.Event()
        # held while a line is being written, and by a thread that forks, which is noted (0: none)
        self._writing, self._forks_in = threading.Lock(), 0
        # how many were written when a fork did not wait any longer
        self._forked_past = -1
        # held while there is a writer: taken by the thread that starts it, given back by the writer
        self._has_writer = threading.Lock()
        self._writer: threading.Thread | None = None
        self._written = 0
        #: a call is running, so the writer ends only when it is told to
        self._stays = False
        # how many were written when the writer was abandoned
        self._abandoned_at = -1
        # exact without a lock: a reading counts, too
        self._drops, self._readings = itertools.count(), 0
        self._why = ""
        # of the writer: how many the log has not told of yet, and whether a handler has lost a line just now
        self._untold, self._has_lost = 0, False

    def put(self, line: T) -> None:
        """Any thread, at any moment."""
        if self._lines.qsize() < MAX_QUEUED:
            self._lines.put(line)
        else:
            self.drop(_SLOW)
        if self._has_writer.acquire(blocking=False):
            self._start()

    def drop(self, why: str) -> None:
        """Count a line that is not written."""
        next(self._drops)
        self._why = why

    def lose(self, why: str) -> None:
        """Count a line that could not be written. In the writer."""
        self._has_lost = True
        self.drop(why)

    def begin(self) -> None:
        """From now on there is a writer, until `leave`."""
        self._stays = True
        self._hurry.clear()
        if self._has_writer.acquire(blocking=False):
            self._start()

    def _start(self) -> None:
        try:
            self._writer = threading.Thread(target=self._write, name=self._name, daemon=True)
            self._writer.start()
        except BaseException as error:
            self._has_writer.release()
            if not isinstance(
                error, RuntimeError
            ):  # no thread left, or the interpreter ends; the next line tries again
                raise

    def _write(self) -> None:
        pause = IDLE_LIMIT_S
        while True:
            try:
                line = self._get(None if pause and self._stays else pause)
            except queue.Empty:
                if pause and self._stays:
                    continue
                line = None
            if line is not None:
                self._deliver(line)
            if self._lines.empty():
                self._tell_dropped()
            if line is None:
                pause = 0.0
                self._has_writer.release()
                # a line that came just before found a writer
                if self._lines.empty() or not self._has_writer.acquire(blocking=False):
                    return

    def _get(self, timeout: float | None) -> T | None:
        """Raises queue.Empty."""
        if not self._linger or not self._lines.empty():
            return self._lines.get(timeout=timeout)
        line = self._lines.get(timeout=timeout)
        if line is not None:
            self._hurry.wait(self._linger)
        return line

    def _deliver(self, line: T) -> None:
        try:
            with self._writing:
                self._deliver_to(line)
        except BaseException as error:  # of a handler, which must not end the writer
            self.lose(f"{self._what} raised {type(error).__name__}")
        self._written += 1

    def _tell_dropped(self) -> None:
        if not self._why:
            return
        why, self._why = self._why, ""
        dropped = next(self._drops) - self._readings
        self._readings += dropped + 1
        self._untold += dropped
        line = self._dropped(self._untold, why) if self._untold else None
        if line is None:
            return
        self._has_lost = False
        self._deliver(line)
        if self._has_lost:  # this line, too: told with the next one that can be written
            self._readings += 1
        else:
            self._untold = 0

    def end(self, seconds: float) -> bool:
        """Have everything written and the writer ended; False: it takes longer, and is abandoned."""
        if self._writer is threading.current_thread():
            return True
        until = clock.monotonic() + seconds
        while self._has_writer.locked():  # by the writer, or by a thread that is just starting one
            self._lines.put(None)  # it need not linger
            if not self._has_writer.acquire(timeout=max(0.0, until - clock.monotonic())):
                self._abandoned_at = self._written
                return False
            self._has_writer.release()
            # a line that came in between found a writer, too
            if not self._lines.empty() and self._has_writer.acquire(blocking=False):
                self._start()
        self._abandoned_at = -1
        if self._writer is not None and self._writer.ident is not None:
            self._writer.join(max(0.0, until - clock.monotonic()))
        return True

    def hold(self) -> None:
        """Before a fork: a stream that is being written to is locked, and would be so for ever in the child.

        A handler that blocks is waited for once. In a handler, which may fork as well, there is nothing to wait for.
        """
        if self._forked_past == self._written or self._writer is threading.current_thread():
            return
        if self._writing.acquire(timeout=FORK_LIMIT_S):
            self._forks_in = threading.get_ident()
        else:
            self._forked_past = self._written

    def let_go(self) -> None:
        """After a fork, in the parent."""
        if self._forks_in == threading.get_ident():
            self._forks_in = 0
            self._writing.release()

    def leave(self) -> bool:
        """As `end`; but one that was abandoned and has written nothing since is not waited for again."""
        self._stays = False
        self._hurry.set()
        return self._abandoned_at != self._written and self.end(FLUSH_LIMIT_S)

    def writer(self) -> threading.Thread | None:
        """The latest one."""
        return self._writer


def whole() -> Iterator[CodeType]:
    """The code that an interruption must not leave half-way."""
    for function in (Writer.put, Writer.drop, Writer._start, Writer.hold, Writer.let_go):
        yield function.__code__
