"""The rounds in which members meet: to join a call, before the function starts, and after it was left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import Fenced, OptionError, RestartAbort, RestartError
from inprocess.protocol.keys import (
    JOINED_KEY,
    JOINING,
    ROSTER_KEY,
)
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import (
    MAX_RECORDS,
    Arrival,
    ArrivalKind,
    Decision,
    JoinMode,
    Outcome,
    Spot,
    Start,
    dump,
)
from inprocess.protocol.ops import Claim, Exist, Read, ReadAll, Verb, Wait
from inprocess.protocol.parsing import load_arrival, load_decision, load_reason, load_record
from inprocess.protocol.rounds import decide_end, decide_start, slot_of
from inprocess.protocol.verbs.outcome import first_record, interrupt, note_record, propose
from inprocess.protocol.verbs.shared import count_in, read_count, tells_everybody, wake
from inprocess.protocol.verbs.tickets import await_begun, is_founder, waiting

_NOBODY = "nobody was left to call the function"


# --- the rounds ---------------------------------------------------------------------------------------------------


def join(
    membership: Membership, by: str, entry: JoinMode = JoinMode.FOUND, *, in_doubt: bool = False, remedy: str = ""
) -> Verb[bool]:
    """Arrive in the end round of iteration -1. False: this process is no founder, see `joining`: the job has begun
    without it, or another process arrived with this rank, or was declared dead with it.

    Args:
        entry: what the launcher says of it. One that only founds (``FOUND``) takes part in no job that has begun.
        in_doubt: the job has no name, and nothing tells this process from those that are here. Then another one with
            its rank may as well be the stranger, and so may the others: nobody begins.
        remedy: for its error.

    Raises OptionError where another process has this rank, unless this one replaces it; and where the job has begun
    without this one, which only founds. RestartAbort where nobody begins.
    """
    key = f"{membership.iteration}/end/{membership.member}"
    if entry is JoinMode.GROW:
        return False
    if (begun := (yield Read(JOINED_KEY))) is not None:
        if why := load_decision(begun, JOINED_KEY).abort:
            raise RestartAbort(why)
        return _may_join(_is_by((yield Read(key)), key, (by,)), membership, entry, remedy)
    arrival = Arrival(
        ArrivalKind.ALIVE,
        rank=membership.rank,
        world_size=membership.world_size,
        by=by,
        ran=membership.streak.progressed,
    )
    found = yield from _arrive(membership.iteration, "end", membership.member, arrival, membership.roster)
    if found.kind is ArrivalKind.ALIVE and found.by != by and entry is not JoinMode.REPLACE:
        clash = (
            f"RANK={membership.member} is taken: process {found.by} joined this job with it, this is process {by}. "
            "Start every process with a rank of its own, and every job with a MASTER_PORT of its own."
        )
        if in_doubt:
            yield from refuse_founding(clash)
        raise OptionError(f"{clash} {remedy}".strip())
    return _may_join(found.kind is ArrivalKind.ALIVE and found.by == by, membership, entry, remedy)


def _may_join(founds: bool, membership: Membership, entry: JoinMode, remedy: str) -> bool:
    """What `join` returns."""
    if not founds and entry is JoinMode.FOUND:
        raise OptionError(f"a job runs here in which this process, RANK={membership.member}, has no part. {remedy}")
    return founds


def refuse_founding(why: str) -> Verb[None]:
    """Processes of two jobs meet: where none has begun, nobody knows whose the others are, so all of them leave."""
    yield Claim(JOINED_KEY, dump(Decision(abort=f"two jobs have met, so none begins: {why}")))


def _is_by(raw: bytes | None, key: str, names: Sequence[str]) -> bool:
    return raw is not None and load_arrival(raw, key).by in names


def await_founder(member: int, names: Sequence[str]) -> Verb[bool]:
    """Wait until somebody has arrived with this rank; whether it was the process that signs so, or its monitor."""
    key = f"{JOINING}/end/{member}"
    return _is_by((yield Wait(key)), key, names)


def refuse_stranger(membership: Membership) -> Verb[None]:
    """After the verdict on iteration -1.

    Raises RestartError for a process of a larger job that came just too early, Fenced for one that stood still while
    the job went through many iterations without it.
    """
    roster = yield from await_begun()
    if not is_founder(membership.member, roster):
        if roster.iteration > JOINING:
            raise Fenced(f"initial rank {membership.slot} stood still or was cut off; the others went on without it")
        raise RestartError(
            f"RANK={membership.member} of WORLD_SIZE={membership.world_size}: a smaller job began just now, without "
            "this rank. If it is of that job, it joins it when it is started with INPROCESS_GROW=1; otherwise give "
            "each job a MASTER_PORT of its own."
        )


def start_round(membership: Membership, arrival: Arrival) -> Verb[None]:
    """Say which rank this member took (or that it was discarded, or leaves). Raises Fenced."""
    _refuse_fenced(
        (yield from _arrive(membership.iteration, "start", membership.member, arrival, membership.roster)),
        membership.slot,
    )


def end_round(membership: Membership, arrival: Arrival) -> Verb[None]:
    """Say that this member goes on, or leaves. Raises Fenced."""
    _refuse_fenced(
        (yield from _arrive(membership.iteration, "end", membership.member, arrival, membership.roster)),
        membership.slot,
    )


def alive(
    membership: Membership,
    by: str = "",
    *,
    repeats: int = 0,
    limit: int | None = None,
    progressed: bool = False,
    spot: Spot | None = None,
    hangs: int = 0,
) -> Arrival:
    """The entry of a member that continues.

    ``repeats``: its error is the same for so many times in a row; ``limit``: its ``max_repeats``; ``spot``: where its
    main thread was, after a soft timeout; ``hangs``: it has hung there for so many times in a row.
    """
    spot = spot or Spot()
    return Arrival(
        ArrivalKind.ALIVE,
        membership.rank,
        membership.world_size,
        by=by,
        slot=membership.slot,
        fresh=membership.rank in membership.fresh,
        repeats=repeats,
        limit=limit if limit is not None and repeats >= limit else 0,
        progressed=progressed,
        ran=membership.streak.progressed,
        where=spot.where,
        waits=spot.waits,
        hangs=hangs,
    )


def _refuse_fenced(found: Arrival, slot: int) -> None:
    if found.kind is ArrivalKind.DEAD:
        raise Fenced(
            f"initial rank {slot} was declared dead by {found.by or 'its monitor'}: it was stopped or could not be "
            "reached for longer than heartbeat_timeout. The others went on without it, so it must not run again."
        )


@tells_everybody
def _arrive(iteration: int, name: str, member: int, arrival: Arrival, roster: Sequence[int]) -> Verb[Arrival]:
    """Enter a round once; the last to arrive decides it. Returns the entry that stands, perhaps somebody else's."""
    key = f"{iteration}/{name}/{member}"
    text = dump(arrival)
    found = yield Claim(key, text)
    if found != text.encode():
        return load_arrival(found, key)
    if (yield from count_in(f"{iteration}/{name}#", careful=iteration == JOINING)) >= len(roster):
        yield from _decide(iteration, name, roster)
    return arrival


def _decide(iteration: int, name: str, roster: Sequence[int]) -> Verb[None]:
    """Decide the round, if it is complete: an entry that was made twice in the same words counts twice."""
    keys = tuple(f"{iteration}/{name}/{member}" for member in roster)
    # both are there in most restarts, and all others wait: two operations less
    beside = (f"{iteration}/outcome", f"{iteration}/start") if name == "end" and iteration > JOINING else ()
    outcome = None
    if beside and (yield Exist(keys + beside)):
        *values, outcome, _ = yield ReadAll(keys + beside)
    elif (yield Exist(keys)):
        values = yield ReadAll(keys)
    else:
        return
    arrivals = {member: load_arrival(raw, key) for member, key, raw in zip(roster, keys, values, strict=True)}
    if name == "start":
        yield from _decide_start(iteration, arrivals)
    else:
        yield from _decide_end(iteration, arrivals, outcome)


def _decide_start(iteration: int, arrivals: dict[int, Arrival]) -> Verb[None]:
    start, reason, hopeless = decide_start(arrivals)
    if start.go:
        yield Claim(f"{iteration}/start", dump(start))
        return
    missing = next(
        (member for member, arrival in arrivals.items() if arrival.kind is not ArrivalKind.RANK), min(arrivals)
    )
    record = _terminated(missing, arrivals, reason)
    yield from interrupt(iteration, record, abort=reason if hopeless else "")


def _decide_end(iteration: int, arrivals: dict[int, Arrival], outcome: bytes | None) -> Verb[None]:
    """``outcome``: as it was read, where the verdict of the start round is there, too."""
    records = yield from first_record(iteration, outcome)
    noted = yield from read_count(f"{iteration}/record#")
    count = len(records) + noted
    for number in range(1, min(noted, MAX_RECORDS) + 1):
        key = f"{iteration}/record/{number}"
        raw = yield Read(key)  # None: its writer died between counting and writing; its monitor wrote another
        records += [] if raw is None else [load_record(raw, key)]
    abort = yield Read(f"{iteration}/abort")
    tickets = {} if iteration == JOINING else (yield from waiting(arrivals))
    decision = decide_end(arrivals, records, count, load_reason(abort), tickets)
    if iteration == JOINING:  # first: who comes later finds it
        yield Claim(ROSTER_KEY, dump(Membership(0, tuple(sorted(arrivals))).note(JOINING)))
    elif outcome is None:
        # a follower may still wait for it: who interrupted died after waking only some
        yield Claim(f"{iteration}/start", dump(Start(go=False)))
        if not records:  # all have gone quietly; whoever speaks for one of them waits for an outcome
            nobody = _terminated(min(arrivals), arrivals, _NOBODY)
            yield Claim(f"{iteration}/outcome", dump(Outcome(completed=False, cause=nobody)))
    yield Claim(f"{iteration}/next", dump(decision))


def _terminated(member: int, arrivals: Mapping[int, Arrival], why: str) -> InterruptionRecord:
    slot = slot_of(member, arrivals[member])
    return InterruptionRecord(slot, Interruption.TERMINATED, initial_rank=slot, message=why)


# --- for a member that cannot speak for itself --------------------------------------------------------------------


@tells_everybody
def act_on_behalf_of_dead(
    iteration: int, roster: Sequence[int], member: int, record: InterruptionRecord, by: str
) -> Verb[None]:
    """Account for a dead member in one iteration; it is interrupted only where that member was to call the function."""
    dead = Arrival(ArrivalKind.DEAD, by=by, slot=record.initial_rank)
    if iteration == JOINING:
        yield from note_record(iteration, record)
        yield from _arrive(iteration, "end", member, dead, roster)
        return
    interrupted = False
    if not (yield from _stands_aside(iteration, member)):
        interrupted = yield from propose(iteration, record)
    # before it can wake up, should it live: it would arrive as alive, and interrupt the others in vain once more
    yield from _arrive(iteration, "end", member, dead, roster)
    if interrupted:
        yield from wake(iteration)
    yield from _arrive(iteration, "start", member, dead, roster)


def _stands_aside(iteration: int, member: int) -> Verb[bool]:
    """Whether it is a reserve, or was discarded: its monitor goes with it, and is then missed by its neighbour."""
    key = f"{iteration}/start/{member}"
    raw = yield Read(key)
    if raw is None:
        return False
    arrival = load_arrival(raw, key)
    return arrival.kind in (ArrivalKind.RANK, ArrivalKind.DISCARDED) and arrival.active_rank is None


@tells_everybody
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


def arrived(iteration: int, name: str) -> Verb[int]:
    """How many members have arrived in a round, for progress lines."""
    return read_count(f"{iteration}/{name}#")


# --- joining a job that runs --------------------------------------------------------------------------------------


def arrive_dead(membership: Membership, me: str, by: str) -> Verb[bool]:
    """Arrive in the end round of iteration -1 for a process that died early. False: its rank is another one's."""
    found = yield from _arrive(JOINING, "end", membership.member, Arrival(ArrivalKind.DEAD, by=by), membership.roster)
    return found.by in (me, by)
