"""A LiveState in simulated jobs: real plans, a real list of copies; a tensor is the history that it came from.

Every step that a group of ranks does together makes a new history, also where it was done before. So a rank that went
on with what another history left behind is found, as is a step that was lost though somebody had it.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inprocess.live.copies import Buffer, Copies
from inprocess.live.plan import (
    NO_COPY,
    NOTHING,
    Copy,
    Holdings,
    Point,
    Shard,
    Source,
    Where,
    newest,
    next_history,
    plan,
    whole_copies,
)
from tests.sim.engine import Broken, Work

if TYPE_CHECKING:
    from tests.sim.training import Training

#: steps of a function, from one copy to the next, and how often a commit raises
STEPS, COPY_EVERY, RAISES = 6, 2, 0.03
#: how often whoever waits for others looks (seconds)
LOOK = 0.01
ONE = Shard()


class RaisedInside(Exception):
    """The function raises in the middle of a commit."""


class Left(Exception):
    """The function was interrupted."""


@dataclass
class Group:
    """What the active ranks of one iteration exchange; ``size`` of them."""

    size: int
    #: by rank, when it has come to recover(); and of which process
    haves: dict[int, Holdings] = field(default_factory=dict)
    processes: dict[int, str] = field(default_factory=dict)
    #: (sender, receiver) -> history; and who has taken it
    sent: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    taken: set[tuple[int, int]] = field(default_factory=set)
    #: step -> ranks whose gradients are in, and the history that comes of it
    arrived: dict[int, set[int]] = field(default_factory=dict)
    history: dict[int, tuple[int, ...]] = field(default_factory=dict)
    #: rank -> where it went on
    began: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    #: (receiver of a copy, step) -> shard and history
    copies: dict[tuple[int, int], tuple[Copy, tuple[int, ...]]] = field(default_factory=dict)


@dataclass
class Record:
    """What all processes of a job have done so far, for the invariants."""

    groups: dict[Any, Group] = field(default_factory=dict)
    histories: int = 0
    #: the last group in which a step was begun
    last: Group | None = None
    #: numbers that were drawn; and how often ranks met that have the same step of two histories
    drawn: int = 0
    met: int = 0


class Live:
    """That of one process. Replicated states are in place for good, sharded ones are made anew in each iteration."""

    def __init__(self, training: Training, record: Record, sharded: bool) -> None:
        self._training, self._record, self._sharded = training, record, sharded
        self.shard, self.step, self.history = ONE, NOTHING, (0,)
        #: the numbers that the library has for histories: of what is in place, and of the steps that are made now
        self.number, self._next, self._iteration = 0, 0, -1
        self.copies, self.kept = Copies(), Copies()
        #: buffer -> the history of what is in it
        self._within: dict[Buffer, tuple[int, ...]] = {}
        self._group = Group(0)

    @property
    def _rank(self) -> int:
        rank = self._training.placed.active_rank
        assert rank is not None
        return rank

    def train(self, seconds: float) -> Generator[Any, Any, None]:
        """The function. Raises Left, RaisedInside."""
        size = self._training.placed.active_world_size
        self._group = self._record.groups.setdefault(self._training.moment, Group(size))
        yield from self._recover(self._needs(size))
        while self.step < STEPS:
            yield from self._pass(seconds * self._training.engine.rng.random() / STEPS)
            history = yield from self._reduce(self.step + 1)
            if apart := self._training.world.scenario.apart:
                yield from self._pass(apart * self._training.engine.rng.random())
            yield from self._commit(history)
            if self.step % COPY_EVERY == 0:
                yield from self._copy()

    def _needs(self, size: int) -> Shard:
        """Hybrid: of two shards, every other rank has the same one."""
        if not self._sharded:
            return ONE
        count = 2 if self._training.world.scenario.live == "hybrid" and size > 1 else size
        return Shard(self._rank % count, count)

    def hang(self) -> Generator[Any, Any, None]:
        yield from self._pass(math.inf)

    # --- recover --------------------------------------------------------------------------------------------------

    def _recover(self, shard: Shard) -> Generator[Any, Any, None]:
        group, rank = self._group, self._rank
        copies = (*self.copies.held(), *self.kept.held())
        group.processes[rank] = self._training.name
        iteration, self._record.drawn = self._training.membership.iteration, self._record.drawn + 1
        proposal = next_history(self._next, max(1, iteration - self._iteration), self._record.drawn)
        group.haves[rank] = Holdings(shard, self.step, copies, self.step != NOTHING, self.shard, self.number, proposal)
        yield from self._until(lambda: len(group.haves) == group.size)
        haves = [group.haves[number] for number in range(group.size)]
        self._iteration, self._next = iteration, max(have.proposal for have in haves)
        steps = {(have.step, have.history) for have in haves if have.step != NOTHING}
        self._record.met += len({step for step, _ in steps}) < len(steps)
        found = plan(haves)
        now, history = Point(self._next, 0), (0,)
        if found is not None:
            now, source = found.point, found.sources[rank]
            mine = self.history, self.shard
            if not self._sharded and source != Source(rank, Where.LIVE):
                self.step = NOTHING  # until all of it is there
            for pair in found.transfers():
                if pair[0] == rank:
                    asked = haves[pair[1]].shard
                    live = found.sources[pair[1]].where is Where.LIVE and asked == mine[1]
                    group.sent[pair] = mine[0] if live else self._within[self._find(asked, now)]
                    yield from self._until(lambda pair=pair: pair in group.taken)
                elif pair[1] == rank:
                    yield from self._until(lambda pair=pair: pair in group.sent)
                    yield from self._pass(0.05 * self._training.engine.rng.random())
                    history = group.sent[pair]
                    group.taken.add(pair)
            if source == Source(rank, Where.LIVE):
                history = self.history
            elif source.rank == rank:
                history = self._within[self._find(shard, now)]
        self._check(haves, now.step, history)
        for copies_of in (self.copies, self.kept):
            copies_of.drop_after(now, whole_copies(haves, now))
        self.shard, self.step, self.history, self.number = shard, now.step, history, now.history

    def _find(self, shard: Shard, point: Point) -> Buffer:
        copy = Copy(shard, point.step, point.history)
        found = self.copies.find(copy) or self.kept.find(copy)
        if found is None:
            raise Broken(f"{self._training.name} has no {copy}, which it said it had")
        return found

    def _check(self, haves: list[Holdings], step: int, history: tuple[int, ...]) -> None:
        """All go on with one history, and with the newest step that there is."""
        group, name = self._group, self._training.name
        group.began[self._rank] = step, history
        if len(set(group.began.values())) > 1:
            raise Broken(f"I8: {name} goes on at step {step} of history {history}: {group.began}")
        whole = [have.step for have in haves if have.step != NOTHING]
        if not self._sharded and whole and step < max(whole):
            raise Broken(f"I8: {name} goes on at step {step}, and a rank has step {max(whole)}")
        last = self._record.last
        if last is not None and last.processes == group.processes and step < max(last.history) - 1 - 2 * COPY_EVERY:
            raise Broken(f"I8: {name} goes on at step {step}, and all that did step {max(last.history)} are there")
        if step > newest(haves) and step:
            raise Broken(f"I8: {name} goes on at step {step}, and nobody has more than {newest(haves)}")

    # --- steps ----------------------------------------------------------------------------------------------------

    def _reduce(self, step: int) -> Generator[Any, Any, tuple[int, ...]]:
        """All gradients come together: nobody can be more than a step ahead."""
        group = self._group
        group.arrived.setdefault(step, set()).add(self._rank)
        yield from self._until(lambda: len(group.arrived[step]) == group.size)
        if step not in group.history:
            self._record.histories += 1
            group.history[step] = (*self.history, self._record.histories)
            self._record.last = group
        return group.history[step]

    def _commit(self, history: tuple[int, ...]) -> Generator[Any, Any, None]:
        raises = self._training.engine.rng.random() < RAISES

        def tear() -> None:
            self._torn, self.step = self.step, NOTHING

        def done() -> None:
            if not raises:
                self.step, self.history, self.number = self._torn + 1, history, self._next

        if (yield from self._training._commit(tear, done)):
            raise Left
        if raises:
            raise RaisedInside

    def _copy(self) -> Generator[Any, Any, None]:
        """A restart may begin in the middle: the buffer holds nothing then."""
        mine = Copy(self.shard, self.step, self.number)
        yield from self._fill(self.copies.next(), mine, self.history)
        group, to = self._group, (self._rank + 1) % self._group.size
        if self._sharded and group.size > 1:
            group.copies[to, self.step] = mine, self.history
            here = self._rank, self.step
            yield from self._until(lambda: here in group.copies)
            yield from self._fill(self.kept.next(), *group.copies[here])

    def _fill(self, buffer: Buffer, copy: Copy, history: tuple[int, ...]) -> Generator[Any, Any, None]:
        buffer.held = NO_COPY
        yield from self._pass(0.02 * self._training.engine.rng.random())
        self._within[buffer] = history
        buffer.held = copy

    # --- time -----------------------------------------------------------------------------------------------------

    def _pass(self, seconds: float) -> Generator[Any, Any, None]:
        if (yield Work(seconds, interruptible=True)):
            raise Left

    def _until(self, check: Any) -> Generator[Any, Any, None]:
        while not check():
            yield from self._pass(LOOK)
