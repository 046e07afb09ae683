"""Which share of a call was productive, as one rank knows it by itself. Pure: the caller says what time it is.

The definition is the report's (``reports/accounting``): the function ran, and its steps were not done again after a
fault. Here the call begins with this process; a fault was when this rank saw it, or at its last ``ping()`` where nobody
made progress; and steps are kept up to its own last ``atomic()``, where the report asks all ranks and `LiveState`.
"""

from __future__ import annotations

__all__ = ["Goodput"]


class Goodput:
    """Of one call, over all of its iterations. ``now`` is in seconds, of one clock."""

    def __init__(self, now: float) -> None:
        self._begin, self._productive = now, 0.0
        #: when the function was called in this iteration; None: it does not run
        self._since: float | None = None
        self.interruptions = 0

    def called(self, now: float) -> None:
        """The function is about to be called."""
        self._since = now

    def interrupted(self, at: float, steps: int, kept: int) -> None:
        """The iteration was interrupted after so many steps, of which those ``kept`` are not done again."""
        self.interruptions += 1
        share = min(1.0, kept / steps) if steps > 0 else 1.0
        self._ran_until(at, share)

    def _ran_until(self, at: float, share: float = 1.0) -> None:
        if self._since is not None:
            self._productive += max(0.0, at - self._since) * share
        self._since = None

    def line(self, now: float) -> str:
        """At the end of the call, such as ``2 restarts in 61.3 s; goodput 97.9%``."""
        self._ran_until(now)
        seconds, count = now - self._begin, self.interruptions
        share = self._productive / seconds if seconds > 0 else 1.0
        return f"{count} restart{'s' * (count != 1)} in {seconds:.1f} s; goodput {share:.1%}"
