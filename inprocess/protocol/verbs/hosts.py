"""Which members run on one host, and how its active ranks count without holes: ``INPROCESS_LOCAL_RANK``.

``LOCAL_RANK`` names a GPU, so it stays a process's own for as long as that lives, and a host has holes after a death.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from inprocess.protocol.membership import Membership
from inprocess.protocol.ops import ReadAll, Set, Verb
from inprocess.protocol.parsing import load_arrival, load_count
from inprocess.protocol.verbs.shared import count_in, count_processes, read_each, tells_everybody

__all__ = ["find_neighbors", "place_on_host", "register_on_host"]


def register_on_host(host: str, member: int) -> Verb[None]:
    """Say where a member runs, before it arrives in its first start round.

    Who dies between counting and writing leaves a number without a member: it is on no roster either.
    """
    number = yield from count_in(f"host/{host}#", careful=True)
    yield Set(f"host/{host}/{number}", str(member))


@tells_everybody
def find_neighbors(iteration: int, host: str, known: Mapping[int, int]) -> Verb[dict[int, int]]:
    """Who was ever registered on the host: number -> member. ``known``: what an earlier look found."""
    count = yield from count_processes(f"host/{host}#")
    new = [number for number in range(1, count + 1) if number not in known]
    if not new:
        return dict(known)
    keys = tuple(f"host/{host}/{number}" for number in new)
    values = yield from read_each(keys)
    found = zip(new, keys, values, strict=True)
    return {**known, **{number: load_count(raw, key) for number, key, raw in found if raw is not None}}


@tells_everybody
def place_on_host(
    iteration: int, membership: Membership, members: Collection[int], own: int, size: int
) -> Verb[tuple[int, int]]:
    """An active member's place among the active ranks of its host, by rank, and how many these are.

    Nothing is read where all members are on this host, or no other one.

    Args:
        iteration: one whose start round said go.
        membership: of the member that asks.
        members: those of its host, of any iteration.
        own: its active rank.
        size: number of active ranks of the job.
    """
    others = sorted(set(members).intersection(membership.roster).difference({membership.member}))
    if len(others) == len(membership.roster) - 1:
        return own, size
    if not others:
        return 0, 1
    keys = tuple(f"{iteration}/start/{member}" for member in others)
    arrivals = [load_arrival(raw, key) for key, raw in zip(keys, (yield ReadAll(keys)), strict=True)]
    active = [arrival.active_rank for arrival in arrivals if arrival.active_rank is not None]
    return sum(rank < own for rank in active), len(active) + 1
