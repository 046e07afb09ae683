"""How an iteration ends: interrupted, or completed because all its ranks have finished."""

from __future__ import annotations

from collections.abc import Sequence

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import BadMessage
from inprocess.protocol.messages import MAX_RECORDS, Outcome, dump
from inprocess.protocol.ops import Claim, Read, Set, Verb
from inprocess.protocol.parsing import load_outcome, load_reason
from inprocess.protocol.verbs.shared import count_in, read_count, tells_everybody, wake

__all__ = ["finish", "first_record", "foretell", "interrupt", "note_record", "propose"]


def first_record(iteration: int, raw: bytes | None = None) -> Verb[list[InterruptionRecord]]:
    """That of the outcome; ``raw``: where that has been read."""
    key = f"{iteration}/outcome"
    if raw is None:
        raw = yield Read(key)
    cause = None if raw is None else load_outcome(raw, key).cause
    return [] if cause is None else [cause]


@tells_everybody
def interrupt(iteration: int, record: InterruptionRecord, abort: str = "") -> Verb[bool]:
    """Propose ``interrupted``. False: everybody had finished, so it does not count any more.

    The outcome carries the reason of whoever is first, in one operation, for which the others wait; the reasons of
    those that come later are noted beside it, where they are faults. ``abort``: everybody leaves the job, for this
    reason.
    """
    if abort:
        yield Claim(f"{iteration}/abort", load_reason(abort.encode(errors="replace")))
    stands = yield from propose(iteration, record)
    if stands:
        yield from wake(iteration)
    return stands


@tells_everybody
def foretell(iteration: int, record: InterruptionRecord) -> Verb[None]:
    """Interrupt an iteration, as a member of it is dying. Whoever speaks for that notes its record, where need be."""
    if (yield from propose(iteration, record, noted=False)):
        yield from wake(iteration)


def propose(iteration: int, record: InterruptionRecord, noted: bool = True) -> Verb[bool]:
    """Whoever runs the function, or waits for the outcome, wakes up. ``noted``: the record, where another is first."""
    key, text = f"{iteration}/outcome", dump(Outcome(completed=False, cause=record))
    found = yield Claim(key, text)
    outcome = load_outcome(found, key)
    if outcome.completed:
        return False
    # it may be known already, with another moment: of an error whose clean-up waits for the others
    if noted and outcome.cause != record and record.interruption is not Interruption.JOINED:
        yield from note_record(iteration, record)
    return True


def note_record(iteration: int, record: InterruptionRecord) -> Verb[None]:
    number = yield from count_in(f"{iteration}/record#", careful=True)
    if number <= MAX_RECORDS:
        yield Set(f"{iteration}/record/{number}", dump(record))


@tells_everybody
def finish(iteration: int, active_world_size: int, roster: Sequence[int]) -> Verb[None]:
    """The function returned on this member. The last active one proposes ``completed``."""
    key = f"{iteration}/done#"
    count = yield from count_in(key, careful=True)
    if count < active_world_size:
        return
    if count > active_world_size:
        raise BadMessage(f"store key {key!r}: counts {count} functions that returned, of {active_world_size}")
    removed = yield from _gone_reserves(iteration, roster)
    yield Claim(f"{iteration}/outcome", dump(Outcome(completed=True, removed=removed)))


def _gone_reserves(iteration: int, roster: Sequence[int]) -> Verb[tuple[int, ...]]:
    if not (yield from read_count(f"{iteration}/end#")):
        return ()
    removed = []
    for member in roster:
        if (yield Read(f"{iteration}/end/{member}")) is not None:
            removed.append(member)
    return tuple(removed)
