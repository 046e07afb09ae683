"""The training state that survives a restart in memory: one object, `recover`, `commit`."""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import os
import secrets
import weakref
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from inprocess.call_wrapper import CallWrapper, Controls
from inprocess.exception import InternalError, LiveStateError, OptionError, StateLost
from inprocess.hardware.leftovers import keepers
from inprocess.live import randoms
from inprocess.live.copies import Buffer
from inprocess.live.every import Schedule
from inprocess.live.last import LastCheckpoint
from inprocess.live.per_rank import RankParts
from inprocess.live.plan import (
    DRAWN_BITS,
    NOTHING,
    NOWHERE,
    Copy,
    Holdings,
    Plan,
    Point,
    Shard,
    Source,
    Where,
    differing,
    newest,
    next_history,
    plan,
    whole_copies,
)
from inprocess.live.present import LiveParts
from inprocess.live.saving import Around, Saving, checkpoints
from inprocess.live.sendable import SendableCheck
from inprocess.live.transfer import Wire, gather
from inprocess.live.tree import Record, Stateful, read
from inprocess.system.logs import get_logger
from inprocess.system.observers import emit

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LiveState"]

log = get_logger("inprocess.live")
TRANSPORTS = ("group", "http")


class LiveState:
    """The state of a training, and at which step it is.

    ::

        live = inprocess.LiveState(model=model, optim=optim)     # outlives restarts

        @inprocess.Wrapper()
        def train(live, call: inprocess.CallWrapper = None):
            dist.init_process_group("nccl")
            step = live.recover(call)                            # on all ranks the same
            ddp = DistributedDataParallel(model)                 # after it: this gives all ranks what rank 0 has
            while step < total:
                ddp(...).backward()
                with live.commit(step + 1):                      # no restart cuts this in half
                    optim.step()
                step += 1

    What changes parameters or optimizer state belongs inside ``commit``, and nothing that waits for other ranks. All
    else may change at any time, such as a BatchNorm's averages or a data loader's position: a small copy of it is kept
    at each step. Gradients are no part of the state: `recover` clears them.

    Args:
        parts: anything with ``state_dict()`` and ``load_state_dict()``. They can be given to `recover` instead, where
            they are made anew in each run of the function. A DistributedDataParallel stands for its module.
        per_rank: names of parts that differ by rank, such as the position of a rank's own data loader. Each rank keeps
            its own; it never gets another rank's, and they are in no copy and no checkpoint. Where rank or world size
            have changed they stay as they are, with a warning. Default: none, all parts are the same on all ranks.
        copy_every: keep a copy in host memory every so many steps, or, given a timedelta, about every so many seconds,
            and the one before. 0: none. Sharded states need
            them: ranks may be a step apart, and what a lost rank had is elsewhere only as a copy.
        replica_distance: rank r sends its copies to rank r + distance, around, and keeps those of rank r - distance.
            The number of ranks per host makes it outlive a host. 0: nobody sends any.
        folder: of checkpoints, for when no rank has the state any more; ``torch.distributed.checkpoint`` writes them
            beside the training. The same on all hosts: a path, or what fsspec understands (``s3://bucket/run``).
        save_every: write one every so many steps, or seconds, as above. 0: none; `recover` loads those that are there.
        keep: how many finished ones stay (default 3).
        folder_mode: of the folders that are made for checkpoints on a disk of this host, as far as the umask allows;
            files have it without the right to execute. Default 0o700: nobody else reads them; 0o750: a group may.
        transport: ``"group"``: states go over the process group. ``"http"``: over HTTP, from a port of the sender, to
            whoever has the token that is in ``call.store``; for a group that should not, or cannot, send from rank to
            rank.
        seed: random numbers (Python's, NumPy's, torch's) follow from it, the step and the rank, from each commit on; so
            those of a rank that was replaced are as they would have been. None: they are left alone.
    """

    def __init__(
        self,
        *,
        per_rank: Collection[str] = (),
        copy_every: int | datetime.timedelta = 0,
        replica_distance: int = 0,
        folder: str | os.PathLike[str] | None = None,
        save_every: int | datetime.timedelta = 0,
        keep: int = 3,
        folder_mode: int = 0o700,
        transport: str = "group",
        seed: int | None = 0,
        **parts: Stateful,
    ) -> None:
        copies_due, saves_due = Schedule("copy_every", copy_every), Schedule("save_every", save_every)
        if replica_distance < 0:
            raise OptionError(f"replica_distance={replica_distance} must be a number of ranks, or 0")
        if replica_distance and not copies_due:
            raise OptionError(f"replica_distance={replica_distance} needs copy_every: there are no copies to send")
        if not 0o700 <= folder_mode <= 0o777:
            raise OptionError(f"folder_mode={folder_mode:#o} must be a mode such as 0o700, with all your own rights")
        if keep < 1:
            raise OptionError(f"keep={keep} must be at least 1")
        if saves_due and folder is None:
            raise OptionError(f"save_every={save_every!r} needs folder: where do checkpoints go?")
        if transport not in TRANSPORTS:
            raise OptionError(f"transport={transport!r} must be one of {', '.join(map(repr, TRANSPORTS))}")
        self._transport, self._seed = transport, seed
        self._own = RankParts(per_rank)
        self._present = LiveParts(self._own.split(parts))
        self._around = Around()
        self._saving = Saving(
            self._around, copies_due, saves_due, replica_distance, checkpoints(folder, keep, folder_mode)
        )
        #: that of the last `recover`
        self._iteration = -1
        #: of the steps that are made from now on; see `plan`
        self._history = 0
        self._source = ""
        self._is_introduced = False
        self._last = LastCheckpoint()
        self._sendable = SendableCheck()
        keepers.add(self)

    @property
    def step(self) -> int:
        """At which step the state is; -1 where it is torn, and before the first `recover`."""
        return self._present.step

    @property
    def source(self) -> str:
        """Where the last `recover` found this rank's state: "own memory", "own copy", "rank 3", "a copy of rank 3",
        "the checkpoint /path/step_00000500", "nowhere" (step 0)."""
        return self._source

    @property
    def folder(self) -> str | None:
        """Where checkpoints go and come from; None: nowhere."""
        disk = self._saving.disk
        return None if disk is None else str(disk)

    @property
    def nbytes(self) -> int:
        """Host memory for copies, this rank's and those it keeps for another one, and for a checkpoint (bytes)."""
        return self._saving.nbytes

    # --- after a restart ------------------------------------------------------------------------------------------

    def recover(
        self,
        call: CallWrapper | None = None,
        *,
        shard: tuple[int, int] | None = None,
        group: ProcessGroup | None = None,
        **parts: Stateful,
    ) -> int:
        """Agree with all ranks on the newest step that all can go on from, and get this rank's state of it.

        Collective: every rank calls it, at the beginning of each run of the function, once there is a process group. A
        rank that has the state keeps it; others receive theirs from one that has it. Where nobody has, it is loaded
        from the newest checkpoint that is whole; damaged and unfinished ones are passed over, with a warning. Without
        torch.distributed it is this process' own.

        Args:
            call: the running call; None outside a wrapped function.
            shard: ``(index, count)``, where the state of this rank is one of several shards that only the program knows
                of (a pipeline's stages, say). Default: what its DTensors say; without any, it is the same on all ranks.
            group: the ranks; default: all.
            parts: as for the class; made anew, with whatever they begin with.

        Returns:
            The step; 0 where nobody has any state, with the parts as they are.

        Raises:
            StateLost: there was a state, and no step is left of which every shard is somewhere, nor a checkpoint that
                is whole. All ranks leave the job.
            LiveStateError: something arrived damaged, or does not fit the parts.
        """
        around, saving, before, iteration = self._around, self._saving, self._present, self._enter(call)
        if change := before.change():
            if before.began:
                what = "%s were changed after commit(%d): call recover() before what does that"
                log.error(what, change, before.step)
            before.tear()
        self._own.enter(iteration)
        shared = self._own.split(parts)
        present = LiveParts(before.parts | shared) if shared else before
        present.began |= before.began and present.shares(before)
        present.shard, had = Shard(*shard) if shard is not None else present.find_shard(), before.shard
        # what is received goes where another shard is yet
        step = before.step if had == present.shard or not present.shares(before) else NOTHING
        mine = before.record() if step != NOTHING else None
        wire = self._wire(call, group) if dist.is_initialized() else None
        saving.end_sending(wire)
        around.rank = dist.get_rank(group) if wire is not None else 0
        restarts = max(1, iteration - self._iteration)  # the iterations of another call begin at 0 again
        proposal = next_history(self._history, restarts, secrets.randbits(DRAWN_BITS))
        have = Holdings(present.shard, step, saving.held(), present.began, had, before.history, proposal)
        haves, found, is_newer_there, refreshes = self._agree(wire, have, before, present, iteration)
        if mine is not None and found is not None and before.held.point == found.point and before.back_to(refreshes):
            mine = before.record()
        self._introduce()
        saving.begin_groups(group)
        saving.begin_saving(haves, shard)
        loaded = saving.load(found, wire, present, before) if is_newer_there else None
        if loaded is not None:
            step, self._source = loaded
            now, refreshes = Point(self._history, step), 0
        elif found is not None:
            now = found.point
            self._carry_out(found, haves, wire, mine, before, present)
        else:
            now = Point(self._history, 0)
            self._begin(haves)
        saving.drop_after(now, whole_copies(haves, now))
        if saving.disk is not None:
            saving.disk.newest = min(saving.disk.newest, now.step)  # what is newer is of such a future, too
        present.clear()
        self._own.recover(now, (around.rank, len(haves)))
        # the count goes on from the commit: so it does on a rank that is interrupted before it comes to this line
        self._now_at(now, present, refreshes, before.earlier(refreshes) if self._source == "own memory" else ())
        present.recovered()
        present.began |= now.step > 0 or loaded is not None or any(each.began for each in haves)
        around.group = weakref.ref(group) if group is not None else None
        for every in (saving.copy_every, saving.save_every):
            every.begin(now.step)
        saving.is_first = bool(saving.copy_every) and not now.step
        self._last = self._last.again(call, saves=saving.disk is not None and bool(saving.save_every))
        self._say(newest(haves))
        self._sendable.recovered(present, around.rank, len(haves))
        emit("recovered", step=present.step, source=self._source)
        return present.step

    def peek(self, group: ProcessGroup | None = None) -> int | None:
        """At which step `recover` would continue, of replicated states in memory; None: no rank has one.

        Collective, and changes nothing: for frameworks that need the step before there are parts to recover. From here
        until `recover` only values of parameters count, as between `recover` and the first commit.

        Args:
            group: the ranks; default: all.
        """
        present, saving = self._present, self._saving
        step = NOTHING if present.is_changed() else present.step
        if step != NOTHING:
            present.recovered()  # frameworks wrap the model before there is an optimizer to recover
        have = Holdings(present.shard, step, saving.held(), present.began, history=present.history)
        rows = gather(Wire(group) if dist.is_initialized() else None, have.row())
        found = plan([Holdings.of(row) for row in rows])
        return found.step if found is not None else None

    def forget(self) -> None:
        """As if it had never been at a step: the program has a state from elsewhere, such as its own checkpoint.

        On all ranks, before `recover`, which else raises StateLost where no rank has a whole state any more.
        """
        self._present = LiveParts(self._present.parts)
        self._own.forget()
        self._saving.drop_after(NOWHERE)

    def refresh(self) -> None:
        """Keep what has changed beside the parameters since the last commit: the step is the same, and what was due
        after it is done. Nothing where parameters have changed, too."""
        with self._around.atomic():
            if self.step != NOTHING and not self._present.is_changed():
                self._own.at(self._present.held.point)
                self._present.refresh()

    def reseed(self, step: int) -> None:
        """Random numbers as after ``commit(step)``; for a program that has drawn some to get back to that step."""
        if self._seed is not None:
            randoms.seed(self._seed, step, self._around.rank)

    def _enter(self, call: CallWrapper | None) -> int:
        """The iteration in which `recover` is called."""
        around = self._around
        if call is None:
            around.call = None
            return 0
        if around.call is None or around.call() is not call:  # iterations begin at 0 again
            self._iteration = NOTHING
            self._own.begin_call()
        around.call = weakref.ref(call)
        if self._saving.disk is not None:
            Controls(call).free_at_end(self._saving.disk)
        return call.iteration

    def _introduce(self) -> None:
        """Say once, on one rank, what is done that nobody may expect."""
        if self._is_introduced or self._around.rank:
            return
        self._is_introduced = True
        if self._seed is not None:
            log.info(
                "LiveState(seed=%d) seeds the global random generators of Python, NumPy and torch, now and at each "
                "commit, from the step and the rank; seed=None leaves them alone",
                self._seed,
            )
        disk, save_every = self._saving.disk, self._saving.save_every
        if disk is not None and save_every:
            log.info("checkpoints are written into %s, %s; the last %d stay", disk, save_every, disk.keep)
        elif disk is not None:
            log.info("checkpoints are read from %s, and none are written: save_every is not given", disk)

    def _wire(self, call: CallWrapper | None, group: ProcessGroup | None) -> Wire:
        if self._transport == "group":
            return Wire(group)
        if call is None:
            raise OptionError("transport='http' needs recover(call): addresses and tokens are in call.store")
        from inprocess.live.http import HttpWire  # noqa: PLC0415  (http.server, which few need)

        return HttpWire(group, call.store)

    def _agree(
        self, wire: Wire | None, have: Holdings, before: LiveParts, present: LiveParts, iteration: int
    ) -> tuple[list[Holdings], Plan | None, bool, int]:
        """What each rank has, where all get theirs, whether there may be a newer checkpoint, and after how many
        refreshes: some ranks may have done what was due after that step, and others not."""
        disk = self._saving.disk
        saved = disk.newest if disk is not None else NOTHING
        # where nobody here was in the iteration before, there may be one that nobody here knows of
        was_there, self._iteration = self._iteration >= iteration - 1, iteration
        names = sorted(present.small)
        more = [saved, int(was_there), before.refreshes, len(names), *before.digests()]
        rows = gather(wire, [*have.row(), *more])
        haves = [Holdings.of(row) for row in rows]
        self._history = max(each.proposal for each in haves)
        told = [row[-len(more) :] for row in rows]
        if all(row[3] == len(names) for row in told):  # else whoever receives parts of other names says so
            self._compare(wire, differing([each.in_place for each in haves], [row[4:] for row in told]), names, before)
        found = plan(haves)
        newest_saved, anybody = (max(row[at] for row in told) for at in (0, 1))
        # copies are made right after commits
        sources = found.sources if found is not None else ()
        refreshes = min((told[each.rank][2] if each.where is Where.LIVE else 0 for each in sources), default=0)
        return haves, found, found is None or newest_saved > found.step or not anybody, refreshes

    def _compare(self, wire: Wire | None, point: Point | None, names: Sequence[str], before: LiveParts) -> None:
        """Say which parts are not the same on all ranks at that step: one of them may get another one's."""
        if point is None:
            return
        there = gather(wire, [before.digest(name, point) for name in names])
        for name, column in zip(names, zip(*there, strict=True), strict=True):
            if len({digest for digest in column if digest}) > 1 and not self._around.rank:
                log.error(
                    "the part %r is not the same on all ranks at step %d, and a rank that needs a state gets that of "
                    "another one. Where each rank has its own, say LiveState(per_rank=(%r,))",
                    *(name, point.step, name),
                )

    def _carry_out(
        self,
        found: Plan,
        haves: Sequence[Holdings],
        wire: Wire | None,
        mine: Record | None,
        before: LiveParts,
        present: LiveParts,
    ) -> None:
        rank = self._around.rank
        source = found.sources[rank]
        own = source == Source(rank, Where.LIVE)
        if not own and present.shares(before):
            before.tear()  # until all of it is there
        for sender, receiver in found.transfers():
            if wire is not None and sender == rank:
                self._send(wire, mine, haves[receiver].shard, found, receiver)
            elif wire is not None and receiver == rank:
                self._receive(wire, present, source, found.step)
        if own and present is before:
            self._source = "own memory"
            present.give_back()
        elif own and mine is not None:
            self._source = "own memory"
            with self._around.atomic():  # cut off in here, the parts that stay would count as changed
                present.fill(mine)
                before.written_back()
        elif source.rank == rank:
            self._source = "own copy"
            present.fill(self._find(present.shard, found).record)

    def _say(self, newest: int) -> None:
        if self._source == "nowhere":
            if newest == NOTHING:
                log.info("starting at step 0: no rank has a state yet")
            else:
                lost = "starting at step 0: the state of step %d is lost, no step is left with every shard somewhere"
                log.error(lost, newest)
            return
        again = f"; {newest - self.step} steps are done again" if newest > self.step else ""
        level = logging.INFO if self._source == "own memory" else logging.WARNING
        what = (self._around.rank, self.step, self._source, again)
        log.log(level, "rank %d continues at step %d, with the state from %s%s", *what)

    def _begin(self, haves: Sequence[Holdings]) -> None:
        if any(have.began for have in haves):
            lost = newest(haves)
            what = "the states of all ranks are torn" if lost == NOTHING else f"the state of step {lost} is lost"
            raise StateLost(
                f"{what}: no step is left of which every shard is somewhere. copy_every=... keeps copies in memory, "
                "replica_distance=... a second one on another rank. And call recover() before anything that writes to "
                "parameters, as DistributedDataParallel(model) does"
            )
        self._source = "nowhere"

    def _send(self, wire: Wire, mine: Record | None, shard: Shard, found: Plan, receiver: int) -> None:
        if mine is not None and found.sources[receiver].where is Where.LIVE:
            wire.send(mine, mine.header(), receiver)
        else:
            buffer = self._find(shard, found)
            wire.send(buffer.record, buffer.header, receiver)

    def _receive(self, wire: Wire, present: LiveParts, source: Source, step: int) -> None:
        self._source = f"rank {source.rank}" if source.where is Where.LIVE else f"a copy of rank {source.rank}"
        room = present.room_for(read(wire.receive_header(source.rank)))
        wire.receive(room, source.rank, f"the state of step {step} from {self._source}")
        present.load(room)

    def _find(self, shard: Shard, plan: Plan) -> Buffer:
        copy = Copy(shard, plan.step, plan.history)
        found = self._saving.copies.find(copy) or self._saving.kept.find(copy)
        if found is None:
            raise InternalError(f"there is no {copy}, which this rank said it had")
        return found

    def _now_at(
        self, point: Point, present: LiveParts, refreshes: int = 0, earlier: Sequence[dict[str, Any]] = ()
    ) -> None:
        self.reseed(point.step)
        present.at(point, refreshes, earlier)
        self._present = present

    # --- at each step ---------------------------------------------------------------------------------------------

    def commit(self, step: int) -> contextlib.AbstractContextManager[None]:
        """``with live.commit(step + 1): optim.step()``: when it ends the state is that of this step.

        No restart begins inside. A fault inside leaves a torn state, which `recover` replaces.

        Args:
            step: greater than the one before, or the same: then what was written since is right as it is, such as
                weights that were exchanged for an evaluation and put back here.
        """
        if self.step == NOTHING:
            raise LiveStateError(f"commit({step}): recover() has not been called, or an earlier commit failed")
        if step < self.step:
            raise OptionError(f"commit({step}): the state is at step {self.step} already")
        return _Commit(self, Point(self._history if step > self.step else self._present.history, step))

    def wait(self, timeout: float = 600.0) -> None:
        """Until the last copy is sent, and the last checkpoint written. Before the process group is destroyed, where
        ``replica_distance`` or ``save_every`` is set.

        Args:
            timeout: seconds, for each of the two. What has not ended by then is left to itself, with a warning.
        """
        self._saving.wait(timeout)

    def _keep(self) -> None:
        """A commit has ended."""
        saving, call = self._saving, self._around.call() if self._around.call is not None else None
        self._sendable.committed(self._present, self._around.rank)
        saving.keep(self._present)
        if call is not None and self._last in Controls(call).last.wanted:
            self._last.committed(call, functools.partial(saving.save_last, self._present), self._around.shown)


class _Commit:
    """See `LiveState.commit`."""

    __slots__ = ("_atomic", "_live", "_point")

    def __init__(self, live: LiveState, point: Point) -> None:
        self._live, self._point = live, point
        self._atomic = live._around.atomic()

    def __enter__(self) -> None:
        self._live._saving.before_commit(self._live._present)
        self._atomic.__enter__()
        self._live._present.begin_commit()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._live._own.at(self._point)
                self._live._now_at(self._point, self._live._present)
        finally:
            self._atomic.__exit__(kind, error, trace)
        if kind is None:
            self._live._keep()
