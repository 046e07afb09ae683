"""Reading messages: whatever a store holds, each function returns a message that is whole, or raises BadMessage."""

from __future__ import annotations

import dataclasses
import enum
import string
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NoReturn, TypeAlias, TypeVar

from inprocess.attribution import InterruptionRecord, one_line
from inprocess.exception import BadMessage
from inprocess.protocol.messages import (
    FIRST_JOINER,
    MAX_COUNT,
    MAX_PAUSE_MS,
    MAX_RANKS,
    MAX_RECORDS,
    MAX_STUCK,
    REASON_LIMIT,
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
from inprocess.system import strict_json
from inprocess.system.listening import is_port

__all__ = [
    "load_address",
    "load_arrival",
    "load_count",
    "load_decision",
    "load_outcome",
    "load_reason",
    "load_record",
    "load_roster",
    "load_start",
    "load_ticket",
    "load_verdict",
    "load_vote",
]

E = TypeVar("E", bound=enum.Enum)
M = TypeVar("M")
#: of a field: its value, its name, the key of the message; what it stands for, or BadMessage
Check: TypeAlias = Callable[[Any, str, str], Any]
#: longest address of a store server (characters), and what a host in it is made of
ADDRESS_LIMIT = 300
ADDRESS_CHARACTERS = frozenset(string.ascii_letters + string.digits + ".-_:%@")
#: how much of a broken value an error shows (characters)
SHOWN = 80


def load_arrival(raw: bytes | str, key: str) -> Arrival:
    """Parse one arrival; ``key`` is for the error message. Raises BadMessage."""
    arrival = _load(Arrival, raw, key)
    if not _has_a_slot(arrival):
        _refuse(key, "ranks and sizes do not fit each other", raw)
    if arrival.limit > arrival.repeats:
        _refuse(key, "'repeats' and 'limit' do not fit each other", raw)
    if arrival.kind is not ArrivalKind.ALIVE and (arrival.where or arrival.waits):
        _refuse(key, f"'where' and 'waits' do not fit the kind {arrival.kind.value!r}", raw)
    if arrival.hangs and not arrival.where:
        _refuse(key, "'hangs' and 'where' do not fit each other", raw)
    return arrival


def _has_a_slot(arrival: Arrival) -> bool:
    """Whether the entry says all that its kind says, with ranks below the sizes they count in."""
    if arrival.rank is None or arrival.world_size is None:
        return arrival.kind not in (ArrivalKind.RANK, ArrivalKind.ALIVE) and arrival.rank is arrival.world_size
    active = arrival.active_world_size  # of nobody: the round's own verdict says what is wrong with that
    if arrival.kind is ArrivalKind.RANK and (active is None or active > arrival.world_size):
        return False
    return arrival.rank < arrival.world_size and (arrival.active_rank or 0) < (active or 1)


def load_start(raw: bytes | str, key: str) -> Start:
    start = _load(Start, raw, key)
    if start.active_world_size and not start.go:
        _refuse(key, "'go' and 'active_world_size' do not fit each other", raw)
    return start


def load_outcome(raw: bytes | str, key: str) -> Outcome:
    outcome = _load(Outcome, raw, key)
    if outcome.completed is not (outcome.cause is None) or (outcome.removed and not outcome.completed):
        _refuse(key, "'completed', 'cause' and 'removed' do not fit each other", raw)
    return outcome


def load_decision(raw: bytes | str, key: str) -> Decision:
    decision = _load(Decision, raw, key)
    if decision.pause > MAX_PAUSE_MS:
        _refuse(key, f"field 'pause' is longer than {MAX_PAUSE_MS} ms", decision.pause)
    if decision.stuck_count < len(decision.stuck):
        _refuse(key, "'stuck_count' is less than the number of 'stuck'", decision.stuck_count)
    if decision.record_count < len(decision.records):
        _refuse(key, "'record_count' is less than the number of 'records'", decision.record_count)
    if not _fits(decision):
        _refuse(key, "'joined', 'slots', 'terminated' and 'fresh' do not fit each other", raw)
    return decision


def _fits(decision: Decision) -> bool:
    """Whether those who join have a slot each, and are no founders."""
    taken = [slot for _, slot in decision.joined]
    named = {*taken, *decision.terminated, *decision.fresh}
    if not decision.joined or decision.abort:
        return not decision.joined and not decision.slots
    if any(member < FIRST_JOINER for member, _ in decision.joined) or max(named) >= decision.slots:
        return False
    return len(set(taken)) == len(taken) and set(taken) <= set(decision.fresh).difference(decision.terminated)


def load_roster(raw: bytes | str, key: str) -> Roster:
    return _load(Roster, raw, key)


def load_vote(raw: bytes | str, key: str) -> Vote:
    return _load(Vote, raw, key)


def load_verdict(raw: bytes | str, key: str) -> Verdict:
    verdict = _load(Verdict, raw, key)
    goes_on = verdict.outcome is FailoverOutcome.GO
    if verdict.port >= 1 << 16 or goes_on is not (bool(verdict.port) and bool(verdict.slots)):
        _refuse(key, "'outcome', 'slots' and 'port' do not fit each other", raw)
    return verdict


def load_ticket(raw: bytes | str, key: str) -> Ticket:
    ticket = _load(Ticket, raw, key)
    if not ticket.slot < ticket.world_size <= FIRST_JOINER:
        _refuse(key, f"'slot' and 'world_size' are not two numbers, ascending, of at most {FIRST_JOINER}", raw)
    return ticket


def load_record(raw: bytes | str, key: str) -> InterruptionRecord:
    return _record(_object(raw, key), "", key)


def load_count(raw: bytes | int | None, key: str) -> int:
    """A counter, as the store holds it (None: absent) or answers it."""
    if raw is None:
        return 0
    digits = str(raw) if isinstance(raw, int) else bytes(raw[:SHOWN]).decode("ascii", errors="replace")
    if not digits.isascii() or not digits.isdigit() or len(digits) > len(str(MAX_COUNT)) or int(digits) > MAX_COUNT:
        _refuse(key, f"not a count in 0..{MAX_COUNT}", raw)
    return int(digits)


def load_address(raw: bytes, key: str) -> str:
    """``host:port`` of an iteration's store server (``@``: the base store's host), or ``-``: there will be none."""
    text = bytes(raw[: ADDRESS_LIMIT + 1]).decode("ascii", errors="replace")
    host, _, port = text.rpartition(":")
    if text == "-" or (len(text) <= ADDRESS_LIMIT and host and set(host) <= ADDRESS_CHARACTERS and is_port(port)):
        return text
    _refuse(key, "neither host:port nor '-'", raw)


def load_door(raw: bytes, key: str) -> tuple[str, str, int]:
    """What a server wants to hear, its host (``@``: the base store's) and its port: ``secret@host:port``."""
    secret, at, address = load_address(raw, key).partition("@")
    host, _, port = address.rpartition(":")
    if not (secret and at and host):
        _refuse(key, "not secret@host:port", raw)
    return secret, host, int(port)


def load_reason(raw: bytes | None) -> str:
    """Why everybody must leave: any text; not empty where the key exists."""
    text = b"" if raw is None else bytes(raw[: 4 * REASON_LIMIT])
    return one_line(text.decode(errors="replace"), REASON_LIMIT) or ("" if raw is None else "(no reason given)")


def _refuse(key: str, why: str, value: object) -> NoReturn:
    shown = value[:SHOWN] if isinstance(value, str | bytes) else value
    raise BadMessage(
        f"store key {key!r}: {why}: {one_line(repr(shown), SHOWN)}. This library did not write it: another program, or "
        "another version of the library, uses the same store."
    )


# --- the fields of a message --------------------------------------------------------------------------------------


def _object(raw: bytes | str, key: str) -> dict[str, Any]:
    try:
        data = strict_json.parse(raw)
    except ValueError as error:
        _refuse(key, f"does not hold JSON of ours ({one_line(str(error), SHOWN)})", raw)
    if not isinstance(data, dict):
        _refuse(key, "does not hold a JSON object", raw)
    return data


def _load(kind: type[M], raw: bytes | str, key: str) -> M:
    """The message, each of its fields checked alone. What is not sent has its default."""
    data, checks = _object(raw, key), _CHECKS[kind]
    fields = {}
    for name, value in data.items():
        if (check := checks.get(name)) is None:
            _refuse(key, f"{kind.__name__} has no such field", name)
        fields[name] = check(value, name, key)
    for name in _REQUIRED[kind]:
        if name not in fields:
            _refuse(key, f"{kind.__name__} has no {name!r}", raw)
    return kind(**fields)


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_RANKS


def _number(value: Any, name: str, key: str) -> int:
    if _is_number(value):
        return value  # type: ignore[no-any-return]
    _refuse(key, f"field {name!r} is not a number in 0..{MAX_RANKS - 1}", value)


def _flag(value: Any, name: str, key: str) -> bool:
    if isinstance(value, bool):
        return value
    _refuse(key, f"field {name!r} is neither true nor false", value)


def _text(value: Any, name: str, key: str) -> str:
    if isinstance(value, str):
        return value
    _refuse(key, f"field {name!r} is not text", value)


def _one_of(kind: type[E], what: str) -> Check:
    def check(value: Any, name: str, key: str) -> E:
        try:
            return kind(value)
        except ValueError:
            _refuse(key, f"unknown {what} {one_line(repr(value), SHOWN)}", value)

    return check


def _numbers(value: Any, name: str, key: str) -> tuple[int, ...]:
    if isinstance(value, list) and all(map(_is_number, value)) and _ascend(value):
        return tuple(value)
    _refuse(key, f"field {name!r} is not a list of numbers that ascend", value)


def _ascend(numbers: list[int]) -> bool:
    return all(low < high for low, high in pairwise(numbers))


def _pairs(value: Any, name: str, key: str) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        _refuse(key, f"field {name!r} is not a list of pairs", value)
    if not all(_is_number(item) for pair in value for item in pair) or not _ascend([pair[0] for pair in value]):
        _refuse(key, f"field {name!r} is not a list of pairs of numbers that ascend", value)
    return tuple((pair[0], pair[1]) for pair in value)


def _ranges(value: Any, name: str, key: str) -> tuple[tuple[int, int], ...]:
    ranges = _pairs(value, name, key)
    if not all(first <= last for first, last in ranges):
        _refuse(key, f"field {name!r} holds a range that is empty", ranges)
    if not all(before[1] < after[0] for before, after in pairwise(ranges)):
        _refuse(key, f"field {name!r} holds ranges that overlap", ranges)
    if sum(last - first + 1 for first, last in ranges) > FIRST_JOINER:
        _refuse(key, f"names more than {FIRST_JOINER} members", ranges)
    return ranges


def _record(value: Any, _: str, key: str) -> InterruptionRecord:
    try:
        record = InterruptionRecord.from_dict(value)
    except (ValueError, TypeError) as error:
        _refuse(key, one_line(str(error), SHOWN), value)
    if record.rank >= MAX_RANKS or (record.initial_rank or 0) >= MAX_RANKS:
        _refuse(key, f"a rank that is not below {MAX_RANKS}", value)
    if record.pings > MAX_COUNT:
        _refuse(key, f"more than {MAX_COUNT} pings", value)
    return record


def _cause(value: Any, name: str, key: str) -> InterruptionRecord | None:
    return None if value is None else _record(value, name, key)


def _records(most: int) -> Check:
    def check(value: Any, name: str, key: str) -> tuple[InterruptionRecord, ...]:
        if not isinstance(value, list) or len(value) > most:
            _refuse(key, f"field {name!r} is not a list of at most {most} records", value)
        return tuple(_record(item, name, key) for item in value)

    return check


_ROSTER: dict[str, Check] = {"iteration": _number, "members": _ranges, "joined": _pairs}
#: of each kind of message: what its fields may hold
_CHECKS: dict[type, dict[str, Check]] = {
    Arrival: {
        "kind": _one_of(ArrivalKind, "arrival kind"),
        **dict.fromkeys(("rank", "world_size", "active_world_size", "active_rank", "slot"), _number),
        **dict.fromkeys(("repeats", "limit", "hangs"), _number),
        **dict.fromkeys(("fresh", "progressed", "ran", "waits"), _flag),
        **dict.fromkeys(("by", "where"), _text),
    },
    Start: {"go": _flag, "active_world_size": _number},
    Outcome: {"completed": _flag, "cause": _cause, "removed": _numbers},
    Decision: {
        **dict.fromkeys(("removed", "terminated", "fresh"), _numbers),
        **dict.fromkeys(("record_count", "slots", "repeats", "pause", "stuck_count", "waiting", "hangs"), _number),
        **dict.fromkeys(("progressed", "ran"), _flag),
        "records": _records(MAX_RECORDS),
        "stuck": _records(MAX_STUCK),
        "abort": _text,
        "joined": _pairs,
    },
    Roster: _ROSTER,
    Vote: {"slot": _number, **_ROSTER},
    Verdict: {
        "outcome": _one_of(FailoverOutcome, "outcome"),
        "slots": _ranges,
        **dict.fromkeys(("iteration", "host", "port"), _number),
        "reason": _text,
    },
    Ticket: {"slot": _number, "world_size": _number, "by": _text, "closed": _flag},
}
#: those without a default, which are always sent
_REQUIRED = {
    kind: [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING] for kind in _CHECKS
}
