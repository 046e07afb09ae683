"""The stream of what happens in this process: kept in memory, and handed to whoever subscribes. Nobody waits for it.

To emit an event takes no lock and waits for nothing, so it may happen at any moment, as with a line of the log (see
``system/writing``). Each sink, the file and each subscriber, has a queue and a thread of its own: one that blocks keeps
neither the training nor another sink.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from inprocess.events.files import EventFile
from inprocess.events.record import Event, Header
from inprocess.system import clock, logs
from inprocess.system.writing import Writer

__all__ = ["begin", "emit", "is_wanted", "leave", "recent", "subscribe", "unsubscribe", "whole"]

log = logs.get_logger("inprocess")
#: seconds by which events are written late, so that a restart is over by then
LINGER_S = 0.05
#: events that are kept in memory
RECENT = 1000
Callback = Callable[[Event], None]

_recent: deque[Event] = deque(maxlen=RECENT)
#: those that get each event; a tuple, replaced as a whole
_sinks: tuple[_Sink, ...] = ()
#: held while that is done
_changing = threading.Lock()
#: those whose disk does not answer: no more threads wait for it
_stuck: list[_Sink] = []
#: the last thing for a file: its thread closes it, since that may take as long as to write
_END = Event(0.0, 0.0, 0, 0, 0, 0, "", "", {})


class _Sink(Writer[Event]):
    """One receiver; ``of``: what it was made for, a run directory or the user's function."""

    def __init__(self, of: object, callback: Callback, name: str, what: str, close: Callable[[], None]) -> None:
        super().__init__(f"inprocess-{name}", callback, _dropped, what, LINGER_S)
        self.of, self._close = of, close

    def _deliver(self, line: Event) -> None:
        if line is not _END:
            super()._deliver(line)
            return
        self._tell_dropped()  # before the file is closed, and never after that
        self._dropped = _nothing
        with contextlib.suppress(OSError):
            self._close()

    def is_writing(self) -> bool:
        """Whether its thread is there; after the end of the call it has been abandoned then."""
        writer = self.writer()
        return writer is not None and writer.is_alive()

    def end_file(self) -> None:
        """Once its lines are written, or the thread abandoned: the file is closed where nobody waits for that."""
        self._lines.put(_END)  # however many wait
        self.begin()


def _dropped(count: int, why: str) -> Event | None:
    return _event("dropped", {"count": count, "why": why})


def _nothing(*_: object) -> None:
    pass


def _event(kind: str, attributes: dict[str, Any]) -> Event | None:
    at = logs.position()
    if at is None:
        return None
    now, wall = clock.monotonic(), clock.wall()
    return Event(now, wall, at.call, at.iteration, at.rank, at.initial_rank, at.phase, kind, attributes)


def emit(kind: str, /, **attributes: Any) -> None:
    """Something happened, a kind of ``record.KINDS``. Any thread, at any moment; outside a call nothing is emitted."""
    event = _event(kind, attributes)
    if event is None:
        return
    _recent.append(event)
    for sink in _sinks:
        sink.put(event)


def is_wanted() -> bool:
    """Whether somebody gets the events, so that what takes time to find out is worth it."""
    return bool(_sinks)


def recent() -> tuple[Event, ...]:
    """The last 1,000 events of this process, of all its calls, oldest first."""
    return tuple(_recent.copy())


def subscribe(callback: Callback) -> Callback:
    """From now on ``callback`` gets each event of this process, in order, in a thread of its own.

    Nothing waits for it: where it is slower than the events come, and 1,000 wait, the next are dropped, and it gets an
    event of the kind ``dropped`` with their ``count``. What it raises is logged. Events of monitor processes, and of
    other ranks, are in the run directory alone.

    Args:
        callback: takes one :class:`Event`.

    Returns:
        ``callback``, so that this can be used as a decorator.

    Raises:
        TypeError: it cannot be called.
    """
    if not callable(callback):
        raise TypeError(f"subscribe({callback!r}): pass a function that takes one Event")

    _add(_Sink(callback, functools.partial(_call, callback), "subscriber", "a subscriber", _nothing))
    return callback


def _call(callback: Callback, event: Event) -> None:
    try:
        callback(event)
    except Exception:
        log.exception("a subscriber of events raised; it gets the next ones, too")


def unsubscribe(callback: Callback) -> None:
    """It gets no more events. Raises ValueError where it was not subscribed."""
    for sink in _sinks:
        if not isinstance(sink.of, str) and sink.of == callback:
            _remove(sink)
            return
    raise ValueError(f"{callback!r} is no subscriber")


def begin(run_dir: str | None, job: str, source: str, rank: int) -> None:
    """A call begins: its events go to the subscribers, and to a file in ``run_dir`` where there is one."""
    _stuck[:] = [sink for sink in _stuck if sink.is_writing()]
    if run_dir is not None and all(sink.of != run_dir for sink in (*_sinks, *_stuck)):
        file = EventFile(run_dir, Header(job, source, rank, os.getpid()))
        _add(_Sink(run_dir, file.write, "events", "the run directory", file.close))
    for sink in _sinks:
        sink.begin()


def leave() -> None:
    """The call is over: wait for what is not yet written, but not for long."""
    for sink in _sinks:
        sink.leave()
        if isinstance(sink.of, str):
            sink.end_file()
            _remove(sink)
            if sink.is_writing():
                _stuck.append(sink)


def whole() -> Iterator[CodeType]:
    """The code that an interruption must not leave half-way."""
    for function in (emit, _event):
        yield function.__code__


def _add(sink: _Sink) -> None:
    global _sinks
    with _changing:
        _sinks = (*_sinks, sink)


def _remove(sink: _Sink) -> None:
    global _sinks
    with _changing:
        _sinks = tuple(each for each in _sinks if each is not sink)
    sink.leave()


def _in_child() -> None:
    """What happened, and who wants to know of it, is the parent's."""
    global _sinks, _changing
    _sinks, _changing = (), threading.Lock()
    _recent.clear()
    _stuck.clear()


os.register_at_fork(after_in_child=_in_child)
