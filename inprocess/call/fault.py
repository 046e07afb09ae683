"""When the fault was for which a rank restarts: the begin of the one figure that everybody sees. Pure.

A restart takes from the moment at which the first process noticed the fault (the rank that raised, the monitor of one
that died or hangs) until this rank enters the function. On another host's clock that moment says nothing; then it is
the one at which this rank heard of the interruption. How long a rank had stood still, or a host had been silent, before
anybody could notice is told separately. The definition is in docs/restart.md; the log, goodput, reports and metrics
have it from here.
"""

from __future__ import annotations

from collections.abc import Sequence

from inprocess.attribution import InterruptionRecord

__all__ = ["Fault"]


class Fault:
    """Of the restarts that are not told yet, usually one. Seconds of the monotonic clock. False: there is none."""

    def __init__(self) -> None:
        #: the first one; 0: none
        self.at = 0.0
        #: how long nothing had been heard of a rank by then
        self.silent = 0.0
        #: that of the last interruption
        self._last = 0.0

    def __bool__(self) -> bool:
        return self.at > 0.0

    def interrupted(self, now: float) -> None:
        """This rank knows."""
        self._begin(self.at or now, now)

    def explain(self, records: Sequence[InterruptionRecord], clock: str, now: float) -> None:
        """What ended the iteration, as everybody knows it.

        Args:
            records: its reasons; each may have the moment at which it was noticed, by the clock of its host.
            clock: the name of this host's.
            now: what it says.
        """
        if not records:
            return
        here = [record for record in records if clock and record.clock == clock and 0.0 < record.at <= now]
        first = min(here, key=lambda record: record.at, default=records[0])
        at = first.at if here else self._last or now
        self._begin(min(at, self.at or at), at)
        self.silent = self.silent or first.silent

    def _begin(self, first: float, last: float) -> None:
        self.at, self._last = first, last

    def pause(self, seconds: float) -> None:
        """The restart waited on purpose, which is no part of how long it takes."""
        if self:
            self._begin(self.at + seconds, self._last + seconds)

    def took(self, now: float) -> str:
        """For the line of the log."""
        if not self:
            return ""
        took = f"{(now - self.at) * 1e3:.0f} ms"
        return f"; noticed after {self.silent:.1f} s, restarted in {took}" if self.silent else f" after {took}"

    def told(self, now: float) -> dict[str, float]:
        """For the event of the function's entry: of the last interruption alone."""
        return {"took": round(now - self._last, 6), "silent": self.silent} if self else {}
