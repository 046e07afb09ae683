"""The verbs of the protocol as generators of store operations. The only file that knows the store's keys.

A verb may be cut off between any two operations (the process dies). Two rules make that safe: an entry that others
count is written before it is counted, and whoever speaks for a dead member recounts until there is a verdict.

A third is for values that none of us wrote. A verdict is read by everybody, so everybody ends. Whoever finds anything
else broken is the only one to know it: it says so to the others, who would wait for it in vain (`_tells_everybody`).

Keys, below the prefix of the call; ``i`` is the iteration, -1 is the join::

    i/start/<member>   entry in the start round          i/start       verdict: go or no
    i/end/<member>     entry in the end round            i/next        verdict: the next roster, as a difference
    i/start#, i/end#   how many entries                  i/outcome     completed | interrupted; the first wins
    i/done#            functions that returned           i/rendezvous  host:port of the iteration's own store server
    i/record/<n>       why it was interrupted            i/record#     how many records
    i/abort            why everybody must leave          beat/<member> heartbeat counter
    i/wanted           it waits for somebody to join
    gone/<member>      has no further need of the store  gone#, over   all have none: its host may go
    ticket/<n>         a process that wants to join      ticket#       how many tickets
    standby/<member>   host:port of the arbiter in a member's monitor, see ``protocol.arbitration``
    roster             who is in the job, eight iterations ago or less
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import BadMessage, Fenced, OptionError, RestartAbort, RestartError
from inprocess.protocol.book import Book
from inprocess.protocol.messages import (
    FIRST_JOINER,
    MAX_RECORDS,
    Arrival,
    Decision,
    Entry,
    Kind,
    Outcome,
    Roster,
    Spot,
    Start,
    Ticket,
    dump,
    load_address,
    load_arrival,
    load_count,
    load_decision,
    load_outcome,
    load_reason,
    load_record,
    load_roster,
    load_start,
    load_ticket,
)
from inprocess.protocol.ops import Add, Claim, Delete, Exist, Pause, Read, ReadAll, Set, Verb, Wait
from inprocess.protocol.rounds import decide_end, decide_start, place_of

P = ParamSpec("P")
T = TypeVar("T")
JOINING = -1
#: exists from the moment everybody has joined
JOINED_KEY = f"{JOINING}/next"
#: whoever speaks for a dead member looks this often whether a round is complete, and a monitor that waits for the end
#: round sees once to it that everybody is awake (seconds)
RECOUNT = 1.0
_NOBODY = "nobody was left to call the function"
#: how many iterations are kept: their entries and counters, and their verdicts, for which somebody may wait
KEEP, KEEP_VERDICTS = 4, 16
#: who is in the job, in the words of the last iteration that noted it; verdicts from there on are not deleted
ROSTER_KEY = "roster"
#: how many processes took a ticket; nobody starts so many in one call
TICKETS_KEY, MAX_TICKETS = "ticket#", 1 << 16

#: of a process that does not wait any more
CLOSED = Ticket(0, 1, closed=True)


class Behind(Exception):
    """The verdict that a monitor or a joiner waits for is deleted: it stood still, or was cut off, for many
    iterations. It goes on from ``roster``, where its rank may be or not.

    Not for members: in every end round the others wait for each training process, so one that is so late has gone.
    """

    def __init__(self, iteration: int, roster: Roster) -> None:
        super().__init__(
            f"this process stood still or was cut off in iteration {iteration}; the others are in {roster.iteration}"
        )
        self.roster = roster


# --- what a follower waits for, in this order --------------------------------------------------------------------


def await_next(iteration: int, recounting: Sequence[int] | None = None, book: Book | None = None) -> Verb[Decision]:
    """Wait for the verdict of the end round. ``recounting``: see `_await`; ``book``: whose members it may name."""
    key = f"{iteration}/next"
    return _known(load_decision((yield from _await(key, iteration, recounting)), key), key, book)


def _known(decision: Decision, key: str, book: Book | None) -> Decision:
    if book is not None and (strangers := book.strangers(decision)):
        raise BadMessage(f"store key {key!r}: names {strangers}, which this job does not have")
    return decision


def await_next_awake(iteration: int, book: Book | None = None) -> Verb[Decision]:
    """As `await_next`, for a monitor that has seen the iteration interrupted, or is joining.

    Whoever interrupted it may have died before it had woken everybody up, so that is done once more after a second.
    """
    key = f"{iteration}/next"
    found = yield Wait(key, None if iteration == JOINING else RECOUNT)
    if found is None:
        yield from refuse_behind(iteration)
        yield from _wake(iteration)
        found = yield Wait(key)
    return _known(load_decision(found, key), key, book)


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


def refuse_behind(iteration: int) -> Verb[None]:
    """For a monitor, or before joining, before it waits for a verdict: whether that is or will soon be deleted. Raises
    Behind.

    Once before, and not now and then: torch prints two warnings for each wait that does not last for ever. So it goes
    on from the roster long before the verdict is deleted, which it may be between this look and the wait.
    """
    roster = yield from _roster_beyond(iteration)
    if roster is not None:
        raise Behind(iteration, roster)


def _roster_beyond(iteration: int) -> Verb[Roster | None]:
    """The roster, where the verdicts of this iteration are deleted, or are the next to be."""
    found = yield Read(ROSTER_KEY)
    roster = None if found is None else load_roster(found, ROSTER_KEY)
    return None if roster is None or roster.iteration < iteration + KEEP_VERDICTS // 2 else roster


# --- values that none of us wrote ---------------------------------------------------------------------------------


def _tells_everybody(verb: Callable[Concatenate[int, P], Verb[T]]) -> Callable[Concatenate[int, P], Verb[T]]:
    """For verbs that read what others do not read: a broken value there ends the iteration and the job for all."""

    @functools.wraps(verb)
    def telling(iteration: int, /, *args: P.args, **kwargs: P.kwargs) -> Verb[T]:
        try:
            return (yield from verb(iteration, *args, **kwargs))
        except BadMessage as error:
            yield from give_up(iteration, str(error))
            raise

    return telling


def give_up(iteration: int, reason: str) -> Verb[None]:
    """Everybody leaves. The end round, which may never be complete now, is decided as well.

    The job may be further on by now than whoever says so.
    """
    verdict = dump(Decision(abort=reason)).encode()
    record = InterruptionRecord(0, Interruption.BASE_EXCEPTION, message=reason)
    while True:
        if iteration > JOINING:
            yield Claim(f"{iteration}/outcome", dump(Outcome(completed=False, cause=record)))
            yield from _wake(iteration)
        found = yield Claim(f"{iteration}/next", verdict.decode())
        if found == verdict or _is_the_end(found):
            roster = yield from _roster_beyond(iteration)
            if roster is None:
                return
            iteration = roster.iteration  # nobody reads the old one any more
        else:
            iteration += 1


def _is_the_end(verdict: bytes) -> bool:
    """Whether nobody goes on from an end round: they are told to leave, or cannot read what they are told."""
    try:
        return bool(load_decision(verdict, "next").abort)
    except BadMessage:
        return True


# --- the rounds ---------------------------------------------------------------------------------------------------


def join(book: Book, by: str, entry: Entry = Entry.FOUND) -> Verb[bool]:
    """Arrive in the end round of iteration -1. False: this process is no founder, see ``joiner``: the job has begun
    without it, or another process arrived with this rank, or was declared dead with it.

    ``entry``: what the launcher says of it. Two processes that arrive with one rank are an OptionError, unless the
    second replaces the first.
    """
    key = f"{book.iteration}/end/{book.member}"
    if entry is Entry.GROW:
        return False
    if (yield Read(JOINED_KEY)) is not None:
        return _is_by((yield Read(key)), key, (by,))
    arrival = Arrival(Kind.ALIVE, rank=book.rank, world_size=book.world_size, by=by, ran=book.row.progressed)
    found = yield from _arrive(book.iteration, "end", book.member, arrival, book.roster)
    if found.kind is Kind.ALIVE and found.by != by and entry is not Entry.REPLACE:
        raise OptionError(
            f"RANK={book.member} is taken: process {found.by} joined this job with it, this is process {by}. "
            "Start every process with a rank of its own, and every job with a MASTER_PORT of its own."
        )
    return found.kind is Kind.ALIVE and found.by == by


def _is_by(raw: bytes | None, key: str, names: Sequence[str]) -> bool:
    return raw is not None and load_arrival(raw, key).by in names


def await_founder(member: int, names: Sequence[str]) -> Verb[bool]:
    """Wait until somebody has arrived with this rank; whether it was the process that signs so, or its monitor."""
    key = f"{JOINING}/end/{member}"
    return _is_by((yield Wait(key)), key, names)


def is_founder(member: int, roster: Roster) -> bool:
    """Whether a job that has just begun counts this member."""
    return any(first <= member <= last for first, last in roster.members)


def refuse_stranger(book: Book) -> Verb[None]:
    """After the verdict on iteration -1.

    Raises RestartError for a process of a larger job that came just too early, Fenced for one that stood still while
    the job went through many iterations without it.
    """
    roster = yield from await_begun()
    if not is_founder(book.member, roster):
        if roster.iteration > JOINING:
            raise Fenced(f"initial rank {book.place} stood still or was cut off; the others went on without it")
        raise RestartError(
            f"RANK={book.member} of WORLD_SIZE={book.world_size}: a smaller job began just now, without this rank. "
            "Started once more, this process joins it."
        )


def start_round(book: Book, arrival: Arrival) -> Verb[None]:
    """Say which rank this member took (or that it was discarded, or leaves). Raises Fenced."""
    _refuse_fenced((yield from _arrive(book.iteration, "start", book.member, arrival, book.roster)), book.place)


def end_round(book: Book, arrival: Arrival) -> Verb[None]:
    """Say that this member goes on, or leaves. Raises Fenced."""
    _refuse_fenced((yield from _arrive(book.iteration, "end", book.member, arrival, book.roster)), book.place)


def alive(
    book: Book,
    by: str = "",
    *,
    repeats: int = 0,
    limit: int | None = None,
    progressed: bool = False,
    spot: Spot | None = None,
) -> Arrival:
    """The entry of a member that continues.

    ``repeats``: its error is the same for so many times in a row; ``limit``: its ``max_repeats``; ``spot``: where its
    main thread was, after a soft timeout.
    """
    spot = spot or Spot()
    return Arrival(
        Kind.ALIVE,
        book.rank,
        book.world_size,
        by=by,
        place=book.place,
        fresh=book.rank in book.fresh,
        repeats=repeats,
        limit=limit if limit is not None and repeats >= limit else 0,
        progressed=progressed,
        ran=book.row.progressed,
        where=spot.where,
        waits=spot.waits,
    )


def _refuse_fenced(found: Arrival, place: int) -> None:
    if found.kind is Kind.DEAD:
        raise Fenced(
            f"initial rank {place} was declared dead by {found.by or 'its monitor'}: it was stopped or could not be "
            "reached for longer than heartbeat_timeout. The others went on without it, so it must not run again."
        )


@_tells_everybody
def _arrive(iteration: int, name: str, member: int, arrival: Arrival, roster: Sequence[int]) -> Verb[Arrival]:
    """Enter a round once; the last to arrive decides it. Answers the entry that stands, perhaps somebody else's."""
    key = f"{iteration}/{name}/{member}"
    text = dump(arrival)
    found = yield Claim(key, text)
    if found != text.encode():
        return load_arrival(found, key)
    if (yield from _count(f"{iteration}/{name}#", careful=iteration == JOINING)) >= len(roster):
        yield from _decide(iteration, name, roster)
    return arrival


def _count(key: str, careful: bool = False) -> Verb[int]:
    """Count one up; the new value. ``careful``: look first, where a moment more does not matter."""
    if careful:  # a server closes the connection on which something else than a number is to be added to
        yield from _read_count(key)
    number = load_count((yield Add(key, 1)), key)
    if not number:
        raise BadMessage(f"store key {key!r}: was set to less than nothing. This library did not write it.")
    return number


def _read_count(key: str) -> Verb[int]:
    """What a counter holds; as text, for the same reason."""
    return load_count((yield Read(key)), key)


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
    record = _terminated(missing, arrivals, reason)
    yield from interrupt(iteration, record, abort=reason if hopeless else "")


def _decide_end(iteration: int, arrivals: dict[int, Arrival]) -> Verb[None]:
    records = yield from _cause(iteration)
    noted = yield from _read_count(f"{iteration}/record#")
    count = len(records) + noted
    for number in range(1, min(noted, MAX_RECORDS) + 1):
        key = f"{iteration}/record/{number}"
        raw = yield Read(key)  # None: its writer died between counting and writing; its monitor wrote another
        records += [] if raw is None else [load_record(raw, key)]
    abort = yield Read(f"{iteration}/abort")
    tickets = {} if iteration == JOINING else (yield from waiting(arrivals))
    decision = decide_end(arrivals, records, count, load_reason(abort), tickets)
    if iteration == JOINING:  # first: who comes later finds it
        yield Claim(ROSTER_KEY, dump(Book(0, tuple(sorted(arrivals))).note(JOINING)))
    else:  # a follower may still wait for it: who interrupted died after waking only some
        yield Claim(f"{iteration}/start", dump(Start(go=False)))
        if not records:  # all have gone quietly; whoever speaks for one of them waits for an outcome
            nobody = _terminated(min(arrivals), arrivals, _NOBODY)
            yield Claim(f"{iteration}/outcome", dump(Outcome(completed=False, cause=nobody)))
    yield Claim(f"{iteration}/next", dump(decision))


def _terminated(member: int, arrivals: Mapping[int, Arrival], why: str) -> InterruptionRecord:
    place = place_of(member, arrivals[member])
    return InterruptionRecord(place, Interruption.TERMINATED, initial_rank=place, message=why)


def waiting(members: Iterable[int]) -> Verb[dict[int, Ticket]]:
    """The tickets of processes that wait to join. One that cannot be read is that of another version: it waits on."""
    count = yield from _read_count(TICKETS_KEY)
    if count > MAX_TICKETS:
        raise BadMessage(f"store key {TICKETS_KEY!r}: counts {count} processes that joined, more than {MAX_TICKETS}")
    numbers = range(1, 1 + count)
    keys = tuple(f"ticket/{number}" for number in numbers)
    if not keys:
        return {}
    yield from _close_absent(keys)
    found = yield ReadAll(keys)
    tickets = {FIRST_JOINER + n: _ticket(raw, key) for n, raw, key in zip(numbers, found, keys, strict=True)}
    here = set(members)
    return {member: ticket for member, ticket in tickets.items() if not ticket.closed and member not in here}


def _read_each(keys: tuple[str, ...]) -> Verb[list[bytes | None]]:
    """What the keys hold, in one operation where all exist."""
    if (yield Exist(keys)):
        return (yield ReadAll(keys))  # type: ignore[no-any-return]
    found = []
    for key in keys:
        found.append((yield Read(key)))
    return found


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


def _cause(iteration: int) -> Verb[list[InterruptionRecord]]:
    key = f"{iteration}/outcome"
    raw = yield Read(key)
    cause = None if raw is None else load_outcome(raw, key).cause
    return [] if cause is None else [cause]


# --- the outcome --------------------------------------------------------------------------------------------------


@_tells_everybody
def interrupt(iteration: int, record: InterruptionRecord, abort: str = "") -> Verb[bool]:
    """Propose ``interrupted``. False: everybody had finished, so it does not count any more.

    The outcome carries the reason of whoever is first, in one operation, for which the others wait; the reasons of
    those that come later are noted beside it, where they are faults. ``abort``: everybody leaves the job, for this
    reason.
    """
    if abort:
        yield Claim(f"{iteration}/abort", load_reason(abort.encode(errors="replace")))
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
    if found != text.encode() and record.interruption is not Interruption.JOINED:
        yield from _note(iteration, record)
    return True


def _wake(iteration: int) -> Verb[None]:
    """Whoever has not started yet wakes up."""
    yield Claim(f"{iteration}/rendezvous", "-")
    yield Claim(f"{iteration}/start", dump(Start(go=False)))


def _note(iteration: int, record: InterruptionRecord) -> Verb[None]:
    number = yield from _count(f"{iteration}/record#", careful=True)
    if number <= MAX_RECORDS:
        yield Set(f"{iteration}/record/{number}", dump(record))


@_tells_everybody
def finish(iteration: int, active_world_size: int, roster: Sequence[int]) -> Verb[None]:
    """The function returned on this member. The last active one proposes ``completed``."""
    key = f"{iteration}/done#"
    count = yield from _count(key, careful=True)
    if count < active_world_size:
        return
    if count > active_world_size:
        raise BadMessage(f"store key {key!r}: counts {count} functions that returned, of {active_world_size}")
    removed = yield from _gone_reserves(iteration, roster)
    yield Claim(f"{iteration}/outcome", dump(Outcome(completed=True, removed=removed)))


def _gone_reserves(iteration: int, roster: Sequence[int]) -> Verb[tuple[int, ...]]:
    if not (yield from _read_count(f"{iteration}/end#")):
        return ()
    removed = []
    for member in roster:
        if (yield Read(f"{iteration}/end/{member}")) is not None:
            removed.append(member)
    return tuple(removed)


# --- for a member that cannot speak for itself --------------------------------------------------------------------


@_tells_everybody
def speak_for_dead(
    iteration: int, roster: Sequence[int], member: int, record: InterruptionRecord, by: str
) -> Verb[None]:
    """Account for a dead member in one iteration; it is interrupted only where that member was to call the function."""
    dead = Arrival(Kind.DEAD, by=by, place=record.initial_rank)
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


@_tells_everybody
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
    key = f"{iteration}/rendezvous"
    return load_address((yield Claim(key, address)), key)


def beat(member: int) -> Verb[int]:
    """One heartbeat of a member's monitor."""
    return (yield from _count(f"beat/{member}"))


def read_beat(member: int) -> Verb[int]:
    """The heartbeat counter of another member; the observer judges it by its own clock."""
    return (yield from _read_count(f"beat/{member}"))


def read_beats(members: Sequence[int]) -> Verb[list[int]]:
    """The heartbeat counters of all these members; 0 for one that has sent none."""
    keys = tuple(f"beat/{member}" for member in members)
    found = yield from _read_each(keys)
    return [load_count(raw, key) for raw, key in zip(found, keys, strict=True)]


def publish_standby(member: int, address: str) -> Verb[None]:
    """Say where the arbiter of this member is; before its first heartbeat, if it is one from the beginning."""
    yield Set(f"standby/{member}", address)


def find_standby(member: int) -> Verb[str]:
    """The address of a member's arbiter; empty where there is none yet."""
    raw = yield Read(key := f"standby/{member}")
    return "" if raw is None else load_address(raw, key)


def gone(member: int, members: int) -> Verb[None]:
    """This member needs the store no more. ``members``: how many will say so in all."""
    if (yield from _count(f"gone/{member}", careful=True)) > 1:
        return
    if (yield from _count("gone#", careful=True)) >= members:
        yield Set("over", "1")


def await_over(timeout: float, everybody: Iterable[int] = ()) -> Verb[bool]:
    """Wait until no member needs the store any more.

    ``everybody``: the members that the store's host knows of. It looks itself: who counted last may not have known of
    those that joined late, or may have died before it could say so.
    """
    keys = tuple(f"gone/{member}" for member in everybody)
    for _ in range(max(1, math.ceil(timeout / RECOUNT))):
        said = yield Wait("over", min(timeout, RECOUNT))
        if (yield Exist(keys)) if keys else said is not None:
            return True
        if said is not None:
            yield Pause(min(timeout, RECOUNT))
    return False


@_tells_everybody
def forget(iteration: int, book: Book) -> Verb[None]:
    """Delete what is KEEP iterations old, and the verdicts ``outcome`` and ``next`` of KEEP_VERDICTS iterations ago.

    Entries that declare somebody dead stay: they fence a late riser. A monitor that was out of reach walks along the
    verdicts; where they are gone, the roster tells where to go on.
    """
    old = iteration - KEEP
    if old < 0:
        return
    yield Delete(f"{old}/start/{book.member}")
    yield Delete(f"{old}/end/{book.member}")
    if book.member != book.roster[0]:
        return
    count = yield from _read_count(f"{old}/record#")
    for number in range(1, min(count, MAX_RECORDS) + 1):
        yield Delete(f"{old}/record/{number}")
    for name in ("start", "start#", "end#", "done#", "record#", "abort", "rendezvous", "wanted"):
        yield Delete(f"{old}/{name}")
    if iteration >= KEEP_VERDICTS // 2:
        yield from _note_roster(iteration, book)  # first: who misses a verdict finds it
    if iteration >= KEEP_VERDICTS:
        for name in ("outcome", "next"):
            yield Delete(f"{iteration - KEEP_VERDICTS}/{name}")


def _note_roster(iteration: int, book: Book) -> Verb[None]:
    """Never back to an older one: whoever writes may have stood still meanwhile."""
    found = yield Read(ROSTER_KEY)
    if found is not None and load_roster(found, ROSTER_KEY).iteration >= iteration:
        return
    yield Claim(ROSTER_KEY, dump(book.note(iteration)), instead="" if found is None else found.decode())


# --- joining a job that runs --------------------------------------------------------------------------------------


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
    number = yield from _count(TICKETS_KEY, careful=True)
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


def arrive_dead(book: Book, me: str, by: str) -> Verb[bool]:
    """Arrive in the end round of iteration -1 for a process that died early. False: its rank is another one's."""
    found = yield from _arrive(JOINING, "end", book.member, Arrival(Kind.DEAD, by=by), book.roster)
    return found.by in (me, by)


def find_ticket(by: str) -> Verb[int | None]:
    """The id of the process that signs so, if it has a ticket and still waits."""
    found = yield from waiting(())
    return next((member for member, ticket in found.items() if ticket.by == by), None)
