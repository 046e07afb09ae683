"""The loggers of this library. No line waits for the handlers that write it: one that blocked would get a rank killed.

Levels and filters of a logger are looked at by the thread that logs, which also turns the arguments into text; nothing
they refer to is kept. The line then goes through one bounded queue to one thread (see `writing`), which gives it to the
handlers that the user has configured, in the usual way: those of the logger and of its parents, or logging's last
resort. The thread starts with the call of a wrapped function, so that no restart waits for that, and ends with it.
Outside a call it starts with the first line, and ends when there is nothing to write for a while.

Each record says where in the job its process was, see `Position`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inprocess.attribution import name_of
from inprocess.exception import RankShouldRestart
from inprocess.system.writing import FLUSH_LIMIT_S, Writer

__all__ = ["NO_CALL", "Position", "begin", "end", "get_logger", "leave", "locate", "lose", "once", "position"]

#: where a process is outside a call
NO_CALL = "no call"


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
    """From now on lines say what this returns, whatever thread logs them; None: `NO_CALL`, as after `leave`."""
    global _position
    _position = position


def position() -> Position | None:
    """Where this process is; None: outside a call."""
    where = _position  # it may change meanwhile
    return None if where is None else where()


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


def _tell_dropped(count: int, why: str) -> _Line | None:
    logger = logging.getLogger("inprocess")
    if not logger.isEnabledFor(logging.WARNING):
        return None
    told = (count, why)
    return _Line(
        logger,
        logger.makeRecord(
            logger.name, logging.WARNING, __file__, 0, "%d log lines dropped: %s", told, None, "_tell_dropped"
        ),
    )


_queue = Writer("inprocess-log", _Line.deliver, _tell_dropped, "a log handler")


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


def _hand_over(logger: logging.Logger, record: logging.LogRecord) -> None:
    record.inprocess = position() or NO_CALL
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

    Not a file's: to release it may take as long as to write to it, and no signal ends that.
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
os.register_at_fork(before=_queue.hold, after_in_parent=_queue.let_go, after_in_child=_queue.renew)
