"""Assignments that look only at the order of ranks: fill gaps, and limits of the active world size. Pure."""

from __future__ import annotations

import bisect

from inprocess.protocol.assignment import BothForms, RankAssignmentCtx, RankFilter, activate_all, renumber
from inprocess.rank_filter import positive

__all__ = ["ActivateAllRanks", "ActiveWorldSizeDivisibleBy", "FillGaps", "MaxActiveWorldSize"]


class ActivateAllRanks(BothForms):
    """Makes every rank active, whatever limits were set before it; changes no rank."""

    counts_only = True

    def _assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        ctx.limits.clear()
        return activate_all(ctx)


class FillGaps(BothForms):
    """Ranks that fit the new world size stay; those beyond it fill the gaps in order, so few ranks change::

        before   0 X 2 3 X X 6 7
        after    0   2 3     1 4

    Every rank is active, as far as the filters composed with it allow.
    """

    counts_only = True

    def _assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        world_size = ctx.state.world_size

        def fill(rank: int, terminated: list[int]) -> int:
            size = world_size - len(terminated)
            if rank < size:
                return rank
            gone_between = bisect.bisect_left(terminated, rank) - bisect.bisect_left(terminated, size)
            return terminated[rank - size - gone_between]

        return renumber(ctx, fill)


class MaxActiveWorldSize(RankFilter):
    """At most `max_active_world_size` ranks are active, the others are reserves; None: no limit.

    Raises:
        OptionError: the limit is not an integer >= 1.
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        self.size = None if max_active_world_size is None else positive("max_active_world_size", max_active_world_size)

    def limit(self, active_world_size: int) -> int:
        return active_world_size if self.size is None else min(self.size, active_world_size)


class ActiveWorldSizeDivisibleBy(RankFilter):
    """The active world size is a multiple of `divisor`; the ranks beyond it are reserves.

    Raises:
        OptionError: `divisor` is not an integer >= 1.
    """

    def __init__(self, divisor: int = 1) -> None:
        self.divisor = positive("divisor", divisor)

    def limit(self, active_world_size: int) -> int:
        return active_world_size // self.divisor * self.divisor
