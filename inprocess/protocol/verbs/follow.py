"""Waiting for the next decision of the chain."""

from __future__ import annotations

from collections.abc import Sequence

from inprocess.exception import BadMessage
from inprocess.protocol.keys import (
    JOINING,
    RECOUNT,
)
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import Arrival, Decision, Outcome, Start
from inprocess.protocol.ops import Read, Verb, Wait
from inprocess.protocol.parsing import load_address, load_decision, load_outcome, load_start
from inprocess.protocol.verbs.rounds import recount
from inprocess.protocol.verbs.shared import refuse_behind, wake

__all__ = [
    "await_next",
    "await_next_awake",
    "await_outcome",
    "await_rendezvous",
    "await_start",
    "glance_next",
    "has_started",
    "look_next",
    "refuse_other_size",
]


def await_next(
    iteration: int, recounting: Sequence[int] | None = None, membership: Membership | None = None
) -> Verb[Decision]:
    """Wait for the verdict of the end round. ``recounting``: see `_await`; ``membership``: that it must fit."""
    key = f"{iteration}/next"
    return _known(load_decision((yield from _await(key, iteration, recounting)), key), key, membership)


def _known(decision: Decision, key: str, membership: Membership | None) -> Decision:
    if membership is not None and (strangers := membership.strangers(decision)):
        raise BadMessage(f"store key {key!r}: names {strangers}, which this job does not have")
    return decision


def await_next_awake(iteration: int, membership: Membership | None = None) -> Verb[Decision]:
    """As `await_next`, for a monitor that has seen the iteration interrupted, or is joining.

    Whoever interrupted it may have died before it had woken everybody up, so that is done once more after a second.
    """
    key = f"{iteration}/next"
    found = yield Wait(key, None if iteration == JOINING else RECOUNT)
    if found is None:
        yield from refuse_behind(iteration)
        yield from wake(iteration)
        found = yield Wait(key)
    return _known(load_decision(found, key), key, membership)


def glance_next(iteration: int, patience: float) -> Verb[Decision | None]:
    """The verdict of the end round if there is one within so many seconds."""
    yield from refuse_behind(iteration)
    key = f"{iteration}/next"
    found = yield Wait(key, patience)
    return None if found is None else load_decision(found, key)


def look_next(iteration: int) -> Verb[Decision | None]:
    """The verdict of the end round if there is one, and the iteration has not completed: who speaks for the dead may
    decide that round, too."""
    yield from refuse_behind(iteration)
    raw = yield Read(key := f"{iteration}/outcome")
    if raw is not None and load_outcome(raw, key).completed:
        return None
    key = f"{iteration}/next"
    found = yield Read(key)
    return None if found is None else load_decision(found, key)


def await_rendezvous(iteration: int) -> Verb[str]:
    """Wait for the address of the iteration's own store server; "-" where the iteration was interrupted before that."""
    key = f"{iteration}/rendezvous"
    return load_address((yield Wait(key)), key)


def await_start(iteration: int) -> Verb[Start]:
    """Wait for the verdict of the start round."""
    key = f"{iteration}/start"
    return load_start((yield Wait(key)), key)


def refuse_other_size(iteration: int, start: Start, arrival: Arrival) -> None:
    """After a verdict that says go. Raises BadMessage where it is not about what this member arrived with."""
    if start.active_world_size != arrival.active_world_size:
        raise BadMessage(
            f"store key '{iteration}/start': names {start.active_world_size} active ranks, not "
            f"{arrival.active_world_size}. This library did not write it."
        )


def has_started(iteration: int) -> Verb[bool]:
    """Whether the start round said go."""
    raw = yield Read(key := f"{iteration}/start")
    return raw is not None and load_start(raw, key).go


def await_outcome(iteration: int, recounting: Sequence[int] | None = None) -> Verb[Outcome]:
    """Wait for the outcome. ``recounting``: see `_await`."""
    key = f"{iteration}/outcome"
    return load_outcome((yield from _await(key, iteration, recounting)), key)


def _await(key: str, iteration: int, recounting: Sequence[int] | None) -> Verb[bytes]:
    """Wait for a key. With ``recounting``, a roster, look again and again whether a round is complete meanwhile."""
    if recounting is None:
        return (yield Wait(key))  # type: ignore[no-any-return]
    while True:
        found: bytes | None = yield Wait(key, RECOUNT)
        if found is not None:
            return found
        yield from refuse_behind(iteration)
        yield from recount(iteration, recounting)
