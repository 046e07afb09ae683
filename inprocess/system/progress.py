"""When long work says how far it is: not before it has taken ten seconds, and every ten seconds from then on.

There is no line that a terminal rewrites: it would be torn by what the user's own program prints there.
"""

from __future__ import annotations

from inprocess.system import clock

__all__ = ["EVERY_S", "Progress"]

#: seconds to the first line, and from one to the next
EVERY_S = 10.0


class Progress:
    """Of one piece of work that begins now. Costs one look at the clock."""

    def __init__(self) -> None:
        self._begin = clock.monotonic()
        self._next = self._begin + EVERY_S

    @property
    def seconds(self) -> float:
        """How long it has taken."""
        return clock.monotonic() - self._begin

    @property
    def left(self) -> float:
        """Seconds until the next line is due; negative where it is."""
        return self._next - clock.monotonic()

    def due(self) -> bool:
        """Whether to say something; the next time is ten seconds later."""
        now = clock.monotonic()
        if now < self._next:
            return False
        self._next = now + EVERY_S
        return True
