"""The training state that survives restarts in memory: see ``state.LiveState``."""

from __future__ import annotations

import importlib
from typing import Any

#: submodules with public names; ``inprocess.live.tree.Stateful`` works after ``import inprocess``
_MODULES = ("sampler", "state", "tree")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"inprocess.live.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_MODULES)
