"""The last checkpoint, where all ranks were asked to leave: all write one of the same step, and leave then.

Ranks learn at different moments that all of them leave, and may be a step apart. The thread that learns it says to the
others which commit is the next one, at the earliest, that its rank makes with that knowledge. At that commit the rank
waits until all have said so, which takes no step of anybody, and all save after the latest of these commits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from inprocess.call_wrapper import CallWrapper, Controls, Leaving
from inprocess.live.patience import Shown
from inprocess.protocol.verbs.leaving import SAVED, STEP
from inprocess.system.interpreter import sleep_with_progress
from inprocess.system.logs import get_logger

__all__ = ["LastCheckpoint"]

log = get_logger("inprocess.live")
#: between two questions to the store (seconds)
PAUSE_S = 0.01
#: of the time that is left, what remains for leaving (seconds)
SPARE_S = 1.0


class LastCheckpoint:
    """Of one LiveState of one rank, since its last `recover`."""

    def __init__(self) -> None:
        self._due: int | None = None
        #: whether it is written; None: not tried yet
        self.is_written: bool | None = None

    def again(self, call: CallWrapper | None, saves: bool) -> LastCheckpoint:
        """That of the next `recover`. ``saves``: it writes one."""
        new = LastCheckpoint()
        if call is not None:
            wanted = Controls(call).last.wanted
            wanted.discard(self)
            wanted.update([new] if saves else [])
        return new

    def committed(self, call: CallWrapper, save: Callable[[float], bool], shown: Shown) -> None:
        """A commit has ended. Of several LiveStates each saves, unless one makes no commit in a whole step of another.

        Args:
            save: writes the checkpoint, within so many seconds; whether it did.
            shown: around a wait: it is no hang.
        """
        told = Controls(call).last
        told.commits += 1  # first: see `Leaving.everybody`
        leaving, deputy = call.leaving, told.deputy
        if leaving is None or not leaving.everybody or leaving.is_saved or deputy is None:
            return
        if self._due is None:
            found = _await(functools.partial(deputy.agree, STEP), leaving, shown)
            self._due = found or 0
        if told.commits < self._due:
            return
        if self._due and self.is_written is None:
            self.is_written = save(leaving.seconds_left - SPARE_S)
            if any(each.is_written is None for each in told.wanted):
                return  # the others have yet to
        if any(each.is_written for each in told.wanted):
            deputy.say(SAVED)  # an interruption now would cut off a rank that is at the end of it
            _await(functools.partial(deputy.agree, SAVED), leaving, shown)
        leaving.is_saved = True


def _await(agree: Callable[[], int | None], leaving: Leaving, shown: Shown) -> int | None:
    """What all have said; None where the time is over."""
    with shown():
        while (found := agree()) is None and leaving.seconds_left > SPARE_S:
            sleep_with_progress(PAUSE_S)
    if found is None:
        log.warning("not all ranks came to the step of the last checkpoint in time: leaving without one")
    return found
