"""Rank filters as in nvidia-resiliency-ext 0.2: `state -> state`, applied after the rank assignment. Pure."""

from __future__ import annotations

import abc

from .exception import OptionError
from .state import Mode, State, Status

__all__ = ["ActiveWorldSizeDivisibleBy", "MaxActiveWorldSize", "RankFilter", "WorldSizeDivisibleBy"]


class RankFilter(abc.ABC):
    """Lowers the active world size; ranks beyond it become reserves."""

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Change `state` (or make a new one) and return it."""


class MaxActiveWorldSize(RankFilter):
    """At most `max_active_world_size` ranks are active; None: no limit.

    Raises:
        OptionError: the limit is not an integer >= 1.
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        self.limit = None if max_active_world_size is None else positive("max_active_world_size", max_active_world_size)

    def __call__(self, state: State) -> State:
        return first_active(state, state.active_world_size if self.limit is None else self.limit)


class ActiveWorldSizeDivisibleBy(RankFilter):
    """The active world size is a multiple of `divisor`.

    Raises:
        OptionError: `divisor` is not an integer >= 1.
    """

    def __init__(self, divisor: int = 1) -> None:
        self.divisor = positive("divisor", divisor)

    def __call__(self, state: State) -> State:
        return first_active(state, state.active_world_size // self.divisor * self.divisor)


class WorldSizeDivisibleBy(ActiveWorldSizeDivisibleBy):
    """The same under its first name."""


def first_active(state: State, size: int) -> State:
    """At most the ranks below `size` are active, each under its own rank: version 0.2 has no other."""
    state.active_world_size = min(size, state.active_world_size)
    state.status = Status.ACTIVE if state.rank < state.active_world_size else Status.INACTIVE
    return state


def keep_active(state: State, size: int) -> State:
    """Lower the active world size of `state` to `size`, in place; a rank beyond it becomes a reserve."""
    state.active_world_size = min(size, state.active_world_size)
    if state.active_rank is None or state.active_rank >= state.active_world_size:
        state.active_rank, state.mode = None, Mode.INACTIVE
    return state


def positive(name: str, value: object) -> int:
    """`value`, an integer >= 1; OptionError names the option otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name}={value!r} must be an integer >= 1")
    return value
