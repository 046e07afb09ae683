"""A function of somebody else's becomes another one, for the rest of this process: one rank of one test."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["change"]


def change(owner: Any, name: str, by: Callable[..., Any]) -> None:
    """``owner.name(...)`` becomes ``by(original, ...)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs)

    setattr(owner, name, changed)
