"""From a complete round to its verdict. Pure: whoever arrives last calls these, with the same result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inprocess.attribution import InterruptionRecord
from inprocess.protocol.messages import MAX_RECORDS, Arrival, Decision, Kind, Start

#: what a start round can say besides go: the iteration is interrupted because a rank is missing
MISSING = "a rank of this iteration died or left before the function started"


def decide_start(arrivals: Mapping[int, Arrival]) -> tuple[Start, str, bool]:
    """The verdict of a start round: (start, reason, hopeless).

    Go where the active ranks are exactly 0..n-1 and all members agree on n. Otherwise ``reason`` says what is
    wrong; ``hopeless`` is true where nobody is missing, so the assignment itself is at fault and trying again would
    give the same.
    """
    taken = [arrival for arrival in arrivals.values() if arrival.kind is Kind.RANK]
    sizes = {(arrival.world_size, arrival.active_world_size) for arrival in taken}
    if not taken:
        return Start(False), "no member took a rank", False
    active = next(iter(sizes))[1]
    ranks = sorted(arrival.active_rank for arrival in taken if arrival.active_rank is not None)
    places = [arrival.rank for arrival in taken]
    gone = any(arrival.kind in (Kind.DEAD, Kind.LEFT) for arrival in arrivals.values())
    if len(sizes) == 1 and active and ranks == list(range(active)) and len(set(places)) == len(places):
        return Start(True, active), "", False
    if gone:
        return Start(False), MISSING, False
    found = f"active ranks {ranks[:16]}, (world size, active world size) {sorted(map(str, sizes))[:4]}"
    return Start(False), f"rank_assignment did not give every member one rank in 0..n-1: {found}", True


def decide_end(
    arrivals: Mapping[int, Arrival], records: Sequence[InterruptionRecord], record_count: int, abort: str = ""
) -> Decision:
    """The next roster: survivors stay, everybody else is out.

    ``arrivals`` holds each member of the roster; ``abort`` is the reason why everybody should leave, if somebody asked
    for that.
    """
    alive = {member: arrival for member, arrival in arrivals.items() if arrival.kind is Kind.ALIVE}
    removed = tuple(sorted(set(arrivals) - set(alive)))
    sizes = {arrival.world_size for arrival in alive.values()}
    if len(sizes) > 1:
        abort = abort or f"members disagree on the last world size: {sorted(map(str, sizes))}"
    frame = range(next(iter(sizes)) or 0) if len(sizes) == 1 else range(0)
    terminated = tuple(sorted(set(frame) - {arrival.rank for arrival in alive.values()}))
    return Decision(removed, terminated, tuple(records[:MAX_RECORDS]), record_count, abort)
