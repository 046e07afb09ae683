"""What the launcher tells of workers that failed, a moment late. Nothing here does IO, and the caller has the clock.

Where a job ends with an error its workers fail one after the other, and for the first of them it does not show yet that
nobody will be left: "it is started again at once" would come right before "the job has failed". The worker is started
at once nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Told"]


@dataclass(frozen=True)
class _Line:
    why: str
    #: what is done about it
    remedy: str
    #: when it is told
    due: float


class Told:
    """The failures that are still to be told, by rank.

    Args:
        say: writes a line.
        hold: how long a line is held back (seconds).
    """

    def __init__(self, say: Callable[[str], None], hold: float) -> None:
        self._say, self._hold = say, hold
        self._lines: dict[int, _Line] = {}

    def failed(self, rank: int, why: str, remedy: str, now: float) -> None:
        """To be told as "why; remedy" in a moment."""
        self._lines[rank] = _Line(why, remedy, now + self._hold)

    def again(self, rank: int) -> None:
        """This rank has failed again, so the remedy was what had been done: told now."""
        if line := self._lines.pop(rank, None):
            self._say(f"{line.why}; {line.remedy}")

    def ranks(self) -> list[int]:
        """Those of which nothing has been told yet."""
        return list(self._lines)

    def due(self) -> list[float]:
        """When lines are to be told."""
        return [line.due for line in self._lines.values()]

    def tell(self, now: float) -> None:
        """What is due by ``now``."""
        for rank in [rank for rank, line in self._lines.items() if line.due <= now]:
            self.again(rank)

    def all(self) -> None:
        """The job goes well; nothing has to wait any more."""
        for rank in list(self._lines):
            self.again(rank)

    def together(self, *why: str) -> str:
        """The failures just before and this one, without the remedies: something else happens now."""
        before = [line.why for line in self._lines.values()]
        self._lines.clear()
        return "; ".join([*before, *why])
