"""What was there before the function is put out of the garbage collector's sight, so that a collection is a short one.

A full collection looks at every object of the process: 250 ms with a million of them. What a restart has to free is
what the last iteration has made. So everything else is frozen when the function is entered (``gc.freeze()``, a
constant time), and the collections of a restart look at what is younger alone.

That is for this library's own collections. Any other full one, Python's or the program's, thaws all before it begins,
and is as whole as it would be without this library; from then on until the next entry a restart collects nothing. A
program that has frozen objects before the call has made its collections short by itself: nothing is frozen or thawed.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

__all__ = ["Heap", "heap"]

#: Python 3.14 collects its old generation in steps and never as a whole, so that nothing would thaw what is frozen
COLLECTS_IN_STEPS = sys.version_info >= (3, 14)


class Heap:
    """For one call at a time, in the main thread."""

    def __init__(self) -> None:
        self._frozen = self._collecting = self._is_the_programs = False

    def begin(self) -> None:
        """A call begins."""
        self._is_the_programs = gc.get_freeze_count() > 0  # counts what is frozen, usually nothing
        gc.callbacks.append(self._on_collection)

    def enter(self) -> None:
        """The function is about to be entered: what is there now is not its own."""
        if not self._is_the_programs and not COLLECTS_IN_STEPS:
            gc.freeze()
            self._frozen = True

    def collect(self, generation: int = 2) -> bool:
        """Free what is in reference cycles, and younger than the entry. False: that cannot be told; nothing is done."""
        if not self._frozen and not self._is_the_programs:
            return False
        self._collecting = True
        try:
            gc.collect(generation)
        finally:
            self._collecting = False
        return True

    def thaw(self) -> None:
        """Whoever looks for something among all objects finds it from now on."""
        if self._frozen:
            self._frozen = False
            gc.unfreeze()

    def end(self) -> None:
        """The call is over."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)
        self.thaw()

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start" and info["generation"] == 2 and not self._collecting:
            self.thaw()


#: one per process, as the collector is; it begins and ends with a call
heap = Heap()
