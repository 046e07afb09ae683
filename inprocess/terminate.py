"""Hooks that run once on a rank that leaves the job without completing it, before the call raises."""

from __future__ import annotations

import abc

from .state import FrozenState

__all__ = ["Terminate"]


class Terminate(abc.ABC):
    """Base class of ``terminate`` hooks; a plain callable does as well."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState | None:
        """Do the work and return the state (None: unchanged)."""
