"""What a store keeps beside the rounds: heartbeats, addresses, the roster, and what may be deleted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from inprocess.protocol import keys
from inprocess.protocol.keys import (
    KEEP,
    RECOUNT,
    ROSTER_KEY,
)
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import MAX_RECORDS, dump
from inprocess.protocol.ops import Claim, Delete, Exist, Pause, Read, Set, Verb, Wait
from inprocess.protocol.parsing import load_address, load_count, load_roster
from inprocess.protocol.verbs.leaving import forget_leaving
from inprocess.protocol.verbs.shared import count_in, read_count, read_each, tells_everybody

__all__ = [
    "await_over",
    "beat",
    "drop_digest",
    "find_standby",
    "forget",
    "gone",
    "publish_digest",
    "publish_rendezvous",
    "publish_standby",
    "read_beat",
    "read_beats",
    "read_digest",
]


def publish_rendezvous(iteration: int, address: str) -> Verb[str]:
    """Offer a store server for this iteration; returns the address that stands (the first one offered)."""
    key = f"{iteration}/rendezvous"
    return load_address((yield Claim(key, address)), key)


def beat(member: int) -> Verb[int]:
    """One heartbeat of a member's monitor."""
    return (yield from count_in(f"beat/{member}"))


def read_beat(member: int) -> Verb[int]:
    """The heartbeat counter of another member; the observer judges it by its own clock."""
    return (yield from read_count(f"beat/{member}"))


def read_beats(members: Sequence[int]) -> Verb[list[int]]:
    """The heartbeat counters of all these members; 0 for one that has sent none."""
    names = tuple(f"beat/{member}" for member in members)
    found = yield from read_each(names)
    return [load_count(raw, name) for raw, name in zip(found, names, strict=True)]


def publish_standby(member: int, door: str) -> Verb[None]:
    """Say where the arbiter of this member is, and what it wants to hear: ``key@host:port``, or ``-``, there is none.

    Before its first heartbeat, if it is one from the beginning.
    """
    yield Set(f"standby/{member}", door)


def find_standby(member: int) -> Verb[str]:
    """What a member has published of its arbiter; empty where that is nothing yet."""
    raw = yield Read(key := f"standby/{member}")
    return "" if raw is None else load_address(raw, key)


def publish_digest(member: int, text: str) -> Verb[None]:
    """What this member's monitor knows of the last incident; in place of what it knew of the one before."""
    yield Set(f"digest/{member}", text)


def read_digest(member: int) -> Verb[bytes]:
    """What a member's monitor published; empty where that is nothing."""
    raw = yield Read(f"digest/{member}")
    return b"" if raw is None else bytes(raw)


def drop_digest(member: int) -> Verb[None]:
    """Of a member that has gone."""
    yield Delete(f"digest/{member}")


def gone(member: int, members: int) -> Verb[None]:
    """This member needs the store no more. ``members``: how many will say so in all."""
    if (yield from count_in(f"gone/{member}", careful=True)) > 1:
        return
    if (yield from count_in("gone#", careful=True)) >= members:
        yield Set("over", "1")


def await_over(timeout: float, everybody: Iterable[int] = ()) -> Verb[bool]:
    """Wait until no member needs the store any more.

    ``everybody``: the members that the store's host knows of. It looks itself: who counted last may not have known of
    those that joined late, or may have died before it could say so.
    """
    names = tuple(f"gone/{member}" for member in everybody)
    for _ in range(max(1, math.ceil(timeout / RECOUNT))):
        said = yield Wait("over", min(timeout, RECOUNT))
        if (yield Exist(names)) if names else said is not None:
            return True
        if said is not None:
            yield Pause(min(timeout, RECOUNT))
    return False


@tells_everybody
def forget(iteration: int, membership: Membership) -> Verb[None]:
    """Delete what is KEEP iterations old, and the verdicts ``outcome`` and ``next`` of KEEP_VERDICTS iterations ago.

    Entries that declare somebody dead stay: they fence a late riser. A monitor that was out of reach walks along the
    verdicts; where they are gone, the roster tells where to go on.
    """
    old = iteration - KEEP
    if old < 0:
        return
    yield Delete(f"{old}/start/{membership.member}")
    yield Delete(f"{old}/end/{membership.member}")
    if membership.member != membership.roster[0]:
        return
    count = yield from read_count(f"{old}/record#")
    for number in range(1, min(count, MAX_RECORDS) + 1):
        yield Delete(f"{old}/record/{number}")
    for name in ("start", "start#", "end#", "done#", "record#", "abort", "rendezvous", "wanted"):
        yield Delete(f"{old}/{name}")
    yield from forget_leaving(old)
    if iteration >= keys.KEEP_VERDICTS // 2:
        yield from _note_roster(iteration, membership)  # first: who misses a verdict finds it
    if iteration >= keys.KEEP_VERDICTS:
        for name in ("outcome", "next"):
            yield Delete(f"{iteration - keys.KEEP_VERDICTS}/{name}")


def _note_roster(iteration: int, membership: Membership) -> Verb[None]:
    """Never back to an older one: whoever writes may have stood still meanwhile."""
    found = yield Read(ROSTER_KEY)
    if found is not None and load_roster(found, ROSTER_KEY).iteration >= iteration:
        return
    yield Claim(ROSTER_KEY, dump(membership.note(iteration)), instead="" if found is None else found.decode())
