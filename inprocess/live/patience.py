"""How the main thread waits for work beside the training, which may hang: for a bounded time, and shows that it runs.

It waits in slices, each of them in ``shown()``, so that neither the automatic progress nor ``ping()`` is missed. A rank
must not decide alone that it has waited enough: where others take part, all count the same rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

from inprocess.live.beside import Beside
from inprocess.system import clock
from inprocess.system.interpreter import SLICE
from inprocess.system.logs import get_logger
from inprocess.system.progress import Progress

__all__ = ["Doing", "Gather", "Look", "Shown", "all_do", "all_ready", "join_with_progress", "in_words"]

log = get_logger("inprocess.live")
#: what every rank says, by rank
Gather: TypeAlias = Callable[[Sequence[int]], list[list[int]]]
#: around a wait: it is no hang
Shown: TypeAlias = Callable[[], AbstractContextManager[object]]
#: how long a step waits for what has not ended in time, once (seconds)
GRACE = 0.5
#: how long until what only tidies up is left to itself (seconds)
TIDY = 10.0
#: how long the disk is waited for where the state is in memory, too, if an older one (seconds)
PATIENCE = 30.0
#: seconds between two lines about a wait
SAID_EVERY = 10.0
#: states of a rank's thread
FREE, BUSY, ON_DISK = range(3)


def join_with_progress(work: Beside, seconds: float, shown: Shown, what: str = "") -> bool:
    """Whether it has ended in time. What only tidies up gets less. ``what`` is waited for, for the log."""
    begin, progress = clock.monotonic(), Progress()
    while True:
        with shown():
            ended = work.ended(min(SLICE, seconds))
        if what and not ended and progress.due():
            log.info("waiting for %s of step %d, for %.0f s", what, work.step, progress.seconds)
        if ended or clock.monotonic() - begin >= (min(seconds, TIDY) if work.is_done else seconds):
            return ended


@dataclass(frozen=True)
class Doing:
    """What a rank's thread is at: which step, and for how many seconds."""

    state: int
    step: int
    seconds: int


def all_do(work: Beside, gather: Gather, shown: Shown) -> dict[int, Doing]:
    """What threads have not ended, by rank. Where all have, the next one can begin.

    One that has not is waited for, but not at each step again.
    """
    with shown():
        ended = work.ended(0 if work.skipped else GRACE)
    state = FREE if ended else ON_DISK if work.is_on_disk else BUSY
    found = [Doing(*row) for row in gather([state, work.step, int(work.seconds)])]
    busy = {rank: doing for rank, doing in enumerate(found) if doing.state != FREE}
    work.skipped = work.skipped + 1 if busy else 0
    return busy


def in_words(busy: dict[int, Doing], where: str) -> str:
    """Of ranks that wait for others, and others that wait for the disk, only the latter matter."""
    slow = {rank: doing for rank, doing in busy.items() if doing.state == ON_DISK} or busy
    first = min(slow.values(), key=lambda doing: doing.step)
    ranks = ", ".join(map(str, slow))
    return f"after {first.seconds} s that of step {first.step} is still being {where}, by ranks {ranks}"


def all_ready(
    ready: Callable[[], bool], gather: Gather, shown: Shown, limit: float | None = None, where: str = ""
) -> bool:
    """Whether all ranks are, in time. They ask each other in rounds, so none of them waits for long without a sign.

    Args:
        ready: waits for `SLICE` at most.
        limit: seconds. None: for as long as it takes.
        where: for the log.
    """
    for number in itertools.count(1):
        with shown():
            is_ready = ready()
        if not any(waits for (waits,) in gather([not is_ready])):
            return True
        if where and not is_ready and number % round(SAID_EVERY / SLICE) == 0:
            log.warning("%s has not answered for %.0f s; the training waits for it", where, number * SLICE)
        if limit is not None and number * SLICE >= limit:
            return False
    raise AssertionError("unreachable")


class Look:
    """A question to the disk, in a thread.

    Args:
        reader: where it runs; there may be one yet that an interruption cut off.
        work: the question.
        atomic: around the beginning of the thread.
    """

    def __init__(self, reader: Beside, work: Callable[[], Any], atomic: Shown) -> None:
        self._reader, self._work, self._atomic = reader, work, atomic
        self._is_begun = False
        self._found: list[Any] = []

    def ready(self) -> bool:
        if not self._reader.ended(SLICE):
            return False
        if self._is_begun:
            return True
        with self._atomic():
            self._reader.begin(0, _run, self._work, self._found)
            self._is_begun = True
        return self._reader.ended(SLICE)

    def answer(self) -> Any:
        """When it is ready. Raises what the question has raised."""
        value, error = self._found
        try:
            if error is not None:
                raise error
        finally:
            del error  # else its frames would keep this one
        return value


def _run(work: Callable[[], Any], found: list[Any]) -> None:
    try:
        found += [work(), None]
    except BaseException as error:
        found += [None, error]
