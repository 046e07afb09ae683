"""Places in a program that its tests can name. Imports nothing: training code imports this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["here"]

#: what `inprocess.testing` does at a place; None outside its tests
reached: Callable[[str, Mapping[str, Any]], None] | None = None


def here(label: str, **values: Any) -> None:
    """Name this place for tests: ``At(rank=1, label="save")`` strikes here. Outside tests it does nothing (0.05 us).

    Args:
        label: the name. A function may reach it many times; a fault strikes the first time.
        values: small values that the test may look at, in ``result.ranks[1].of("here")``; ``step`` is the one that
            ``result.assert_resumed_from()`` reads. Not ``event``, ``call`` and ``t``, which each event has.
    """
    if reached is not None:
        reached(label, values)
