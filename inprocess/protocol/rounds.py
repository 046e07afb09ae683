"""From a complete round to its verdict. Pure: whoever arrives last calls these, with the same result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType

from inprocess.attribution import RETURNED, WAITED, Interruption, InterruptionRecord
from inprocess.protocol import repeats
from inprocess.protocol.messages import (
    FIRST_JOINER,
    MAX_RECORDS,
    MAX_STUCK,
    Arrival,
    ArrivalKind,
    Decision,
    Start,
    Ticket,
)

NO_TICKETS: Mapping[int, Ticket] = MappingProxyType({})
#: what a start round can say besides go: the iteration is interrupted because a rank is missing
MISSING = "a rank of this iteration died or left before the function started"


def decide_start(arrivals: Mapping[int, Arrival]) -> tuple[Start, str, bool]:
    """The verdict of a start round: (start, reason, hopeless).

    Go where the active ranks are exactly 0..n-1 and all members agree on n. n may be 0 where nobody is missing: then
    all are reserves, which wait for processes that join or leave with an error. Otherwise ``reason`` says what is
    wrong; ``hopeless`` is true where nobody is missing, so the assignment itself is at fault and trying again would
    give the same.
    """
    taken = [arrival for arrival in arrivals.values() if arrival.kind is ArrivalKind.RANK]
    sizes = {(arrival.world_size, arrival.active_world_size) for arrival in taken}
    if not taken:
        return Start(False), "no member took a rank", False
    active = next(iter(sizes))[1]
    ranks = sorted(arrival.active_rank for arrival in taken if arrival.active_rank is not None)
    new_ranks = [arrival.rank for arrival in taken]
    gone = any(arrival.kind in (ArrivalKind.DEAD, ArrivalKind.LEFT) for arrival in arrivals.values())
    enough = active is not None and (active > 0 or not gone)
    if len(sizes) == 1 and enough and ranks == list(range(active or 0)) and len(set(new_ranks)) == len(new_ranks):
        return Start(True, active or 0), "", False
    if gone:
        return Start(False), MISSING, False
    found = f"active ranks {ranks[:16]}, (world size, active world size) {sorted(map(str, sizes))[:4]}"
    return Start(False), f"rank_assignment did not give every member one rank in 0..n-1: {found}", True


def decide_end(
    arrivals: Mapping[int, Arrival],
    records: Sequence[InterruptionRecord],
    record_count: int,
    abort: str = "",
    tickets: Mapping[int, Ticket] = NO_TICKETS,
) -> Decision:
    """The next roster: survivors stay, who has a ticket and finds a slot joins, everybody else is out.

    ``arrivals`` holds each member of the roster; ``abort`` is the reason why everybody should leave, if somebody asked
    for that; ``tickets`` are those of processes that wait, by the id they would have.
    """
    alive = {member: arrival for member, arrival in arrivals.items() if arrival.kind is ArrivalKind.ALIVE}
    removed = tuple(sorted(set(arrivals) - set(alive)))
    sizes = {arrival.world_size or 0 for arrival in alive.values()}
    if len(sizes) > 1:
        abort = abort or f"members disagree on the last world size: {sorted(map(str, sizes))}"
    size = next(iter(sizes)) if len(sizes) == 1 else 0
    found = repeats.find(alive.values(), records)
    abort = abort or found.abort
    slots = {member: slot_of(member, arrival) for member, arrival in alive.items()}
    joined = {} if abort else assign_slots(set(slots.values()), tickets)
    stuck = _stuck(arrivals, records)
    waiting = sum(arrival.waits for arrival in arrivals.values())
    # with other members it may come further
    hangs = 0 if removed or joined else repeats.hangs(alive.values(), records)
    abort = abort or repeats.hopeless_hang(hangs, records, stuck[:MAX_STUCK], len(stuck), waiting)
    fresh = {member for member, arrival in alive.items() if arrival.fresh}.union(joined)
    if joined:
        slots.update(joined)
        size = max(size, *(slot + 1 for slot in slots.values()))
        ranks: Mapping[int, int | None] = slots
    else:
        ranks = {member: arrival.rank for member, arrival in alive.items()}
    return Decision(
        removed,
        records=tuple(records[:MAX_RECORDS]),
        record_count=record_count,
        abort=abort,
        terminated=tuple(sorted(set(range(size)).difference(ranks.values()))),
        joined=tuple(sorted(joined.items())),
        slots=size if joined else 0,
        fresh=tuple(sorted(ranks[member] or 0 for member in fresh)),
        repeats=found.repeats,
        pause=found.pause,
        progressed=found.progressed,
        ran=found.ran,
        stuck=tuple(stuck[:MAX_STUCK]),
        stuck_count=len(stuck),
        waiting=waiting,
        hangs=hangs,
    )


def _stuck(arrivals: Mapping[int, Arrival], records: Sequence[InterruptionRecord]) -> list[InterruptionRecord]:
    """After a soft timeout: who did not wait for others, with its place in the code; else who had returned from the
    function, for whom the others may wait; where all waited, everybody. Nobody where an error explains it.

    Who died could not say where it was; it may be the one that the others waited for, so it comes first.
    """
    if not records or records[0].interruption is not Interruption.SOFT_TIMEOUT:
        return []
    if repeats.explains_standstill(arrivals.values(), records):
        return []
    silent = [_spot(member, arrival, records) for member, arrival in arrivals.items() if _is_silent(arrival)]
    said = {member: arrival for member, arrival in arrivals.items() if arrival.where}
    back = [_spot(member, arrival, records) for member, arrival in said.items() if arrival.where == RETURNED]
    named = [
        _spot(member, arrival, records)
        for member, arrival in said.items()
        if not arrival.waits and arrival.where != RETURNED
    ]
    if not silent and not named:
        named = back or [_spot(member, arrival, records, WAITED) for member, arrival in said.items()]
    return [*_by_rank(silent), *_by_rank(named)]


def _is_silent(arrival: Arrival) -> bool:
    return arrival.kind is ArrivalKind.DEAD or (
        arrival.kind is ArrivalKind.ALIVE and not arrival.where and not arrival.waits
    )


def _spot(
    member: int, arrival: Arrival, records: Sequence[InterruptionRecord], message: str = ""
) -> InterruptionRecord:
    slot = slot_of(member, arrival)
    mine = (record for record in records if record.initial_rank == slot)
    rank = next((record.rank for record in mine), slot) if arrival.rank is None else arrival.rank
    kind = Interruption.TERMINATED if arrival.kind is ArrivalKind.DEAD else Interruption.SOFT_TIMEOUT
    return InterruptionRecord(rank, kind, initial_rank=slot, message=message, where=arrival.where)


def _by_rank(records: Sequence[InterruptionRecord]) -> list[InterruptionRecord]:
    return sorted(records, key=lambda record: (record.rank, record.initial_rank or 0))


def slot_of(member: int, arrival: Arrival) -> int:
    """A founder's is its id; who joined says its own."""
    return member if arrival.slot is None else arrival.slot


def assign_slots(taken: Set[int], tickets: Mapping[int, Ticket]) -> dict[int, int]:
    """Who of those that wait gets which slot: first each its own, if that is free, then any below its world size.

    The first ticket wins; who gets none goes on waiting, as a spare.
    """
    assigned: dict[int, int] = {}
    used = set(taken)
    for member, ticket in sorted(tickets.items()):
        if ticket.slot not in used:
            assigned[member] = ticket.slot
            used.add(ticket.slot)
    free = (slot for slot in range(FIRST_JOINER) if slot not in used)
    lowest = next(free)
    for member, ticket in sorted(tickets.items()):
        if member not in assigned and lowest < ticket.world_size:
            assigned[member] = lowest
            lowest = next(free)
    return assigned
