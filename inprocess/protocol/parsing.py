"""Reading messages: whatever a store holds, each function returns a message that is whole, or raises BadMessage."""

from __future__ import annotations

import dataclasses
import enum
import string
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

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
#: longest address of a store server (characters), and what a host in it is made of
ADDRESS_LIMIT = 300
ADDRESS_CHARACTERS = frozenset(string.ascii_letters + string.digits + ".-_:%@")
#: how much of a broken value an error shows (characters)
SHOWN = 80


def load_arrival(raw: bytes | str, key: str) -> Arrival:
    """Parse one arrival; ``key`` is for the error message. Raises BadMessage."""
    data = _object(raw, key, Arrival)
    kind = _one_of(ArrivalKind, data.get("kind"), key, "arrival kind")
    names = ("rank", "world_size", "active_world_size", "active_rank", "slot")
    numbers = {name: _number(data, name, key) for name in names}
    arrival = Arrival(
        kind,
        **numbers,
        by=_text(data, "by", key),
        fresh=_flag(data, "fresh", key, default=False),
        repeats=_number(data, "repeats", key) or 0,
        limit=_number(data, "limit", key) or 0,
        progressed=_flag(data, "progressed", key, default=False),
        ran=_flag(data, "ran", key, default=False),
        where=_text(data, "where", key),
        waits=_flag(data, "waits", key, default=False),
        hangs=_number(data, "hangs", key) or 0,
    )
    if not _has_a_slot(arrival):
        _refuse(key, "ranks and sizes do not fit each other", raw)
    if arrival.limit > arrival.repeats:
        _refuse(key, "'repeats' and 'limit' do not fit each other", raw)
    if kind is not ArrivalKind.ALIVE and (arrival.where or arrival.waits):
        _refuse(key, f"'where' and 'waits' do not fit the kind {kind.value!r}", raw)
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
    data = _object(raw, key, Start)
    start = Start(_flag(data, "go", key), _number(data, "active_world_size", key) or 0)
    if start.active_world_size and not start.go:
        _refuse(key, "'go' and 'active_world_size' do not fit each other", raw)
    return start


def load_outcome(raw: bytes | str, key: str) -> Outcome:
    data = _object(raw, key, Outcome)
    cause = data.get("cause")
    outcome = Outcome(
        _flag(data, "completed", key), None if cause is None else _record(cause, key), _numbers(data, "removed", key)
    )
    if outcome.completed is not (outcome.cause is None) or (outcome.removed and not outcome.completed):
        _refuse(key, "'completed', 'cause' and 'removed' do not fit each other", raw)
    return outcome


def load_decision(raw: bytes | str, key: str) -> Decision:
    data = _object(raw, key, Decision)
    records = data.get("records", [])
    if not isinstance(records, list) or len(records) > MAX_RECORDS:
        _refuse(key, f"field 'records' is not a list of at most {MAX_RECORDS} records", records)
    decision = Decision(
        removed=_numbers(data, "removed", key),
        terminated=_numbers(data, "terminated", key),
        records=tuple(_record(item, key) for item in records),
        record_count=_number(data, "record_count", key) or 0,
        abort=_text(data, "abort", key),
        joined=_pairs(data, "joined", key),
        slots=_number(data, "slots", key) or 0,
        fresh=_numbers(data, "fresh", key),
        repeats=_number(data, "repeats", key) or 0,
        pause=_number(data, "pause", key) or 0,
        progressed=_flag(data, "progressed", key, default=False),
        ran=_flag(data, "ran", key, default=False),
        stuck=_stuck(data, key),
        stuck_count=_number(data, "stuck_count", key) or 0,
        waiting=_number(data, "waiting", key) or 0,
        hangs=_number(data, "hangs", key) or 0,
    )
    if decision.pause > MAX_PAUSE_MS:
        _refuse(key, f"field 'pause' is longer than {MAX_PAUSE_MS} ms", decision.pause)
    if decision.stuck_count < len(decision.stuck):
        _refuse(key, "'stuck_count' is less than the number of 'stuck'", decision.stuck_count)
    if decision.record_count < len(decision.records):
        _refuse(key, "'record_count' is less than the number of 'records'", decision.record_count)
    if not _fits(decision):
        _refuse(key, "'joined', 'slots', 'terminated' and 'fresh' do not fit each other", raw)
    return decision


def _stuck(data: Mapping[str, Any], key: str) -> tuple[InterruptionRecord, ...]:
    stuck = data.get("stuck", [])
    if not isinstance(stuck, list) or len(stuck) > MAX_STUCK:
        _refuse(key, f"field 'stuck' is not a list of at most {MAX_STUCK} records", stuck)
    return tuple(_record(item, key) for item in stuck)


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
    return _roster(_object(raw, key, Roster), key)


def _roster(data: Mapping[str, Any], key: str) -> Roster:
    return Roster(_iteration(data, key), _ranges(data, "members", key), _pairs(data, "joined", key))


def load_vote(raw: bytes | str, key: str) -> Vote:
    data = _object(raw, key, Vote)
    slot, roster = _number(data, "slot", key), _roster(data, key)
    if slot is None:
        _refuse(key, "has no 'slot'", raw)
    return Vote.of(slot, roster)


def load_verdict(raw: bytes | str, key: str) -> Verdict:
    data = _object(raw, key, Verdict)
    outcome = _one_of(FailoverOutcome, data.get("outcome"), key, "outcome")
    host, port = _number(data, "host", key) or 0, _number(data, "port", key) or 0
    verdict = Verdict(
        outcome,
        _ranges(data, "slots", key),
        _iteration(data, key),
        host,
        port,
        _text(data, "reason", key),
    )
    if port >= 1 << 16 or (outcome is FailoverOutcome.GO) is not (bool(port) and bool(verdict.slots)):
        _refuse(key, "'outcome', 'slots' and 'port' do not fit each other", raw)
    return verdict


def load_ticket(raw: bytes | str, key: str) -> Ticket:
    data = _object(raw, key, Ticket)
    slot, world_size = _number(data, "slot", key), _number(data, "world_size", key)
    if slot is None or world_size is None or not slot < world_size <= FIRST_JOINER:
        _refuse(key, f"'slot' and 'world_size' are not two numbers, ascending, of at most {FIRST_JOINER}", raw)
    return Ticket(slot, world_size, _text(data, "by", key), _flag(data, "closed", key, default=False))


def load_record(raw: bytes | str, key: str) -> InterruptionRecord:
    return _record(_object(raw, key, InterruptionRecord), key)


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


def _object(raw: bytes | str, key: str, kind: type[Any]) -> Mapping[str, Any]:
    try:
        data = strict_json.parse(raw)
    except ValueError as error:
        _refuse(key, f"does not hold JSON of ours ({one_line(str(error), SHOWN)})", raw)
    if not isinstance(data, dict):
        _refuse(key, "does not hold a JSON object", raw)
    for name in data.keys() - {field.name for field in dataclasses.fields(kind)}:
        _refuse(key, f"{kind.__name__} has no such field", name)
    return data


def _record(data: Any, key: str) -> InterruptionRecord:
    try:
        record = InterruptionRecord.from_dict(data)
    except (ValueError, TypeError) as error:
        _refuse(key, one_line(str(error), SHOWN), data)
    if record.rank >= MAX_RANKS or (record.initial_rank or 0) >= MAX_RANKS:
        _refuse(key, f"a rank that is not below {MAX_RANKS}", data)
    if record.pings > MAX_COUNT:
        _refuse(key, f"more than {MAX_COUNT} pings", data)
    return record


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_RANKS


def _number(data: Mapping[str, Any], name: str, key: str) -> int | None:
    value = data.get(name)
    if value is None or _is_number(value):
        return value
    _refuse(key, f"field {name!r} is not a number in 0..{MAX_RANKS - 1}", value)


def _iteration(data: Mapping[str, Any], key: str) -> int:
    """-1 is not sent."""
    value = _number(data, "iteration", key)
    return -1 if value is None else value


def _one_of(kind: type[E], value: Any, key: str, what: str) -> E:
    try:
        return kind(value)
    except ValueError:
        _refuse(key, f"unknown {what} {one_line(repr(value), SHOWN)}", value)


def _numbers(data: Mapping[str, Any], name: str, key: str) -> tuple[int, ...]:
    value = data.get(name, [])
    if isinstance(value, list) and all(_is_number(item) for item in value) and _ascend(value):
        return tuple(value)
    _refuse(key, f"field {name!r} is not a list of numbers that ascend", value)


def _ascend(numbers: list[int]) -> bool:
    return all(low < high for low, high in pairwise(numbers))


def _pairs(data: Mapping[str, Any], name: str, key: str) -> tuple[tuple[int, int], ...]:
    value = data.get(name, [])
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        _refuse(key, f"field {name!r} is not a list of pairs", value)
    if not all(_is_number(item) for pair in value for item in pair) or not _ascend([pair[0] for pair in value]):
        _refuse(key, f"field {name!r} is not a list of pairs of numbers that ascend", value)
    return tuple((pair[0], pair[1]) for pair in value)


def _ranges(data: Mapping[str, Any], name: str, key: str) -> tuple[tuple[int, int], ...]:
    ranges = _pairs(data, name, key)
    if not all(first <= last for first, last in ranges):
        _refuse(key, f"field {name!r} holds a range that is empty", ranges)
    if not all(before[1] < after[0] for before, after in pairwise(ranges)):
        _refuse(key, f"field {name!r} holds ranges that overlap", ranges)
    if sum(last - first + 1 for first, last in ranges) > FIRST_JOINER:
        _refuse(key, f"names more than {FIRST_JOINER} members", ranges)
    return ranges


def _flag(data: Mapping[str, Any], name: str, key: str, default: bool | None = None) -> bool:
    value = data.get(name, default)
    if isinstance(value, bool):
        return value
    _refuse(key, f"field {name!r} is neither true nor false", value)


def _text(data: Mapping[str, Any], name: str, key: str) -> str:
    value = data.get(name, "")
    if isinstance(value, str):
        return value
    _refuse(key, f"field {name!r} is not text", value)
