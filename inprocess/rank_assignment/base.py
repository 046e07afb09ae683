"""What all rank assignments share: the context they change, their base classes, and how a rank is given its place."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

from ..exception import RankDiscarded
from ..rank_filter import keep_active
from ..state import Mode, State

__all__ = ["RankAssignment", "RankAssignmentCtx", "RankFilter"]


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
    #: gathers done so far, which gives each its own store key
    gathers: int = dataclasses.field(default=0, repr=False)


class RankAssignment(abc.ABC):
    """Gives the surviving ranks their ranks and says which of them are active."""

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Change `ctx` and return it.

        Raises:
            RankDiscarded: this rank has no place any more.
        """


class RankFilter(RankAssignment):
    """A rank assignment that only lowers the active world size; it may stand before or after one that renumbers."""

    @abc.abstractmethod
    def limit(self, active_world_size: int) -> int:
        """The largest acceptable size that is not larger than `active_world_size`."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        ctx.limits.append(self.limit)
        if ctx.state.mode is Mode.INITIALIZED:
            return activate_all(ctx)
        keep_active(ctx.state, self.limit(ctx.state.active_world_size))
        return ctx


def activate_all(ctx: RankAssignmentCtx) -> RankAssignmentCtx:
    """Every rank is active under its own rank, as far as the limits set so far allow."""
    state = ctx.state
    state.active_rank, state.active_world_size, state.mode = state.rank, state.world_size, Mode.ACTIVE
    for limit in ctx.limits:
        keep_active(state, limit(state.active_world_size))
    return ctx


def renumber(ctx: RankAssignmentCtx, new_rank: Callable[[int, list[int]], int]) -> RankAssignmentCtx:
    """Close the gaps: the rank becomes ``new_rank(rank, terminated ranks in order)``, and every rank active."""
    state = ctx.state
    terminated = sorted(rank for rank in ctx.terminated_ranks if 0 <= rank < state.world_size)
    if state.rank in ctx.terminated_ranks:
        raise RankDiscarded(f"rank {state.rank} (initially {state.initial_rank}) is among the terminated ranks")
    state.rank = new_rank(state.rank, terminated)
    state.world_size -= len(terminated)
    ctx.terminated_ranks, ctx.joined = set(), set()
    return activate_all(ctx)
