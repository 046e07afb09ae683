"""What members write into the store: frozen dataclasses, JSON on the wire. Parsing is strict; nothing here does IO.

Values come over the network, so each field is checked and a broken one is a ``BadMessage`` that names the key.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inprocess.attribution import InterruptionRecord

#: a decision names at most this many interruption records; the rest are counted
MAX_RECORDS = 32
MAX_RANKS = 1 << 24


class BadMessage(ValueError):
    """A value in the store is not what this version writes: another program uses the store, or another version."""


class Kind(enum.Enum):
    """How a member is accounted for in a round."""

    #: start round: took a rank (active or reserve)
    RANK = "rank"
    #: start round: the rank assignment discarded it
    DISCARDED = "discarded"
    #: end round: goes on
    ALIVE = "alive"
    #: end round (and start round): goes away by its own decision
    LEFT = "left"
    #: said by its monitor, or by the member that watches it
    DEAD = "dead"


@dataclass(frozen=True)
class Arrival:
    """One member's entry in a round."""

    kind: Kind
    #: start round: the rank taken; end round: the rank in the last numbering that started (the frame)
    rank: int | None = None
    #: number of ranks in that numbering, reserves included
    world_size: int | None = None
    #: start round: number of ranks that will call the function
    active_world_size: int | None = None
    #: start round: the rank among the active ones, None for a reserve
    active_rank: int | None = None
    #: who wrote this entry; tells two processes apart that speak for the same member
    by: str = ""


@dataclass(frozen=True)
class Start:
    """The start round's verdict."""

    go: bool
    #: number of ranks that call the function (0 where ``go`` is false)
    active_world_size: int = 0


@dataclass(frozen=True)
class Outcome:
    """How an iteration ended: one compare-and-set, the same for everybody."""

    completed: bool
    #: the first interruption that was recorded
    cause: InterruptionRecord | None = None
    #: completed: members (reserves) that were gone by then
    removed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The end round's verdict: who is in the next iteration, as a difference to the last roster."""

    #: members that are out of the job
    removed: tuple[int, ...] = ()
    #: ranks of the frame whose members are out; everything since the frame began
    terminated: tuple[int, ...] = ()
    #: interruption records of the iteration, the first MAX_RECORDS
    records: tuple[InterruptionRecord, ...] = ()
    #: number of records, also beyond the cap
    record_count: int = 0
    #: not empty: everybody leaves, for this reason
    abort: str = ""


def dump(message: Arrival | Start | Outcome | Decision | InterruptionRecord) -> str:
    """The message as compact JSON."""
    return json.dumps(_encode(message), separators=(",", ":"), sort_keys=True)


def _encode(message: Any) -> dict[str, Any]:
    if isinstance(message, InterruptionRecord):
        return message.to_dict()
    fields = {name: _encode_value(value) for name, value in vars(message).items()}
    return {name: value for name, value in fields.items() if value not in (None, [], "")}


def _encode_value(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, InterruptionRecord):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_encode_value(item) for item in value]
    return value


def load_arrival(raw: bytes | str, key: str) -> Arrival:
    """Parse one arrival; ``key`` is for the error message. Raises BadMessage."""
    data = _object(raw, key)
    try:
        kind = Kind(data.get("kind"))
    except ValueError:
        raise BadMessage(f"store key {key!r}: unknown arrival kind {data.get('kind')!r}") from None
    names = ("rank", "world_size", "active_world_size", "active_rank")
    return Arrival(kind, **{name: _number(data, name, key) for name in names}, by=_text(data, "by", key))


def load_start(raw: bytes | str, key: str) -> Start:
    data = _object(raw, key)
    return Start(_flag(data, "go", key), _number(data, "active_world_size", key) or 0)


def load_outcome(raw: bytes | str, key: str) -> Outcome:
    data = _object(raw, key)
    cause = data.get("cause")
    return Outcome(
        _flag(data, "completed", key), None if cause is None else _record(cause, key), _numbers(data, "removed", key)
    )


def load_decision(raw: bytes | str, key: str) -> Decision:
    data = _object(raw, key)
    records = data.get("records", [])
    if not isinstance(records, list) or len(records) > MAX_RECORDS:
        raise BadMessage(f"store key {key!r}: field 'records' is not a list of at most {MAX_RECORDS} records")
    return Decision(
        removed=_numbers(data, "removed", key),
        terminated=_numbers(data, "terminated", key),
        records=tuple(_record(item, key) for item in records),
        record_count=_number(data, "record_count", key) or 0,
        abort=_text(data, "abort", key),
    )


def load_record(raw: bytes | str, key: str) -> InterruptionRecord:
    return _record(_object(raw, key), key)


def _object(raw: bytes | str, key: str) -> Mapping[str, Any]:
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        raise BadMessage(f"store key {key!r} does not hold JSON: {raw[:80]!r}") from None
    if not isinstance(data, dict):
        raise BadMessage(f"store key {key!r} does not hold a JSON object: {raw[:80]!r}")
    return data


def _record(data: Any, key: str) -> InterruptionRecord:
    try:
        return InterruptionRecord.from_dict(data)
    except (ValueError, TypeError) as error:
        raise BadMessage(f"store key {key!r}: {error}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_RANKS


def _number(data: Mapping[str, Any], name: str, key: str) -> int | None:
    value = data.get(name)
    if value is None or _is_number(value):
        return value
    raise BadMessage(f"store key {key!r}: field {name!r} is not a number in 0..{MAX_RANKS - 1}: {value!r}")


def _numbers(data: Mapping[str, Any], name: str, key: str) -> tuple[int, ...]:
    value = data.get(name, [])
    if isinstance(value, list) and all(_is_number(item) for item in value):
        return tuple(value)
    raise BadMessage(f"store key {key!r}: field {name!r} is not a list of numbers: {str(value)[:80]}")


def _flag(data: Mapping[str, Any], name: str, key: str) -> bool:
    value = data.get(name)
    if isinstance(value, bool):
        return value
    raise BadMessage(f"store key {key!r}: field {name!r} is neither true nor false: {str(value)[:80]}")


def _text(data: Mapping[str, Any], name: str, key: str) -> str:
    value = data.get(name, "")
    if isinstance(value, str):
        return value
    raise BadMessage(f"store key {key!r}: field {name!r} is not text: {str(value)[:80]}")
