"""Process groups that have ended: freed once a function runs again, unless something else refers to them.

A DistributedDataParallel reducer that is a group's last owner destroys it with the interpreter lock held, and waits for
Gloo's worker, which may want that lock to free an operation. So a group that is referred to from elsewhere stays here
until it is not, or until the call ends. That holds for those that the program itself destroys, too: with torch 2.13 a
function that ends right after its last backward pass and ``destroy_process_group()`` would now and then not return.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Sequence
from typing import Any

from inprocess.collectives import background
from inprocess.collectives.gloo_lost import lost_operations
from inprocess.system.heap import heap

__all__ = ["DeadGroups", "dead_groups"]

#: seconds that the end of a call waits for the destructors of process groups
LET_GO = 1.0


class DeadGroups:
    """Of one process; a `Part` of a call."""

    def __init__(self) -> None:
        self._active = False
        #: those that the abort has ended
        self._groups: list[Any] = []
        #: those that the program destroyed
        self._destroyed: list[Any] = []
        #: those that nobody else has
        self._unused: list[Any] = []
        #: how many others had after the last collection
        self._kept = 0

    def begin(self) -> None:
        """Release what is held, for `free`, except groups that others have; hold what comes from now on."""
        self._hold_once()
        self._let_go([*_shared(self._groups), *_shared(self._destroyed)])
        self._active = True

    def free(self) -> list[threading.Thread]:
        """Free the groups that were released, once the function runs: to begin it before took a restart up to 1.8 ms.

        Any thread. Returns the threads that do it.
        """
        unused, self._unused = self._unused, []
        try:
            return [background.run(functools.partial(_free, unused))] if unused else []
        except RuntimeError:  # there is no thread left
            self._unused = unused
            return []

    def keep(self, groups: list[Any]) -> None:
        """Those that torch has forgotten; takes them out of the list."""
        if self._active:
            self._groups += _without(groups, self._groups)
            groups.clear()
        elif groups:
            self._drop(groups)

    def destroyed(self, group: Any) -> None:
        """The program is destroying a process group. Lets go of earlier ones that nobody else has."""
        if not self._active:
            return
        kept = _without(_shared(self._destroyed), [group])  # an interruption may have it destroyed once more
        alone = _without(self._destroyed, [*kept, group])
        self._destroyed = [*kept, group]
        if alone:
            self._drop(alone)

    def collect(self) -> None:
        """The function was left: free the groups that are in reference cycles.

        With tensor parallelism or FSDP each iteration leaves such cycles, and each group has threads and sockets. The
        collection looks at what this iteration has made. There is none where nothing but this list has a group, as with
        DistributedDataParallel, and none where no more groups are shared than those that the last one did not free:
        these the program keeps, in a global variable perhaps.
        """
        self._hold_once()
        for generation in (1, 2):
            if len(_shared(self._groups)) > self._kept:
                heap.collect(generation)
        self._kept = len(_shared(self._groups))

    def end(self) -> None:
        """The call is over: release all, and hold nothing more."""
        self._active = False
        self._kept = 0
        self._hold_once()
        if _shared(self._groups):  # a collection that found one in use for a moment skips the next one in a cycle
            heap.collect()
        self._let_go([])
        background.to_be_joined(self.free())
        background.join(LET_GO)

    def _hold_once(self) -> None:
        """The abort may end a group that the program was destroying; two references of ours would be another's."""
        self._destroyed = _without(self._destroyed, self._groups)

    def _drop(self, groups: list[Any]) -> None:
        try:
            background.run(groups.clear)
        except RuntimeError:  # there is no thread left: the next `free` does it
            self._unused += groups
            groups.clear()

    def _let_go(self, without: list[Any]) -> None:
        groups, self._groups, self._destroyed = [*self._groups, *self._destroyed], without, []
        self._unused += _without(groups, without)


def _counts(things: Sequence[Any]) -> list[int]:
    """How many references there are to each, with those that it takes to count them."""
    return [sys.getrefcount(thing) for thing in things]


#: of a thing that only one list refers to
_ALONE = _counts([object()])[0]


def _shared(groups: Sequence[Any]) -> list[Any]:
    """Those that are referred to from elsewhere."""
    return [group for group, count in zip(groups, _counts(groups), strict=True) if count > _ALONE]


def _without(groups: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Those that are none of the others."""
    return [group for group in groups if not any(group is other for other in others)]


def _free(groups: list[Any]) -> None:
    """A group's destructor waits for its threads, and one of these for an operation that is lost."""
    lost_operations.release_rest()
    groups.clear()


#: one per process, like torch's process groups
dead_groups = DeadGroups()
