"""Hooks that run once on a rank whose job is completed, before the call returns."""

from __future__ import annotations

import abc

from .state import FrozenState

__all__ = ["Completion"]


class Completion(abc.ABC):
    """Base class of ``completion`` hooks; a plain callable does as well."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState | None:
        """Do the work and return the state (None: unchanged)."""
