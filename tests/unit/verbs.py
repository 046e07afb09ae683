"""Carries out verbs over the simulator's dict, without time."""

from __future__ import annotations

from typing import Any

from inprocess.protocol.ops import Now, Pause, Wait
from tests.sim.engine import SimStore


def carried_out(store: SimStore, verb: Any) -> Any:
    """Each operation of a verb, before it is carried out. A wait finds what is there, and time stands still."""
    answer = None
    while True:
        try:
            op = verb.send(answer)
        except StopIteration as end:
            return end.value
        yield op
        match op:
            case Now():
                answer = 0.0
            case Pause():
                answer = None
            case Wait(key):
                answer = store.data.get(key)
            case _:
                answer = store.execute(op)


def do(store: SimStore, verb: Any, steps: int | None = None) -> Any:
    """Carry out a verb, or only its first ``steps`` operations (its process dies then)."""
    ops, count = carried_out(store, verb), 0
    while True:
        try:
            next(ops)
        except StopIteration as end:
            return end.value
        if count == steps:
            return None
        count += 1
