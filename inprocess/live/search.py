"""Which checkpoint all ranks go on from: the one that was written last and is whole.

The disk is looked at from a thread, since it may be slow or not answer. Where the state is in memory, too, if an older
one, that is given up after a while; where it is not, there is nothing else to do than to wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inprocess.exception import StateLost
from inprocess.live.checkpoints import Checkpoints
from inprocess.live.patience import PATIENCE, Gather, Look, Shown, all_ready
from inprocess.live.plan import NOTHING
from inprocess.live.shelf import Name
from inprocess.system.errors import first_line
from inprocess.system.logs import get_logger

__all__ = ["Search"]

log = get_logger("inprocess.live")


class Search:
    """Collective.

    Args:
        rank: this one.
        gather: what every rank says.
        shown: around waits.
        atomic: around the beginning of a thread.
    """

    def __init__(
        self,
        disk: Checkpoints,
        rank: int,
        gather: Gather,
        shown: Shown,
        atomic: Shown,
    ) -> None:
        self._disk, self._rank, self._gather, self._shown, self._atomic = disk, rank, gather, shown, atomic

    def newest(self, memory: int | None) -> tuple[Name | None, list[Name]]:
        """The one to load, and those that are damaged.

        Args:
            memory: the step that is in memory; None: none is.

        Raises:
            StateLost: there are some, all of them are damaged, and there is nothing in memory.
        """
        damaged: list[Name] = []
        for name in self._names(memory):
            path = self._disk.path(name)
            fault = self._look(lambda name=name: self._disk.fault(name, self._rank, self._size), memory)  # type: ignore[misc]
            if fault is None:
                return None, damaged
            bad = [str(rank) for rank, (is_bad,) in enumerate(self._gather([bool(fault)])) if is_bad]
            if fault:
                log.error("rank %d: the checkpoint %s is damaged: %s", self._rank, path, fault)
            if not bad:
                return name, damaged
            log.warning("the checkpoint %s is passed over: ranks %s cannot read all of it", path, ", ".join(bad))
            damaged.append(name)
        if damaged and memory is None:
            raise StateLost(
                f"none of the {len(damaged)} checkpoints in {self._disk} can be read by all ranks. The folder must be "
                "the same on all hosts; remove the checkpoints to begin at step 0"
            )
        return None, damaged

    def _names(self, memory: int | None) -> list[Name]:
        """As the first rank sees them: others may not see all of them yet."""
        after = NOTHING if memory is None else memory
        found = self._look((lambda: self._disk.finished(after)) if self._rank == 0 else self._disk.nothing, memory)
        rows = self._gather(found or self._disk.nothing())
        self._size = len(rows)
        return self._disk.names(rows[0])

    def _look(self, work: Callable[[], Any], memory: int | None) -> Any:
        """None: there is something in memory, and the disk does not answer."""
        question = Look(self._disk.reader, work, self._atomic)
        limit = None if memory is None else PATIENCE
        if not all_ready(question.ready, self._gather, self._shown, limit, str(self._disk)):
            said = "%s has not answered for %.0f s: the training continues at step %s, which is in memory"
            log.warning(said, self._disk, PATIENCE, memory)
            return None
        try:
            return question.answer()
        except Exception as error:
            if memory is None:
                raise
            log.warning("%s cannot be looked into: %s; step %d is in memory", self._disk, first_line(error), memory)
            return None
