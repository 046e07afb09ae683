"""What is kept of a state beside the training: copies in memory, here and on another rank, and checkpoints."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from inprocess.call_wrapper import CallWrapper, current_call
from inprocess.live.beside import Beside
from inprocess.live.copies import Copies, Replicator
from inprocess.live.every import Schedule
from inprocess.live.patience import TIDY, all_do, all_ready, in_words, join_with_progress
from inprocess.live.plan import NOWHERE, Copy, Holdings, Plan, Point, Shard
from inprocess.live.present import LiveParts
from inprocess.live.transfer import Wire, gather
from inprocess.system.interpreter import SLICE
from inprocess.system.logs import get_logger
from inprocess.system.progress import Progress

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from inprocess.live.checkpoints import Checkpoints

__all__ = ["Around", "Saving", "checkpoints"]

log = get_logger("inprocess.live")
#: of the group for checkpoints: one that times out is of no use any more, and a disk may come back later than that
NEVER = datetime.timedelta(days=30)


class Around:
    """What a state is in: the running call, and this rank among the others.

    Apart from `LiveState`, or it and what it saves with would hold each other, and its memory would wait for a
    collection of garbage.
    """

    def __init__(self) -> None:
        #: weakly: it holds the last error, that holds frames, and these a connection
        self.call: weakref.ref[CallWrapper] | None = None
        self.rank = 0
        #: of the ranks, weakly; None: all
        self.group: weakref.ref[ProcessGroup] | None = None

    def tell(self, numbers: Sequence[int]) -> list[list[int]]:
        """What every rank says, by rank."""
        group = self.group() if self.group is not None else None
        return gather(Wire(group) if dist.is_initialized() else None, numbers)

    def shown(self) -> contextlib.AbstractContextManager[object]:
        """Around a wait that ends by itself: it is no hang, also where the program uses ``ping()``."""
        call = self.call() if self.call is not None else None
        runs = call is not None and call is current_call()
        return call.disable_hang_protection() if call is not None and runs else contextlib.nullcontext()

    def atomic(self) -> contextlib.AbstractContextManager[object]:
        """No restart begins inside."""
        call = self.call() if self.call is not None else None
        return call.atomic() if call is not None else contextlib.nullcontext()


class Saving:
    """Copies and checkpoints of one rank's state.

    Args:
        around: of the state.
        copy_every, save_every: when copies and checkpoints are due.
        distance: rank r sends its copies to rank r + distance; 0: nobody sends any.
        disk: where checkpoints go; None: nowhere.
    """

    def __init__(
        self, around: Around, copy_every: Schedule, save_every: Schedule, distance: int, disk: Checkpoints | None
    ) -> None:
        self._around, self.copy_every, self.save_every = around, copy_every, save_every
        self._distance, self.disk = distance, disk
        #: this rank's, and those that it keeps for another one
        self.copies, self.kept = Copies(), Copies()
        #: the next commit is the first one of the training: a fault in there leaves nothing to go back to
        self.is_first = False
        self._replicator: Replicator | None = None
        #: of its own for checkpoints, on the host; weakly: who has destroyed it has no threads of it left
        self._savers: weakref.ref[ProcessGroup] | None = None
        #: the checkpoint that is being written, or was the last time anybody looked
        self._written: Progress | None = None
        #: put before the names of this rank's tensors in a checkpoint, and whether it writes the rest for all of these
        self._family, self._leads = "", True

    @property
    def nbytes(self) -> int:
        """Host memory (bytes)."""
        return self.copies.nbytes + self.kept.nbytes + (self.disk.nbytes if self.disk is not None else 0)

    def held(self) -> tuple[Copy, ...]:
        """The copies that there are, this rank's and those it keeps for another one."""
        return (*self.copies.held(), *self.kept.held())

    def drop_after(self, point: Point, spared: Point = NOWHERE) -> None:
        """Forget those of a future that has not come to be; see `Copies.drop_after`."""
        for copies in (self.copies, self.kept):
            copies.drop_after(point, spared)

    # --- after a restart ------------------------------------------------------------------------------------------

    def end_sending(self, wire: Wire | None) -> None:
        """Of the iteration before: its group is cut off, so it ends at once, as a rule."""
        if not self._distance:
            return
        sender = self._replicator.sender if self._replicator is not None else Beside("none")
        all_ready(lambda: sender.ended(SLICE), functools.partial(gather, wire), self._around.shown, TIDY)
        if not sender.ended(0):
            log.warning("a copy for another rank is still being received, from an earlier iteration; it is dropped")
            self.kept = Copies()

    def begin_groups(self, group: ProcessGroup | None) -> None:
        """Groups of these ranks, for the threads beside the training."""
        self._replicator = self._savers = None
        if not dist.is_initialized():
            return
        size = dist.get_world_size(group)
        if self._distance and size > 1:
            if self._distance % size:
                self._replicator = Replicator(self.kept, _on_host(group), self._distance)
            else:
                log.warning("replica_distance=%d is no distance among %d ranks: no copy is sent", self._distance, size)
        if self.disk is not None:
            self._savers = weakref.ref(_on_host(group, NEVER))

    def begin_saving(self, haves: Sequence[Holdings], shard: tuple[int, int] | None) -> None:
        """Who writes what of a checkpoint. ``shard``: as the program gave it to `LiveState.recover`."""
        self._family = "" if shard is None else f"shard {shard[0]} of {shard[1]}/"
        same = [rank for rank, have in enumerate(haves) if shard is None or have.shard == Shard(*shard)]
        self._leads = self._around.rank == same[0]

    def load(
        self, found: Plan | None, wire: Wire | None, present: LiveParts, before: LiveParts
    ) -> tuple[int, str] | None:
        """From the newest checkpoint that is whole, where it is newer than what is in memory; its step, and which one
        it was."""
        disk = self.disk
        if disk is None:
            return None
        around, tell = self._around, functools.partial(gather, wire)
        all_ready(lambda: disk.writer.ended(SLICE), tell, around.shown, TIDY)  # it may be removing some
        from inprocess.live.search import Search  # noqa: PLC0415  (it imports what writes checkpoints)

        search = Search(disk, around.rank, tell, around.shown, around.atomic)
        name, damaged = search.newest(found.step if found is not None else None)
        if name is not None:
            before.tear()
            disk.load(name, present, self._family, self._savers() if self._savers is not None else None)
        if damaged:
            with around.atomic():
                disk.found_damaged(damaged, moves=around.rank == 0)
        return (name.step, f"the checkpoint {disk.path(name)}") if name is not None else None

    # --- at each step ---------------------------------------------------------------------------------------------

    def before_commit(self, present: LiveParts) -> None:
        """What is being copied must not change. Before the first step that is what the training begins with, unless the
        program has changed it since `recover`: then it may be of any step."""
        if self.is_first:
            self.is_first = False
            if not present.is_changed():
                self.copies.take(present.record(), present.held)
        self.copies.settle()

    def keep(self, present: LiveParts) -> None:
        """Whatever is due at this step."""
        if self._written is not None and self._written.due():
            self._say_progress(self._written.seconds)
        if self.copy_every.is_due(present.step):
            self._copy(present)
            self.copy_every.done(present.step, self._around.tell)
        if self.disk is not None and self.save_every.is_due(present.step):
            self._save(self.disk, present)
            self.save_every.done(present.step, self._around.tell)

    def save_last(self, present: LiveParts, seconds: float) -> bool:
        """A checkpoint of this step, whether one is due or not. True: it is written, within so many seconds."""
        disk = self.disk
        assert disk is not None
        if disk.newest != present.step and not (disk.writer.step == present.step and not disk.writer.ended(0)):
            join_with_progress(disk.writer, seconds / 2, self._around.shown)
            self._save(disk, present)
        log.info("all ranks leave: waiting for the checkpoint of step %d", present.step)
        join_with_progress(disk.writer, seconds, self._around.shown)
        return disk.newest == present.step

    def _copy(self, present: LiveParts) -> None:
        if self._replicator is not None and not self._is_free(self._replicator.sender, present.step, "copy", "sent"):
            return
        buffer = self.copies.take(present.record(), present.held)
        if self._replicator is not None:
            with self._around.atomic():
                self._replicator.begin(buffer)

    def _say_progress(self, seconds: float) -> None:
        """Of the last checkpoint, which may be there."""
        disk = self.disk
        if disk is None or disk.writer.is_done or disk.writer.ended(0):
            self._written = None
        elif self._around.rank == 0:
            log.info("the checkpoint of step %d is being written into %s, for %.0f s", disk.writer.step, disk, seconds)

    def _save(self, disk: Checkpoints, present: LiveParts) -> None:
        if not self._is_free(disk.writer, present.step, "checkpoint", f"written into {disk}"):
            return
        staged = disk.stage(present.step, present, self._family, self._leads)
        with self._around.atomic():
            disk.begin(staged, self._savers)
            self._written = Progress()

    def _is_free(self, work: Beside, step: int, what: str, where: str) -> bool:
        """Whether the one before has ended, on all ranks. All come to the same answer."""
        busy = all_do(work, self._around.tell, self._around.shown)
        if busy and self._around.rank == 0 and work.skipped & (work.skipped - 1) == 0:  # 1, 2, 4, 8...
            log.warning(
                "the %s of step %d is skipped (%d in a row), the training continues: %s. Does it answer there?",
                *(what, step, work.skipped, in_words(busy, where)),
            )
        return not busy

    def wait(self, timeout: float) -> None:
        """See `LiveState.wait`."""
        around, replicator = self._around, self._replicator
        if replicator is not None and not join_with_progress(replicator.sender, timeout, around.shown):
            log.warning("rank %d: the last copy has not been sent within %g s; it is given up", around.rank, timeout)
        if self.disk is not None and not join_with_progress(
            self.disk.writer, timeout, around.shown, "the checkpoint" if around.rank == 0 else ""
        ):
            writer = self.disk.writer
            what = "old checkpoints are being removed" if writer.is_done else f"step {writer.step} is being written"
            log.warning(
                "rank %d does not wait for the disk any longer: %s in %s, for %.0f s now. Its thread %s is left to "
                "itself; look whether the file system answers on all hosts",
                *(around.rank, what, self.disk, writer.seconds, writer.name),
            )


def checkpoints(folder: str | os.PathLike[str] | None, keep: int, mode: int) -> Checkpoints | None:
    """Those in a folder; None without one."""
    if folder is None:
        return None
    from inprocess.live.checkpoints import Checkpoints  # noqa: PLC0415  (torch.distributed.checkpoint takes 0.7 s)

    return Checkpoints(os.fspath(folder), keep, mode)


def _on_host(group: ProcessGroup | None, timeout: datetime.timedelta | None = None) -> ProcessGroup:
    """Another group of these ranks, for threads beside the training."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    made: ProcessGroup = dist.new_group(
        ranks, timeout=timeout, backend="gloo", use_local_synchronization=group is not None
    )
    return made
