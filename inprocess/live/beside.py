"""Work beside the training: one thread at a time, which may hang, and which nobody waits for without a limit.

A write or a read that hangs cannot be ended from outside. Its thread is left to itself then, with a warning; as long as
it runs nothing else is begun in its place, so there is never more than one of a kind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from inprocess.system import clock

__all__ = ["Beside"]


class Beside:
    """A place for one thread.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread: threading.Thread | None = None
        self._begin = 0.0
        #: which step it is about
        self.step = 0
        #: whether it is the disk that it is at, and not waiting for other ranks
        self.is_on_disk = False
        #: what the training needs is done; the rest only tidies up
        self.is_done = False
        #: how many of the same kind were left out while it ran
        self.skipped = 0

    def begin(self, step: int, work: Callable[..., None], *args: Any) -> None:
        """Only where the one before has ended; and inside ``atomic()``: an interruption must not strike in here."""
        self.step, self.skipped, self._begin = step, 0, clock.monotonic()
        self.is_on_disk = self.is_done = False
        self._thread = threading.Thread(target=work, args=args, name=self.name, daemon=True)
        self._thread.start()

    def ended(self, seconds: float) -> bool:
        """Whether the thread has ended, well or not; waits so long at most."""
        thread = self._thread
        if thread is not None and thread.ident is not None:  # it was interrupted before it began, perhaps
            thread.join(seconds)
            if thread.is_alive():
                return False
        self._thread = None
        return True

    @property
    def seconds(self) -> float:
        """How long ago it began."""
        return clock.monotonic() - self._begin
