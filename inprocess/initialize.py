"""Hooks that run at the start of every iteration, before the health check and the function."""

from __future__ import annotations

import abc
from datetime import timedelta

from inprocess.system import clock

from .exception import RestartAbort, TooFewRanks
from .options import seconds
from .rank_filter import positive
from .state import FrozenState

__all__ = ["Initialize", "RetryController"]

_ENDS = "RetryController ends the job: "


class Initialize(abc.ABC):
    """Base class of ``initialize`` hooks; a plain callable does as well.

    An Exception restarts everybody; RestartAbort, or any other BaseException, takes the rank out of the job.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState | None:
        """Do the work and return the state (None: unchanged)."""


class RetryController(Initialize):
    """Ends the job, on every rank, after too many iterations or with too few ranks.

    Args:
        max_iterations: the function is called at most this often; None: no limit.
        min_world_size: fewest ranks, reserves included.
        min_active_world_size: fewest active ranks.
        wait_for_replacement: with fewer ranks than that, wait so long for processes that take the free places, counted
            from the first iteration with too few; a ``timedelta`` or seconds, default 0: not at all.

    Raises:
        OptionError: a limit is not an integer >= 1, or the time is none.
        RestartAbort: at the call, when a limit is reached.
    """

    def __init__(
        self,
        max_iterations: int | None = None,
        min_world_size: int = 1,
        min_active_world_size: int = 1,
        wait_for_replacement: timedelta | float = 0.0,
    ) -> None:
        self.wait_for_replacement = seconds("wait_for_replacement", wait_for_replacement)
        self._too_few_since: float | None = None
        # iterations count up; another call begins anew
        self._iteration = 0
        self.max_iterations = None if max_iterations is None else positive("max_iterations", max_iterations)
        self.min_world_size = positive("min_world_size", min_world_size)
        self.min_active_world_size = positive("min_active_world_size", min_active_world_size)

    def __call__(self, state: FrozenState) -> FrozenState:
        too_few = self._too_few(state)
        is_another_call = not state.iteration or state.iteration < self._iteration
        if is_another_call or not too_few:
            self._too_few_since = None
        self._iteration = state.iteration
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            reached = f"iteration={state.iteration} reached max_iterations={self.max_iterations}"
            raise RestartAbort(_ENDS + "; ".join([reached, *too_few]))
        if not too_few:
            return state
        left = self._patience_left()
        if left <= 0:
            raise RestartAbort(_ENDS + "; ".join(too_few))
        waited = f"nobody came within wait_for_replacement={self.wait_for_replacement:g}s"
        raise TooFewRanks(_ENDS + "; ".join([*too_few, waited]), left)

    def _patience_left(self) -> float:
        if not self.wait_for_replacement:
            return 0.0
        if self._too_few_since is None:
            self._too_few_since = clock.monotonic()
        return self._too_few_since + self.wait_for_replacement - clock.monotonic()

    def _too_few(self, state: FrozenState) -> list[str]:
        reasons = []
        if state.world_size < self.min_world_size:
            reasons.append(f"world_size={state.world_size} is less than min_world_size={self.min_world_size}")
        if state.active_world_size < self.min_active_world_size:
            size, least = state.active_world_size, self.min_active_world_size
            reasons.append(f"active_world_size={size} is less than min_active_world_size={least}")
        return reasons
