"""Which restarts a rank has not told yet, and why they happened. Pure.

An iteration may be interrupted before its function is called. Its restart is told with the next one, so that no number
is missing in the log. Who joins knows only of the restart that let it in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["UntoldRestarts"]

#: so many reasons are told; earlier ones are left out
REASONS = 3


class UntoldRestarts:
    """``told``: the last iteration of this call whose restart is told; iteration 0 is no restart."""

    def __init__(self, told: int = 0) -> None:
        self._told = self._noted = told
        self._reasons: deque[str] = deque(maxlen=REASONS)

    def join(self, iteration: int) -> None:
        """This process is let in with this iteration."""
        self._told = self._noted = iteration - 1

    def note(self, iteration: int, why: str) -> None:
        """The iteration begins, since the one before was interrupted."""
        if iteration > self._noted:
            self._noted = iteration
            self._reasons.append(why)

    def tell(self, before: int) -> str:
        """What is not told yet, as ``restart 3: why`` or ``restarts 2-3: why; then why``; empty where that is nothing.

        ``before``: restarts in earlier calls.
        """
        first, last, self._told = self._told + 1, self._noted, self._noted
        reasons = list(_without_repeats(self._reasons))
        self._reasons.clear()
        if first > last:
            return ""
        numbers = f"restart {before + last}" if first == last else f"restarts {before + first}-{before + last}"
        return f"{numbers}: {'; then '.join(reasons)}"


def _without_repeats(texts: Iterable[str]) -> Iterable[str]:
    last = None
    for text in texts:
        if text != last:
            yield text
        last = text
