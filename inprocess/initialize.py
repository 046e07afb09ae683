"""Hooks that run at the start of every iteration, before the health check and the function."""

from __future__ import annotations

import abc

from .exception import RestartAbort
from .rank_filter import positive
from .state import FrozenState

__all__ = ["Initialize", "RetryController"]


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

    Raises:
        OptionError: a limit is not an integer >= 1.
        RestartAbort: at the call, when a limit is reached.
    """

    def __init__(
        self, max_iterations: int | None = None, min_world_size: int = 1, min_active_world_size: int = 1
    ) -> None:
        self.max_iterations = None if max_iterations is None else positive("max_iterations", max_iterations)
        self.min_world_size = positive("min_world_size", min_world_size)
        self.min_active_world_size = positive("min_active_world_size", min_active_world_size)

    def __call__(self, state: FrozenState) -> FrozenState:
        reasons = []
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            reasons.append(f"iteration={state.iteration} reached max_iterations={self.max_iterations}")
        if state.world_size < self.min_world_size:
            reasons.append(f"world_size={state.world_size} is less than min_world_size={self.min_world_size}")
        if state.active_world_size < self.min_active_world_size:
            size, least = state.active_world_size, self.min_active_world_size
            reasons.append(f"active_world_size={size} is less than min_active_world_size={least}")
        if reasons:
            raise RestartAbort("RetryController ends the job: " + "; ".join(reasons))
        return state
