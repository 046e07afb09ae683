"""The verbs of the protocol as generators of store operations. The only file that knows the store's keys.

A verb may be cut off between any two operations (the process dies). Two rules make that safe: an entry that others
count is written before it is counted, and whoever speaks for a dead member recounts until there is a verdict.

Keys, below the prefix of the call; ``i`` is the iteration, -1 is the join::

    i/start/<member>   entry in the start round          i/start       verdict: go or no
    i/end/<member>     entry in the end round            i/next        verdict: the next roster, as a difference
    i/start#, i/end#   how many entries                  i/outcome     completed | interrupted; the first wins
    i/done#            functions that returned           i/rendezvous  host:port of the iteration's own store server
    i/record/<n>       why it was interrupted            i/record#     how many records
    i/abort            why everybody must leave          beat/<member> heartbeat counter
    gone/<member>      has no further need of the store  gone#, over   all have none: its host may go
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import Fenced, OptionError
from inprocess.protocol.book import Book
from inprocess.protocol.messages import (
    MAX_RECORDS,
    Arrival,
    Decision,
    Kind,
    Outcome,
    Start,
    dump,
    load_arrival,
    load_decision,
    load_outcome,
    load_record,
    load_start,
)
from inprocess.protocol.ops import Add, Claim, Delete, Exist, Read, ReadAll, Set, Verb, Wait
from inprocess.protocol.rounds import decide_end, decide_start

JOINING = -1
#: exists from the moment everybody has joined
JOINED_KEY = f"{JOINING}/next"
#: whoever speaks for a dead member looks this often whether a round is complete, and a monitor that waits for the end
#: round sees once to it that everybody is awake (seconds)
RECOUNT = 1.0
#: what is older than this many iterations is deleted, except for the verdicts
KEEP = 4


# --- what a follower waits for, in this order --------------------------------------------------------------------


def await_next(iteration: int, recounting: Sequence[int] | None = None) -> Verb[Decision]:
    """Wait for the verdict of the end round. ``recounting``: see `_await`."""
    key = f"{iteration}/next"
    return load_decision((yield from _await(key, iteration, recounting)), key)


def await_next_awake(iteration: int) -> Verb[Decision]:
    """As `await_next`, for a monitor that has seen the iteration interrupted.

    Whoever interrupted it may have died before it had woken everybody up, so that is done once more after a second.
    """
    key = f"{iteration}/next"
    found = yield Wait(key, RECOUNT)
    if found is None:
        yield from _wake(iteration)
        found = yield Wait(key)
    return load_decision(found, key)


def await_rendezvous(iteration: int) -> Verb[str]:
    """Wait for the address of the iteration's own store server; "-" where the iteration was interrupted before that."""
    return (yield Wait(f"{iteration}/rendezvous")).decode(errors="replace")  # type: ignore[no-any-return]


def await_start(iteration: int) -> Verb[Start]:
    """Wait for the verdict of the start round."""
    key = f"{iteration}/start"
    return load_start((yield Wait(key)), key)


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
        yield from recount(iteration, recounting)


# --- the rounds ---------------------------------------------------------------------------------------------------


def join(book: Book, by: str) -> Verb[None]:
    """Arrive in the end round of iteration -1. Raises OptionError where another process has this rank already."""
    arrival = Arrival(Kind.ALIVE, rank=book.rank, world_size=book.world_size, by=by)
    found = yield from _arrive(book.iteration, "end", book.member, arrival, book.roster)
    if found.kind is Kind.ALIVE and found.by != by:
        raise OptionError(
            f"RANK={book.member} is taken: process {found.by} joined this job with it, this is process {by}. "
            "Start every process with a rank of its own, and every job with a MASTER_PORT of its own."
        )
    _refuse_fenced(found, book.member)


def start_round(book: Book, arrival: Arrival) -> Verb[None]:
    """Say which rank this member took (or that it was discarded, or leaves). Raises Fenced."""
    _refuse_fenced((yield from _arrive(book.iteration, "start", book.member, arrival, book.roster)), book.member)


def end_round(book: Book, arrival: Arrival) -> Verb[None]:
    """Say that this member goes on, or leaves. Raises Fenced."""
    _refuse_fenced((yield from _arrive(book.iteration, "end", book.member, arrival, book.roster)), book.member)


def _refuse_fenced(found: Arrival, member: int) -> None:
    if found.kind is Kind.DEAD:
        raise Fenced(
            f"initial rank {member} was declared dead by {found.by or 'its monitor'}: it was stopped or could not be "
            "reached for longer than heartbeat_timeout. The others went on without it, so it must not run again."
        )


def _arrive(iteration: int, name: str, member: int, arrival: Arrival, roster: Sequence[int]) -> Verb[Arrival]:
    """Enter a round once; the last to arrive decides it. Answers the entry that stands, perhaps somebody else's."""
    key = f"{iteration}/{name}/{member}"
    text = dump(arrival)
    found = yield Claim(key, text)
    if found != text.encode():
        return load_arrival(found, key)
    count = yield Add(f"{iteration}/{name}#", 1)
    if count >= len(roster):
        yield from _decide(iteration, name, roster)
    return arrival


def _decide(iteration: int, name: str, roster: Sequence[int]) -> Verb[None]:
    """Decide the round, if it is complete: an entry that was made twice in the same words counts twice."""
    keys = tuple(f"{iteration}/{name}/{member}" for member in roster)
    if not (yield Exist(keys)):
        return
    values = yield ReadAll(keys)
    arrivals = {member: load_arrival(raw, key) for member, key, raw in zip(roster, keys, values, strict=True)}
    if name == "start":
        yield from _decide_start(iteration, arrivals)
    else:
        yield from _decide_end(iteration, arrivals)


def _decide_start(iteration: int, arrivals: dict[int, Arrival]) -> Verb[None]:
    start, reason, hopeless = decide_start(arrivals)
    if start.go:
        yield Claim(f"{iteration}/start", dump(start))
        return
    missing = next((member for member, arrival in arrivals.items() if arrival.kind is not Kind.RANK), min(arrivals))
    record = InterruptionRecord(missing, Interruption.TERMINATED, initial_rank=missing, message=reason)
    yield from interrupt(iteration, record, abort=reason if hopeless else "")


def _decide_end(iteration: int, arrivals: dict[int, Arrival]) -> Verb[None]:
    records = yield from _cause(iteration)
    noted = yield Add(f"{iteration}/record#", 0)
    count = len(records) + noted
    for number in range(1, min(noted, MAX_RECORDS) + 1):
        key = f"{iteration}/record/{number}"
        raw = yield Read(key)  # None: its writer died between counting and writing; its monitor wrote another
        records += [] if raw is None else [load_record(raw, key)]
    abort = yield Read(f"{iteration}/abort")
    decision = decide_end(arrivals, records, count, "" if abort is None else abort.decode(errors="replace"))
    if iteration > JOINING:  # a follower may still wait for it: who interrupted died after waking only some
        yield Claim(f"{iteration}/start", dump(Start(go=False)))
    yield Claim(f"{iteration}/next", dump(decision))


def _cause(iteration: int) -> Verb[list[InterruptionRecord]]:
    key = f"{iteration}/outcome"
    raw = yield Read(key)
    cause = None if raw is None else load_outcome(raw, key).cause
    return [] if cause is None else [cause]


# --- the outcome --------------------------------------------------------------------------------------------------


def interrupt(iteration: int, record: InterruptionRecord, abort: str = "") -> Verb[bool]:
    """Propose ``interrupted``. False: everybody had finished, so it does not count any more.

    The outcome carries the reason of whoever is first, in one operation, for which the others wait; the reasons of
    those that come later are noted beside it. ``abort``: everybody leaves the job, for this reason.
    """
    if abort:
        yield Claim(f"{iteration}/abort", abort)
    stands = yield from _propose(iteration, record)
    if stands:
        yield from _wake(iteration)
    return stands


def _propose(iteration: int, record: InterruptionRecord) -> Verb[bool]:
    """Whoever runs the function, or waits for the outcome, wakes up."""
    key, text = f"{iteration}/outcome", dump(Outcome(completed=False, cause=record))
    found = yield Claim(key, text)
    if load_outcome(found, key).completed:
        return False
    if found != text.encode():
        yield from _note(iteration, record)
    return True


def _wake(iteration: int) -> Verb[None]:
    """Whoever has not started yet wakes up."""
    yield Claim(f"{iteration}/rendezvous", "-")
    yield Claim(f"{iteration}/start", dump(Start(go=False)))


def _note(iteration: int, record: InterruptionRecord) -> Verb[None]:
    number = yield Add(f"{iteration}/record#", 1)
    if number <= MAX_RECORDS:
        yield Set(f"{iteration}/record/{number}", dump(record))


def finish(iteration: int, active_world_size: int, roster: Sequence[int]) -> Verb[None]:
    """The function returned on this member. The last active one proposes ``completed``."""
    count = yield Add(f"{iteration}/done#", 1)
    if count < active_world_size:
        return
    removed = yield from _gone_reserves(iteration, roster)
    yield Claim(f"{iteration}/outcome", dump(Outcome(completed=True, removed=removed)))


def _gone_reserves(iteration: int, roster: Sequence[int]) -> Verb[tuple[int, ...]]:
    if not (yield Add(f"{iteration}/end#", 0)):
        return ()
    removed = []
    for member in roster:
        if (yield Read(f"{iteration}/end/{member}")) is not None:
            removed.append(member)
    return tuple(removed)


# --- for a member that cannot speak for itself --------------------------------------------------------------------


def speak_for_dead(
    iteration: int, roster: Sequence[int], member: int, record: InterruptionRecord, by: str
) -> Verb[None]:
    """Account for a dead member in one iteration; it is interrupted only where that member was to call the function."""
    dead = Arrival(Kind.DEAD, by=by)
    if iteration == JOINING:
        yield from _note(iteration, record)
        yield from _arrive(iteration, "end", member, dead, roster)
        return
    interrupted = False
    if not (yield from _stands_aside(iteration, member)):
        interrupted = yield from _propose(iteration, record)
    # before it can wake up, should it live: it would arrive as alive, and interrupt the others in vain once more
    yield from _arrive(iteration, "end", member, dead, roster)
    if interrupted:
        yield from _wake(iteration)
    yield from _arrive(iteration, "start", member, dead, roster)


def _stands_aside(iteration: int, member: int) -> Verb[bool]:
    """Whether it is a reserve, or was discarded: its monitor goes with it, and is then missed by its neighbour."""
    key = f"{iteration}/start/{member}"
    raw = yield Read(key)
    if raw is None:
        return False
    arrival = load_arrival(raw, key)
    return arrival.kind in (Kind.RANK, Kind.DISCARDED) and arrival.active_rank is None


def recount(iteration: int, roster: Sequence[int]) -> Verb[None]:
    """Decide rounds in which all have arrived but whoever counted last died before it could decide."""
    for name, verdict in (("start", "start"), ("end", "next")):
        if name == "start" and iteration == JOINING:
            continue
        if not (yield Exist((f"{iteration}/{verdict}",))):
            yield from _decide(iteration, name, roster)


def missing(iteration: int, name: str, roster: Iterable[int]) -> Verb[list[int]]:
    """Members that have not arrived in a round (``start`` or ``end``), for error messages."""
    absent = []
    for member in roster:
        if (yield Read(f"{iteration}/{name}/{member}")) is None:
            absent.append(member)
    return absent


# --- around the rounds --------------------------------------------------------------------------------------------


def publish_rendezvous(iteration: int, address: str) -> Verb[str]:
    """Offer a store server for this iteration; answers the address that stands (the first one offered)."""
    return (yield Claim(f"{iteration}/rendezvous", address)).decode()  # type: ignore[no-any-return]


def beat(member: int) -> Verb[int]:
    """One heartbeat of a member's monitor."""
    return (yield Add(f"beat/{member}", 1))  # type: ignore[no-any-return]


def read_beat(member: int) -> Verb[int]:
    """The heartbeat counter of another member; the observer judges it by its own clock."""
    return (yield Add(f"beat/{member}", 0))  # type: ignore[no-any-return]


def gone(member: int, members: int) -> Verb[None]:
    """This member needs the store no more. ``members``: how many will say so in all."""
    if (yield Add(f"gone/{member}", 1)) > 1:
        return
    if (yield Add("gone#", 1)) >= members:
        yield Set("over", "1")


def await_over(timeout: float, everybody: Sequence[int] = ()) -> Verb[bool]:
    """Wait until no member needs the store any more. Only the store's host asks.

    ``everybody``: all members, to look again and again whether one said so and died before it was counted.
    """
    keys = tuple(f"gone/{member}" for member in everybody)
    for _ in range(max(1, math.ceil(timeout / RECOUNT))):
        if (yield Wait("over", min(timeout, RECOUNT))) is not None:
            return True
        if keys and (yield Exist(keys)):
            return True
    return False


def forget(iteration: int, book: Book) -> Verb[None]:
    """Delete what is KEEP iterations old.

    Three things stay: entries that declare somebody dead (they fence a late riser), and the two verdicts ``outcome``
    and ``next``. A monitor that was out of reach for longer than that walks along them; without them it would wait
    for ever.
    """
    old = iteration - KEEP
    if old < 0:
        return
    yield Delete(f"{old}/start/{book.member}")
    yield Delete(f"{old}/end/{book.member}")
    if book.member != book.roster[0]:
        return
    count = yield Add(f"{old}/record#", 0)
    for number in range(1, min(count, MAX_RECORDS) + 1):
        yield Delete(f"{old}/record/{number}")
    for name in ("start", "start#", "end#", "done#", "record#", "abort", "rendezvous"):
        yield Delete(f"{old}/{name}")
