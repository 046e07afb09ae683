"""The loggers of this library. No line waits for the handlers that write it: one that blocked would get a rank killed.

Levels and filters of a logger are looked at by the thread that logs, which also turns the arguments into text; nothing
they refer to is kept. The line then goes through one bounded queue to one thread, which gives it to the handlers that
the user has configured, in the usual way: those of the logger and of its parents, or logging's last resort. The thread
starts with the call of a wrapped function, so that no restart waits for that, and ends with it. Outside a call it
starts with the first line, and ends when there is nothing to write for a while. Where a handler blocks, it is waited
for `FLUSH_LIMIT_S` at the end and then abandoned; lines for which there is no place are dropped and counted. While
an abandoned thread is blocked there is no other one.

Each record says where in the job its process was, see `Position`.

Handing a line over takes no lock and waits for nothing; `interrupt` does not raise inside it. So it may happen at any
moment: in a signal handler, in a destructor, while another line is being handed over.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import os
import queue
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from inprocess.attribution import name_of
from inprocess.exception import RankShouldRestart
from inprocess.system import clock

__all__ = ["NO_CALL", "Position", "begin", "end", "get_logger", "leave", "locate", "lose", "once"]

#: lines that wait at most; more are dropped
MAX_QUEUED = 1000
#: seconds for which the writer is waited for at the end of a call or of the process
FLUSH_LIMIT_S = 0.5
#: seconds for which a fork waits for the line that is being written
FORK_LIMIT_S = 0.5
#: seconds without a line after which the writer ends, outside a call
IDLE_LIMIT_S = 1.0
#: where a process is outside a call
NO_CALL = "no call"
_WRITER = "inprocess-log"
_SLOW = "they were not written as fast as they came"


@dataclass(frozen=True)
class Position:
    """Where in its job a process is. A record's attribute ``inprocess``; as text ``call 0, iteration 2, rank 1, run``.

    Attributes:
        call: calls of wrapped functions in this process before this one.
        iteration: of that call; -1 before the first.
        rank: in this iteration.
        initial_rank: with which the process was started, or which it took.
        phase: of the restart loop, see ``protocol/phases.py``.
    """

    call: int
    iteration: int
    rank: int
    initial_rank: int
    phase: str

    def __str__(self) -> str:
        return f"call {self.call}, iteration {self.iteration}, {name_of(self.rank, self.initial_rank)}, {self.phase}"

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """As text: who unpickles a record, such as the receiver of a ``SocketHandler``, need not have this library."""
        return str, (str(self),)


#: tells where this process is; None: outside a call
_position: Callable[[], Position] | None = None


def locate(position: Callable[[], Position] | None) -> None:
    """From now on lines say what this answers, whatever thread logs them; None: `NO_CALL`, as after `leave`."""
    global _position
    _position = position


class _Line:
    """What is left of a record's arguments and exception: text, and names of places."""

    __slots__ = ("logger", "record", "trace")

    def __init__(self, logger: logging.Logger, record: logging.LogRecord) -> None:
        self.logger, self.record = logger, record
        #: what has ``format()``; a caller's own, or made of the record's exception
        self.trace: Any = record.__dict__.pop("trace", None)
        if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
            # reads no source yet: the disk may hang
            self.trace = traceback.TracebackException(*record.exc_info, lookup_lines=False, compact=True)
        record.msg = _text(record)
        record.args = record.exc_info = None

    def deliver(self) -> None:
        """To the handlers. In the writer."""
        if self.trace is not None:
            self.record.exc_text = "".join(self.trace.format()).rstrip("\n")
        type(self.logger).callHandlers(self.logger, self.record)


class _Queue:
    """The lines that wait, and the thread that writes them."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[_Line | None] = queue.SimpleQueue()
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

    def put(self, line: _Line) -> None:
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
        if self._has_writer.acquire(blocking=False):
            self._start()

    def _start(self) -> None:
        try:
            self._writer = threading.Thread(target=self._write, name=_WRITER, daemon=True)
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
                line = self._lines.get(timeout=None if pause and self._stays else pause)
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

    def _deliver(self, line: _Line) -> None:
        try:
            with self._writing:
                line.deliver()
        except BaseException as error:  # of a handler, which must not end the writer
            self.lose(f"a log handler raised {type(error).__name__}")
        self._written += 1

    def _tell_dropped(self) -> None:
        if not self._why:
            return
        why, self._why = self._why, ""
        dropped = next(self._drops) - self._readings
        self._readings += dropped + 1
        self._untold += dropped
        logger = logging.getLogger("inprocess")
        if not self._untold or not logger.isEnabledFor(logging.WARNING):
            return
        told = (self._untold, why)
        record = logger.makeRecord(
            logger.name, logging.WARNING, __file__, 0, "%d log lines dropped: %s", told, None, "_tell_dropped"
        )
        self._has_lost = False
        self._deliver(_Line(logger, record))
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
        return self._abandoned_at != self._written and self.end(FLUSH_LIMIT_S)

    def writer(self) -> threading.Thread | None:
        """The latest one."""
        return self._writer


_queue = _Queue()


def get_logger(name: str) -> logging.Logger:
    """The logger of this name, the same that ``logging.getLogger`` gives, which from now on never waits."""
    logger = logging.getLogger(name)
    logger.callHandlers = functools.partial(_hand_over, logger)  # type: ignore[method-assign]
    return logger


@functools.cache
def once(say: Callable[..., None], text: str, *args: object) -> None:
    """Log a line with ``say`` (a logger's method), the same one once per process."""
    say(text, *args, stacklevel=2)


def begin() -> None:
    """The call of a wrapped function begins."""
    _queue.begin()


def end(seconds: float) -> bool:
    """Have everything written; False where it takes longer than so many seconds. Later lines are written as well."""
    return _queue.end(seconds)


def leave() -> None:
    """The call of a wrapped function, or the program, is over: wait for what is not yet written, but not for long."""
    locate(None)
    _queue.leave()


def lose(why: str) -> None:
    """Count a line that its handler, which calls this, could not write."""
    _queue.lose(why)


def whole() -> Iterator[CodeType]:
    """The code that an interruption must not leave half-way."""
    for function in (_Queue.put, _Queue.drop, _Queue._start, _Queue.hold, _Queue.let_go):
        yield function.__code__


def _hand_over(logger: logging.Logger, record: logging.LogRecord) -> None:
    where = _position  # it may change meanwhile
    record.inprocess = where() if where is not None else NO_CALL
    _queue.put(_Line(logger, record))


def _text(record: logging.LogRecord) -> str:
    """The message, also where an argument's own ``__str__`` fails, however."""
    try:
        return record.getMessage()
    except (KeyboardInterrupt, RankShouldRestart):  # from outside
        raise
    except BaseException as error:
        text = record.msg if type(record.msg) is str else type(record.msg).__name__
        return f"{text} (its arguments cannot be shown: {type(error).__name__})"


# --- the end of the process ---------------------------------------------------------------------------------------


def _at_exit() -> None:
    """Where the writer is blocked, see to it that nothing waits for it that comes later.

    ``logging.shutdown`` takes the lock of each handler, and the interpreter those of its standard streams.
    """
    writer = _queue.writer()
    if _queue.leave() or writer is None or not writer.is_alive():
        return
    for handler in _handlers_in_use(writer):
        for name in ("acquire", "flush", "close", "release"):
            setattr(handler, name, lambda: None)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it writes to no descriptor
            _divert(handler.stream.fileno(), writer)


def _handlers_in_use(thread: threading.Thread) -> list[Any]:
    """The handlers at work in a thread, innermost first."""
    frame, found = sys._current_frames().get(thread.ident or 0), []
    while frame is not None:
        if isinstance(handler := frame.f_locals.get("self"), logging.Handler) and handler not in found:
            found.append(handler)
        frame = frame.f_back
    return found


def _divert(fd: int, writer: threading.Thread) -> None:
    """End a write that blocks: a signal makes Python repeat it, and by then the descriptor leads nowhere.

    Not a file's: to let go of it may take as long as to write to it, and no signal ends that.
    """
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return
    null = os.open(os.devnull, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.dup2(null, fd)
    finally:
        os.close(null)
    previous = signal.signal(signal.SIGURG, lambda signum, frame: None)
    signal.pthread_kill(writer.ident or 0, signal.SIGURG)
    writer.join(FLUSH_LIMIT_S)
    signal.signal(signal.SIGURG, previous)


atexit.register(_at_exit)
# in the child everything is new: the lines are the parent's, and so is the writer
os.register_at_fork(before=_queue.hold, after_in_parent=_queue.let_go, after_in_child=_queue.__init__)  # type: ignore[misc]
