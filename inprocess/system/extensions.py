"""Who implements what the core asks for. `inprocess/composition.py` names them; where it names nobody the core goes on
without.

The core has interfaces, and imports none of those who implement them. So it can be read, and runs, by itself.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

__all__ = ["compose", "first", "give", "load"]

_named: dict[str, tuple[str, ...]] = {}
_given: dict[str, Any] = {}


def compose(named: Mapping[str, tuple[str, ...]]) -> None:
    """Interface -> those who implement it, each as ``"module:name"``, in the order in which they are asked."""
    _named.update(named)
    load.cache_clear()


def give(interface: str, implementation: object) -> None:
    """The one who implements an interface, in this process from now on."""
    _given[interface] = implementation
    load.cache_clear()


@functools.cache
def load(interface: str) -> tuple[Any, ...]:
    """All who implement an interface; imported now, where they are not yet."""
    if interface in _given:
        return (_given[interface],)
    found = (entry.partition(":") for entry in _named.get(interface, ()))
    return tuple(getattr(importlib.import_module(module), name) for module, _, name in found)


def first(interface: str) -> Any:
    """The one who implements an interface; None: nobody does."""
    return next(iter(load(interface)), None)
