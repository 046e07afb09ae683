"""Values for parsers: good ones of every kind, good ones with something broken in them, and anything at all.

``quick`` is for the tests of every day. INPROCESS_FUZZ_EXAMPLES makes every fuzz test a long one; see ``nox -s fuzz``.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.protocol import messages, parsing
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import (
    Arrival,
    ArrivalKind,
    Decision,
    FailoverOutcome,
    Outcome,
    Roster,
    Start,
    Ticket,
    Verdict,
    Vote,
)

T = TypeVar("T")
#: how many examples each fuzz test runs; the everyday ones are the same every time
EXAMPLES = int(os.environ.get("INPROCESS_FUZZ_EXAMPLES", "0"))


def fuzz(test: Callable[..., T], daily: int = 100, most: int = 1 << 30) -> Callable[..., T]:
    """Few and always the same examples, or as many as the environment says; leaves no database behind."""
    return settings(
        max_examples=min(EXAMPLES, most) or daily,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )(test)


# --- good ones

numbers = st.integers(0, messages.MAX_RANKS - 1)
ascending = st.sets(numbers, max_size=5).map(lambda found: tuple(sorted(found)))
records = st.builds(
    InterruptionRecord,
    rank=numbers,
    interruption=st.sampled_from(Interruption),
    initial_rank=st.none() | numbers,
    message=st.text(max_size=40),
    where=st.text(max_size=40),
)


@st.composite
def arrivals(draw: Any) -> Arrival:
    """An entry of any kind, with all that its kind must say."""
    kind = draw(st.sampled_from(ArrivalKind))
    by = draw(st.text(max_size=20))
    if kind not in (ArrivalKind.RANK, ArrivalKind.ALIVE) and draw(st.booleans()):
        return Arrival(kind, by=by)
    size = draw(st.integers(1, messages.MAX_RANKS - 1))
    rank = draw(st.integers(0, size - 1))
    if kind is not ArrivalKind.RANK:
        repeats = draw(st.integers(0, 99))
        arrival = Arrival(
            kind,
            rank,
            size,
            by=by,
            slot=draw(st.none() | numbers),
            repeats=repeats,
            limit=draw(st.integers(0, repeats)),
            **{name: draw(st.booleans()) for name in ("fresh", "progressed", "ran")},
        )
        spot = {"where": draw(st.text(max_size=300)), "waits": draw(st.booleans())}
        spot["hangs"] = draw(st.integers(0, 99)) if spot["where"].split() else 0
        return dataclasses.replace(arrival, **spot) if kind is ArrivalKind.ALIVE else arrival
    active = draw(st.integers(1, size))
    return Arrival(kind, rank, size, active, draw(st.none() | st.integers(0, active - 1)), by)


tickets = st.tuples(st.integers(0, 99), st.integers(1, 99), st.text(max_size=20), st.booleans()).map(
    lambda drawn: Ticket(drawn[0], drawn[0] + drawn[1], *drawn[2:])
)
starts = st.integers(0, 1000).map(lambda size: Start(size > 0, size))
outcomes = st.builds(Outcome, st.just(True), st.none(), ascending) | st.builds(Outcome, st.just(False), records)


@st.composite
def decisions(draw: Any) -> Decision:
    found = tuple(draw(st.lists(records, max_size=3)))
    count = len(found) + draw(st.integers(0, 100))
    gone, reason = draw(ascending), draw(st.text(max_size=20))
    seats = draw(
        st.dictionaries(st.integers(messages.FIRST_JOINER, messages.MAX_RANKS - 1), st.integers(0, 9), max_size=3)
    )
    joined = tuple(sorted({slot: (member, slot) for member, slot in seats.items()}.values()))
    if reason or not joined:
        more = {name: draw(st.booleans()) for name in ("progressed", "ran")}
        more |= {"repeats": draw(st.integers(0, 99)), "pause": draw(st.integers(0, messages.MAX_PAUSE_MS))}
        stuck, waiting = tuple(draw(st.lists(records, max_size=messages.MAX_STUCK))), draw(numbers)
        more |= {"stuck": stuck, "stuck_count": len(stuck) + draw(st.integers(0, 9)), "waiting": waiting}
        more |= {"hangs": draw(st.integers(0, 99))}
        return Decision(gone, draw(ascending), found, count, reason, fresh=draw(ascending), **more)
    fresh = tuple(sorted(slot for _, slot in joined))
    free = tuple(sorted(draw(st.sets(st.integers(0, 9), max_size=3)).difference(fresh)))
    return Decision(gone, free, found, count, "", joined, 10, fresh)


@st.composite
def rosters(draw: Any) -> Roster:
    membership = Membership(0, draw(ascending))
    return dataclasses.replace(
        membership.note(draw(st.integers(-1, 1000))), joined=tuple((m, 1) for m in draw(ascending))
    )


votes = st.builds(Vote.of, numbers, rosters())
verdicts = st.builds(
    Verdict, st.sampled_from((FailoverOutcome.COMPLETED, FailoverOutcome.REFUSED)), reason=st.text(max_size=20)
) | st.builds(
    lambda roster, host, port: Verdict(FailoverOutcome.GO, roster.members or ((0, 1),), roster.iteration, host, port),
    rosters(),
    numbers,
    st.integers(1, 65535),
)

#: each kind of message: what loads it, and good ones
KINDS: dict[str, tuple[Callable[[bytes | str, str], Any], st.SearchStrategy[Any]]] = {
    "arrival": (parsing.load_arrival, arrivals()),
    "start": (parsing.load_start, starts),
    "outcome": (parsing.load_outcome, outcomes),
    "decision": (parsing.load_decision, decisions()),
    "record": (parsing.load_record, records),
    "roster": (parsing.load_roster, rosters()),
    "ticket": (parsing.load_ticket, tickets),
    "vote": (parsing.load_vote, votes),
    "verdict": (parsing.load_verdict, verdicts),
}

# --- bad ones

#: what hostile writers think of first
NASTY: tuple[bytes, ...] = (
    b"",
    b"\0",
    b"\xff\xfe\x00",
    b"null",
    b"[]",
    b"{}",
    b"NaN",
    b'{"rank":NaN}',
    b'{"rank":-1}',
    b'{"rank":1e400}',
    b'{"rank":' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"kind":' * 500 + b"1" + b"}" * 500,
    b'{"kind":' + b"[" * 300 + b"]" * 300 + b"}",
    b'{"rank":1,"rank":2}',
    b'{"by":"\\ud800"}',
    '{"kind":"alive"}'.encode("utf-16"),
    b'{"kind":"\x1b[31m"}',
    b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",  # a pickle
    b"-5",
    b"9" * 40,
    b" 7",
    b"7x",
    "٣".encode(),
    b"x" * 100_000,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)
_FIELDS = (
    *("kind", "rank", "world_size", "active_world_size", "active_rank", "by", "go", "completed", "cause", "removed"),
    *("slot", "fresh", "joined", "slots", "members", "iteration", "closed"),
    *("terminated", "records", "record_count", "abort", "interruption", "initial_rank", "message", "where"),
    *("pings", "repeats", "limit", "pause", "progressed", "ran", "waits", "hangs"),
)
objects = st.dictionaries(st.sampled_from(_FIELDS), json_values, max_size=6)
anything = (
    st.binary(max_size=60)
    | json_values.map(lambda value: json.dumps(value).encode())
    | objects.map(lambda value: json.dumps(value).encode())
    | st.sampled_from(NASTY)
)


@st.composite
def damaged(draw: Any, good: st.SearchStrategy[bytes]) -> bytes:
    """A good value with a few bytes changed, taken out or put in, cut off, or doubled."""
    value = bytearray(draw(good))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(value)))
        how = draw(st.sampled_from(("put in", "take out", "change", "cut", "double")))
        if how == "put in":
            value[at:at] = draw(st.binary(min_size=1, max_size=3) | st.sampled_from((b"-", b"9", b'"', b"[", b"{")))
        elif how == "take out":
            del value[at : at + draw(st.integers(1, 8))]
        elif how == "change":
            value[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif how == "cut":
            del value[at:]
        else:
            value *= 2
    return bytes(value)


@st.composite
def altered(draw: Any, good: st.SearchStrategy[bytes]) -> bytes:
    """A good JSON object in which one field has another value, is missing, or is one too many."""
    data = json.loads(draw(good))
    name = draw(st.sampled_from([*data, *_FIELDS, "more"]))
    if draw(st.booleans()):
        data.pop(name, None)
    else:
        data[name] = draw(json_values)
    return json.dumps(data).encode()
