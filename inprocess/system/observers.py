"""Who is told what happens in this process. The core tells; what becomes of it is the observers' business.

Whoever is told takes no lock and waits for nothing, so it may happen at any moment, as with a line of the log (see
``writing``).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any, Protocol

from inprocess.system import extensions

__all__ = ["Observer", "begin", "emit", "is_wanted", "leave", "whole"]


class Observer(Protocol):
    """May be a module. Any thread."""

    def begin(self, run_dir: str | None, job: str, source: str, rank: int) -> None:
        """A call begins, in a ``rank`` or its ``monitor`` (``source``); the job's name, and the initial rank."""

    def emit(self, kind: str, /, **attributes: Any) -> None:
        """Something happened."""

    def is_wanted(self) -> bool:
        """Whether what takes time to find out is worth it."""

    def leave(self) -> None:
        """The call is over: wait for what is not yet written, but not for long."""

    def whole(self) -> Iterator[CodeType]:
        """The code that an interruption must not leave half-way."""


_OBSERVERS: tuple[Observer, ...] = extensions.load("Observer")


def begin(run_dir: str | None, job: str, source: str, rank: int) -> None:
    """See `Observer.begin`."""
    for observer in _OBSERVERS:
        observer.begin(run_dir, job, source, rank)


def emit(kind: str, /, **attributes: Any) -> None:
    """Something happened, of one of the kinds that ``docs/events.md`` lists. Outside a call nobody is told."""
    for observer in _OBSERVERS:
        observer.emit(kind, **attributes)


def is_wanted() -> bool:
    """Whether somebody is told, so that what takes time to find out is worth it."""
    return any(observer.is_wanted() for observer in _OBSERVERS)


def leave() -> None:
    """The call is over. Waits for what is not yet written, but not for long."""
    for observer in _OBSERVERS:
        observer.leave()


def whole() -> Iterator[CodeType]:
    """The code that an interruption must not leave half-way."""
    yield emit.__code__
    for observer in _OBSERVERS:
        yield from observer.whole()
