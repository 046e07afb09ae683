"""When the next copy, or the next checkpoint, is due: on all ranks at the same step."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence

from inprocess.exception import OptionError
from inprocess.system import clock

#: steps until the first one, where it goes by time: by then it is known how long a step takes
FIRST = 2


class Schedule:
    """Every so many steps; or about every so many seconds, which ranks agree on when one is due.

    Args:
        name: of the option.
        value: steps, 0 for never, or a timedelta.
    """

    def __init__(self, name: str, value: int | datetime.timedelta) -> None:
        self._seconds = value.total_seconds() if isinstance(value, datetime.timedelta) else 0.0
        self._steps = value if isinstance(value, int) else 0
        if isinstance(value, bool) or not isinstance(value, int | datetime.timedelta) or self._steps < 0:
            raise OptionError(f"{name}={value!r} must be a number of steps, 0 for never, or a datetime.timedelta")
        if isinstance(value, datetime.timedelta) and self._seconds <= 0:
            raise OptionError(f"{name}={value!r} must be longer than nothing; 0 steps stand for never")
        self._begin, self._next = (0, 0.0), 0

    def __bool__(self) -> bool:
        return bool(self._steps or self._seconds)

    def __str__(self) -> str:
        if self._seconds:
            return f"about every {self._seconds:g} s"
        return "at each step" if self._steps == 1 else f"every {self._steps} steps"

    def begin(self, step: int) -> None:
        """All ranks are at this step."""
        self._begin, self._next = (step, clock.monotonic()), step + FIRST

    def is_due(self, step: int) -> bool:
        if self._seconds:
            return step >= self._next
        return bool(self._steps) and step % self._steps == 0

    def done(self, step: int, gather: Callable[[Sequence[int]], list[list[int]]]) -> None:
        """It was due at this step. Agrees on the next one, by the slowest rank's time for a step."""
        if not self._seconds:
            return
        before, since = self._begin
        now = clock.monotonic()
        mine = round(1e6 * (now - since) / max(1, step - before))
        slowest = max(time for (time,) in gather([mine])) / 1e6
        self._begin, self._next = (step, now), step + max(1, round(self._seconds / max(slowest, 1e-6)))
