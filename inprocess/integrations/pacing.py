"""What the callbacks of all frameworks do: show progress, and give what takes longer than a step a limit of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from inprocess.call_wrapper import current_call

__all__ = ["Pace"]


class Pace:
    """Of one training. Does nothing outside of a wrapped function.

    Args:
        timeout: timedelta or seconds in place of ``soft_timeout`` for a section; None: ``soft_timeout``, or what was
            learned from those before, where that is longer.
    """

    def __init__(self, timeout: Any = None) -> None:
        self._timeout = timeout
        self._section: AbstractContextManager[None] | None = None

    def begin(self) -> None:
        """A training begins, perhaps again: a section that an interruption has ended is over."""
        self._section = None

    def ping(self) -> None:
        """A step is done."""
        if (call := current_call()) is not None:
            call.ping()

    def enter(self, name: str) -> None:
        """What comes next is no step: an evaluation, a checkpoint."""
        self.leave()
        if (call := current_call()) is not None:
            self._section = call.section(name, self._limit(call, name))
            self._section.__enter__()

    def _limit(self, call: Any, name: str) -> Any:
        """What is learned only makes it longer: with what has no hook of its own, one may take much longer than all
        before."""
        learned = call.timeouts.section_limit(name) if self._timeout is None else None
        return self._timeout if learned is None else max(learned, call.timeouts.soft_timeout)

    def leave(self) -> None:
        """It is over, if it was one; counts as progress."""
        section, self._section = self._section, None
        if section is not None:
            section.__exit__(None, None, None)
            self.ping()

    def fail(self, error: BaseException) -> None:
        """The training ends with an error, and with it what was going on."""
        section, self._section = self._section, None
        if section is not None:
            section.__exit__(type(error), error, error.__traceback__)
