"""Carries out verbs over the simulator's dict, without time."""

from __future__ import annotations

from typing import Any

from inprocess.protocol.ops import Now, Wait
from tests.sim.engine import SimStore


def do(store: SimStore, verb: Any, steps: int | None = None) -> Any:
    """Carry out a verb, or only its first ``steps`` operations (its process dies then). A wait finds what is there, and
    time stands still."""
    answer, count = None, 0
    while True:
        try:
            op = verb.send(answer)
        except StopIteration as end:
            return end.value
        if count == steps:
            return None
        count += 1
        answer = 0.0 if isinstance(op, Now) else store.data.get(op.key) if isinstance(op, Wait) else store.execute(op)
