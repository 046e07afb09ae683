"""Processes that wait for a slot: their tickets, and whether the job has begun."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inprocess.exception import BadMessage, RestartAbort
from inprocess.protocol.keys import (
    JOINED_KEY,
    ROSTER_KEY,
    TICKETS_KEY,
)
from inprocess.protocol.messages import FIRST_JOINER, Roster, Ticket, dump
from inprocess.protocol.ops import Claim, Exist, Read, ReadAll, Set, Verb, Wait
from inprocess.protocol.parsing import load_decision, load_roster, load_ticket
from inprocess.protocol.verbs.shared import count_in, count_processes

__all__ = [
    "await_begun",
    "find_ticket",
    "has_begun",
    "has_ticket",
    "is_founder",
    "is_wanted",
    "return_ticket",
    "take_ticket",
    "waiting",
    "want",
]

#: of a process that does not wait any more
CLOSED = Ticket(0, 1, closed=True)


def is_founder(member: int, roster: Roster) -> bool:
    """Whether a job that has just begun counts this member."""
    return any(first <= member <= last for first, last in roster.members)


def waiting(members: Iterable[int]) -> Verb[dict[int, Ticket]]:
    """The tickets of processes that wait to join. One that cannot be read is that of another version: it waits on."""
    count = yield from count_processes(TICKETS_KEY)
    numbers = range(1, 1 + count)
    keys = tuple(f"ticket/{number}" for number in numbers)
    if not keys:
        return {}
    yield from _close_absent(keys)
    found = yield ReadAll(keys)
    tickets = {FIRST_JOINER + n: _ticket(raw, key) for n, raw, key in zip(numbers, found, keys, strict=True)}
    here = set(members)
    return {member: ticket for member, ticket in tickets.items() if not ticket.closed and member not in here}


def _close_absent(keys: tuple[str, ...]) -> Verb[None]:
    """One operation where all tickets exist. One that does not is searched by halves, and closed for good: who counted
    may have died before it wrote it, and later rounds must not search again. Should it live, it writes over that."""
    if (yield Exist(keys)):
        return
    if len(keys) == 1:
        yield Claim(keys[0], dump(CLOSED), awaited=False)
        return
    middle = len(keys) // 2
    yield from _close_absent(keys[:middle])
    yield from _close_absent(keys[middle:])


def _ticket(raw: bytes | None, key: str) -> Ticket:
    try:
        return CLOSED if raw is None else load_ticket(raw, key)
    except BadMessage:
        return CLOSED


def has_begun() -> Verb[bool]:
    """Whether the job has begun, and has a store."""
    return (yield Read(JOINED_KEY)) is not None


def await_begun() -> Verb[Roster]:
    """Wait until the job has begun; who was in it then, or a few iterations ago. Raises RestartAbort where everybody
    leaves at once."""
    decision = load_decision((yield Wait(JOINED_KEY)), JOINED_KEY)
    if decision.abort:
        raise RestartAbort(decision.abort)
    found = yield Read(ROSTER_KEY)
    if found is None:  # it is written first
        raise BadMessage(f"store key {JOINED_KEY!r}: there is no {ROSTER_KEY!r}. This library did not write it.")
    return load_roster(found, ROSTER_KEY)


def take_ticket(ticket: Ticket) -> Verb[int]:
    """Say that a process wants to join; the id that it has from now on. Every end round looks for tickets."""
    number = yield from count_in(TICKETS_KEY, careful=True)
    yield Set(f"ticket/{number}", dump(ticket))
    return FIRST_JOINER + number


def has_ticket(member: int) -> Verb[bool]:
    """Whether the process with this id waits to be let in."""
    key = f"ticket/{member - FIRST_JOINER}"
    return not _ticket((yield Read(key)), key).closed


def want(iteration: int, members: Sequence[int]) -> Verb[dict[int, Ticket]]:
    """Say that this iteration waits for processes that join; the tickets of those that wait already."""
    yield Claim(f"{iteration}/wanted", "1")
    return (yield from waiting(members))


def is_wanted(iteration: int) -> Verb[bool]:
    """Whether this iteration waits for processes that join."""
    return bool((yield Exist((f"{iteration}/wanted",))))


def return_ticket(member: int) -> Verb[None]:
    """It has joined, or does not want to any more. Before it can leave the roster: it would be let in again."""
    yield Set(f"ticket/{member - FIRST_JOINER}", dump(CLOSED))


def find_ticket(by: str) -> Verb[int | None]:
    """The id of the process that signs so, if it has a ticket and still waits."""
    found = yield from waiting(())
    return next((member for member, ticket in found.items() if ticket.by == by), None)
