"""From which step on all ranks go on, and who gets the state from whom. Pure; every rank comes to the same plan.

A state is **replicated** (one shard, the same on all ranks) or **sharded** (each rank has one of several). A step can
be gone on with where every shard is there at exactly that step: in somebody's live state, or in a copy in host memory,
its own or one that it keeps for another rank.

A step that is done again is another one: by other ranks, with other gradients. A rank that was in reserve meanwhile
still has the one from before. So a state has a **history** beside its step, the number of the `recover` after which its
step was made. States are the same only where both are equal. `recover` alone makes no new history: what ranks had
before it, and have made nothing of since, stays the same on all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: a rank keeps at most this many copies: two of its own, two for another rank
COPIES = 4
#: no step: the state is torn, or there is none
NOTHING = -1
#: numbers in `Holdings.row`
WIDTH = 8 + 4 * COPIES
#: of a history's number, those that are drawn
DRAWN_BITS = 31


class Where(enum.Enum):
    """Where a rank has a state."""

    LIVE = "live"
    COPY = "copy"


@dataclass(frozen=True)
class Shard:
    """One of several parts of a state, each of which is on one rank or on a few."""

    index: int = 0
    count: int = 1


class Point(NamedTuple):
    """A step of one history. The greater one is newer: the training has gone on in the newer history."""

    history: int
    step: int

    def is_before(self, other: Point) -> bool:
        """Whether the other one may have come of this one, or is it."""
        return self.step <= other.step and self.history <= other.history


#: no step of any history
NOWHERE = Point(NOTHING, NOTHING)


@dataclass(frozen=True)
class Copy:
    """A state in host memory."""

    shard: Shard
    step: int
    history: int = 0

    @property
    def point(self) -> Point:
        return Point(self.history, self.step)

    def row(self) -> list[int]:
        """As numbers."""
        return [self.shard.index, self.shard.count, self.step, self.history]

    @classmethod
    def of(cls, row: Sequence[int]) -> Copy:
        index, count, step, history = row
        return cls(Shard(index, count), step, history)


#: in place of one that is not there
NO_COPY = Copy(Shard(), NOTHING, NOTHING)


@dataclass(frozen=True)
class Holdings:
    """What one rank has.

    Args:
        shard: what it needs.
        step: of the one that it has in place; `NOTHING` where it is torn.
        copies: at most `COPIES`, in host memory.
        began: what is in place comes of a training, so it is no beginning for another one.
        live: which shard it has in place, where that is another one: ranks may have been numbered anew.
        history: of the one that it has in place.
        proposal: the number of the history that begins now, as far as this rank knows; see `next_history`.
    """

    shard: Shard = Shard()
    step: int = NOTHING
    copies: tuple[Copy, ...] = ()
    began: bool = False
    live: Shard | None = None
    history: int = 0
    proposal: int = 0

    def row(self) -> list[int]:
        """As numbers, of which every rank has the same many."""
        copies = [*self.copies, *[NO_COPY] * (COPIES - len(self.copies))]
        return [
            *(self.shard.index, self.shard.count, int(self.began), self.proposal),
            *Copy(self.in_place, self.step, self.history).row(),
            *(number for copy in copies for number in copy.row()),
        ]

    @classmethod
    def of(cls, row: Sequence[int]) -> Holdings:
        live, *copies = [Copy.of(row[at : at + 4]) for at in range(4, WIDTH, 4)]
        there = tuple(copy for copy in copies if copy.step != NOTHING)
        shard, other = Shard(row[0], row[1]), live.shard
        return cls(shard, live.step, there, bool(row[2]), other if other != shard else None, live.history, row[3])

    @property
    def in_place(self) -> Shard:
        return self.shard if self.live is None else self.live

    def holdings(self) -> Iterator[tuple[Where, Copy]]:
        if self.step != NOTHING:
            yield Where.LIVE, Copy(self.in_place, self.step, self.history)
        yield from ((Where.COPY, copy) for copy in self.copies)


@dataclass(frozen=True)
class Source:
    """Where a rank gets its state."""

    rank: int
    where: Where


@dataclass(frozen=True)
class Plan:
    """What all ranks do; ``sources`` by rank."""

    step: int
    sources: tuple[Source, ...]
    history: int = 0

    @property
    def point(self) -> Point:
        return Point(self.history, self.step)

    def transfers(self) -> list[tuple[int, int]]:
        """Pairs of sender and receiver, in the order in which each rank does its own: so no two wait for each other."""
        return [(source.rank, rank) for rank, source in enumerate(self.sources) if source.rank != rank]


def plan(haves: Sequence[Holdings]) -> Plan | None:
    """The newest step of the newest history that can be gone on with; None where there is none.

    Args:
        haves: by rank.
    """
    points = {copy.point for have in haves for _, copy in have.holdings()}
    for point in sorted(points, reverse=True):
        holders = _holders(haves, point)
        if all(holders.get(have.shard) for have in haves):
            return Plan(point.step, tuple(_sources(haves, holders)), point.history)
    return None


def next_history(last: int, restarts: int, drawn: int) -> int:
    """What a rank proposes as the number of the history that begins now; the greatest proposal is taken.

    So it is newer than all that these ranks know. Some bits are drawn, so that ranks that were in reserve in turn, and
    know nothing of each other, do not come to the same number.

    Args:
        last: the newest that this rank knows.
        restarts: since then; those in which it was in reserve count.
        drawn: `DRAWN_BITS` at random.
    """
    return (((last >> DRAWN_BITS) + restarts) << DRAWN_BITS) | drawn


def newest(haves: Sequence[Holdings]) -> int:
    """The newest step that anybody has anything of."""
    return max((copy.step for have in haves for _, copy in have.holdings()), default=NOTHING)


def whole_copies(haves: Sequence[Holdings], point: Point) -> Point:
    """The newest, not after this one, of which every shard is among the copies; `NOWHERE` where there is none."""
    there = {copy for have in haves for copy in have.copies}
    points = {copy.point for copy in there if copy.point.is_before(point)}
    whole = (each for each in points if all(Copy(have.shard, each.step, each.history) in there for have in haves))
    return max(whole, default=NOWHERE)


def differing(shards: Sequence[Shard], rows: Sequence[Sequence[int]]) -> Point | None:
    """The newest at which ranks with the same shard have other small parts; None: there is none.

    Args:
        shards: by rank.
        rows: by rank: history, step and digest, and again; a step of `NOTHING` counts for nothing.
    """
    found: dict[tuple[Point, Shard], set[int]] = {}
    for shard, row in zip(shards, rows, strict=True):
        for history, step, digest in zip(row[::3], row[1::3], row[2::3], strict=True):
            if step != NOTHING:
                found.setdefault((Point(history, step), shard), set()).add(digest)
    return max((point for (point, _), digests in found.items() if len(digests) > 1), default=None)


def _holders(haves: Sequence[Holdings], point: Point) -> dict[Shard, list[Source]]:
    """Who has each shard at this step of this history; each rank once, the live state before a copy."""
    found: dict[Shard, dict[int, Source]] = {}
    for rank, have in enumerate(haves):
        for where, copy in have.holdings():
            if copy.point == point:
                found.setdefault(copy.shard, {}).setdefault(rank, Source(rank, where))
    return {shard: list(sources.values()) for shard, sources in found.items()}


def _sources(haves: Sequence[Holdings], holders: dict[Shard, list[Source]]) -> Iterator[Source]:
    """Its own where a rank has it, else of those that have it whoever sends least."""
    sends = [0] * len(haves)
    for rank, have in enumerate(haves):
        here = [source for source in holders[have.shard] if source.rank == rank]
        chosen = here[0] if here else min(holders[have.shard], key=lambda source: (sends[source.rank], source.rank))
        sends[chosen.rank] += chosen.rank != rank
        yield chosen
