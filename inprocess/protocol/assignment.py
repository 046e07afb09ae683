"""What all rank assignments share, and the one that is the default: survivors keep their order and close the gaps."""

from __future__ import annotations

import abc
import bisect
import dataclasses
from collections.abc import Callable, Collection
from typing import Any, overload

from inprocess.attribution import name_of
from inprocess.exception import RankDiscarded
from inprocess.rank_filter import keep_active
from inprocess.state import Mode, State

__all__ = [
    "BothForms",
    "RankAssignment",
    "RankAssignmentCtx",
    "RankFilter",
    "ShiftRanks",
    "activate_all",
    "discard_terminated",
    "keep_limits",
    "renumber",
]


@dataclasses.dataclass
class RankAssignmentCtx:
    """Input and output of a rank assignment; an assignment changes it and returns it."""

    #: this rank's state; on entry in the numbering of the last iteration that started
    state: State
    #: the iteration's own store; waits on it end with an error when the iteration is interrupted
    store: Any
    #: ranks, in the numbering of ``state.rank``, that are out of the job; empty once ranks are consecutive again
    terminated_ranks: set[int]
    #: ranks in the same numbering of members that joined since an iteration started; then everybody is back in its
    #: place: a rank is the one its member was started with, or the free one that it took
    joined: set[int] = dataclasses.field(default_factory=set)
    #: limits set so far: each maps an active world size to one that is not larger; applied again after renumbering
    limits: list[Callable[[int], int]] = dataclasses.field(default_factory=list, repr=False)
    #: the name of the last gather, under which its ranks may keep more; no other one in the store has it
    gathered: str = dataclasses.field(default="", repr=False)
    #: why this rank is among the terminated ones, where an assignment knows
    reason: str = dataclasses.field(default="", repr=False)


class RankAssignment(abc.ABC):
    """Gives the surviving ranks their ranks and says which of them are active.

    Or as in nvidia-resiliency-ext 0.2, in a subclass: ``(state, terminated_ranks) -> (state, terminated_ranks)``.
    """

    #: what to use in place of a `Compose` with others, where it has to stand alone
    instead_of_others = ""

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Change `ctx` and return it.

        Raises:
            RankDiscarded: this rank has no place any more.
        """


class BothForms(RankAssignment):
    """A rank assignment of the library, which can be called in the form of either generation.

    As the parameters are not named, what tells forms apart by them takes it for one of version 0.4.
    """

    #: whether the number of ranks alone decides how many are active
    counts_only = False

    @overload
    def __call__(self, ctx: RankAssignmentCtx, /) -> RankAssignmentCtx: ...

    @overload
    def __call__(self, state: State, terminated_ranks: Collection[int], /) -> tuple[State, set[int]]: ...

    def __call__(self, *args: Any) -> Any:
        if len(args) == 1:
            return self._assign(args[0])
        state, terminated_ranks = args
        ctx = self._assign(RankAssignmentCtx(state, state.store, set(terminated_ranks)))
        return ctx.state, ctx.terminated_ranks

    @abc.abstractmethod
    def _assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Change `ctx` and return it."""


class RankFilter(BothForms):
    """A rank assignment that only lowers the active world size; it may stand before or after one that renumbers.

    A subclass defines `limit`, or `__call__` as any rank assignment; that one has to stand after what renumbers.
    """

    counts_only = True

    def limit(self, active_world_size: int) -> int:
        """The largest acceptable size that is not larger than `active_world_size`."""
        raise NotImplementedError(f"{type(self).__name__} must define limit(active_world_size), or __call__(ctx)")

    def _assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        ctx.limits.append(self.limit)
        if ctx.state.mode is Mode.INITIALIZED:
            return activate_all(ctx)
        keep_active(ctx.state, self.limit(ctx.state.active_world_size))
        return ctx


def activate_all(ctx: RankAssignmentCtx) -> RankAssignmentCtx:
    """Every rank is active under its own rank, as far as the limits set so far allow."""
    ctx.state.activate_all_ranks()
    return keep_limits(ctx)


def keep_limits(ctx: RankAssignmentCtx) -> RankAssignmentCtx:
    """No more ranks are active than the limits set so far allow."""
    for limit in ctx.limits:
        keep_active(ctx.state, limit(ctx.state.active_world_size))
    return ctx


def discard_terminated(ctx: RankAssignmentCtx) -> RankAssignmentCtx:
    """RankDiscarded where this rank is among the terminated ones."""
    state = ctx.state
    if state.rank in ctx.terminated_ranks:
        which = name_of(state.rank, state.initial_rank)
        raise RankDiscarded(f"{which} {ctx.reason or 'is among the terminated ranks'}")
    return ctx


def renumber(ctx: RankAssignmentCtx, new_rank: Callable[[int, list[int]], int]) -> RankAssignmentCtx:
    """Close the gaps: the rank becomes ``new_rank(rank, terminated ranks in order)``, and every rank active."""
    state = discard_terminated(ctx).state
    terminated = sorted(rank for rank in ctx.terminated_ranks if 0 <= rank < state.world_size)
    state.rank = new_rank(state.rank, terminated)
    state.world_size -= len(terminated)
    ctx.terminated_ranks, ctx.joined = set(), set()
    return activate_all(ctx)


class ShiftRanks(BothForms):
    """The survivors keep their order and close the gaps to the left::

        before   0 X 2 3 X X 6 7
        after    0   1 2     3 4

    Every rank is active, as far as the filters composed with it allow.
    """

    counts_only = True

    def _assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        return renumber(ctx, lambda rank, terminated: rank - bisect.bisect_left(terminated, rank))
