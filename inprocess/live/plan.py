"""From which step on all ranks go on, and who gets the state from whom. Pure; every rank comes to the same plan.

A state is **replicated** (one shard, the same on all ranks) or **sharded** (each rank has one of several). A step can
be gone on with where every shard is there at exactly that step: in somebody's live state, or in a copy in host memory,
its own or one that it keeps for another rank.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: a rank keeps at most this many copies: two of its own, two for another rank
COPIES = 4
#: no step: the state is torn, or there is none
NOTHING = -1
#: numbers in `Have.row`
WIDTH = 6 + 3 * COPIES


class Where(enum.Enum):
    """Where a rank has a state."""

    LIVE = "live"
    COPY = "copy"


@dataclass(frozen=True)
class Shard:
    """One of several parts of a state, each of which is on one rank or on a few."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Copy:
    """A state in host memory."""

    shard: Shard
    step: int


@dataclass(frozen=True)
class Holdings:
    """What one rank has.

    Args:
        shard: what it needs.
        step: of the one that it has in place; `NOTHING` where it is torn.
        copies: at most `COPIES`, in host memory.
        began: what is in place comes of a training, so it is no beginning for another one.
        live: which shard it has in place, where that is another one: ranks may have been numbered anew.
    """

    shard: Shard = Shard()
    step: int = NOTHING
    copies: tuple[Copy, ...] = ()
    began: bool = False
    live: Shard | None = None

    def row(self) -> list[int]:
        """As numbers, of which every rank has the same many."""
        copies = [*self.copies, *[Copy(Shard(), NOTHING)] * (COPIES - len(self.copies))]
        return [
            *(self.shard.index, self.shard.count, self.step, int(self.began)),
            *(self.in_place.index, self.in_place.count),
            *(number for copy in copies for number in (copy.shard.index, copy.shard.count, copy.step)),
        ]

    @classmethod
    def of(cls, row: Sequence[int]) -> Holdings:
        copies = [Copy(Shard(row[at], row[at + 1]), row[at + 2]) for at in range(6, WIDTH, 3)]
        there = tuple(copy for copy in copies if copy.step != NOTHING)
        shard, live = Shard(row[0], row[1]), Shard(row[4], row[5])
        return cls(shard, row[2], there, bool(row[3]), live if live != shard else None)

    @property
    def in_place(self) -> Shard:
        return self.shard if self.live is None else self.live

    def holdings(self) -> Iterator[tuple[Where, Copy]]:
        if self.step != NOTHING:
            yield Where.LIVE, Copy(self.in_place, self.step)
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

    def transfers(self) -> list[tuple[int, int]]:
        """Pairs of sender and receiver, in the order in which each rank does its own: so no two wait for each other."""
        return [(source.rank, rank) for rank, source in enumerate(self.sources) if source.rank != rank]


def plan(haves: Sequence[Holdings]) -> Plan | None:
    """The newest step that can be gone on with; None where there is none.

    Args:
        haves: by rank.
    """
    steps = {copy.step for have in haves for _, copy in have.holdings()}
    for step in sorted(steps, reverse=True):
        holders = _holders(haves, step)
        if all(holders.get(have.shard) for have in haves):
            return Plan(step, tuple(_sources(haves, holders)))
    return None


def newest(haves: Sequence[Holdings]) -> int:
    """The newest step that anybody has anything of."""
    return max((copy.step for have in haves for _, copy in have.holdings()), default=NOTHING)


def whole_copies(haves: Sequence[Holdings], step: int) -> int:
    """The newest step, not after this one, of which every shard is among the copies; `NOTHING` where there is none."""
    there = {copy for have in haves for copy in have.copies}
    steps = {copy.step for copy in there if copy.step <= step}
    whole = (each for each in steps if all(Copy(have.shard, each) in there for have in haves))
    return max(whole, default=NOTHING)


def differing(shards: Sequence[Shard], rows: Sequence[Sequence[int]]) -> int | None:
    """The newest step at which ranks with the same shard have other small parts; None: there is none.

    Args:
        shards: by rank.
        rows: by rank: a step and a digest, and again; a step of `NOTHING` counts for nothing.
    """
    found: dict[tuple[int, Shard], set[int]] = {}
    for shard, row in zip(shards, rows, strict=True):
        for step, digest in zip(row[::2], row[1::2], strict=True):
            if step != NOTHING:
                found.setdefault((step, shard), set()).add(digest)
    return max((step for (step, _), digests in found.items() if len(digests) > 1), default=None)


def _holders(haves: Sequence[Holdings], step: int) -> dict[Shard, list[Source]]:
    """Who has each shard at this step; each rank once, the live state before a copy."""
    found: dict[Shard, dict[int, Source]] = {}
    for rank, have in enumerate(haves):
        for where, copy in have.holdings():
            if copy.step == step:
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
