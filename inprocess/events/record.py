"""One thing that happened in a job, and its line in a file. `docs/events.md` lists the kinds."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import socket
from collections.abc import Mapping
from typing import Any

from inprocess.attribution import one_line
from inprocess.system import clock, strict_json

__all__ = ["KINDS", "VERSION", "Event", "Header", "parse", "schema", "to_line"]

#: of the format; another one means that a field was removed or changed its meaning. Readers ignore unknown kinds
VERSION = 1
FORMAT = "inprocess-events"
#: a line is never longer (bytes): what does not fit is left out
MAX_LINE_BYTES = 1 << 16
#: of a text in the attributes (characters), and the most items of a list
MAX_TEXT, MAX_ITEMS = 4000, 512
#: of another text, where the line is too long (characters), and of a number (bits)
MAX_NAME, MAX_BITS = 200, strict_json.MAX_BITS
#: of dicts and lists in the attributes: so that `strict_json` takes the line again
MAX_DEPTH = strict_json.MAX_DEPTH - 1

#: kind -> what happened. Written by the training process, ...
KINDS = {
    "call": "A call of a wrapped function begins: `function`, `world_size`, `pid`.",
    "phase": "The rank enters the phase `phase`; `after`: what ended the one before.",
    "run": "The function is about to be called: `world_size`, `before` (with how many active ranks the iteration ended "
    "that was interrupted; 0: none was), `reserve`; after a restart `took` (seconds since its fault was noticed) and "
    "`silent` (seconds of standstill before that).",
    "first_step": "The first `ping()` of the iteration.",
    "raised": "The function raised: `message`, `where`, `pings`, `lines` of the traceback, outermost first.",
    "interrupted": "The rank learned that the iteration is over: `cause`, the first record that was made.",
    "stacks": "All threads, innermost line first, before the abort began: `threads`, each with `name`, `main` and "
    "`frames`; `where` and `waits` of the main thread, `left_collective` (it handles an error of a collective), "
    "`pings`. From outside: `text`.",
    "aborted": "The abort ladder has ended.",
    "too_few": "There are too few ranks, and the restart waits for processes that join: `patience` (seconds).",
    "restart": "The end round has decided to go on: `restart` (its number), `why`, `records`, `record_count`, `stuck`, "
    "`stuck_count`, `waiting`, `removed` (members), `joined` (initial ranks), `roster`, `world_size`, `repeats`, "
    "`hangs`, `pause` (seconds); of the iteration that ended `pings`, and `kept` (those before the last `atomic()`).",
    "abort": "The end round has decided that everybody leaves: `why`, `records`.",
    "recovered": "`LiveState` has a state again: `step`, `source`.",
    "leaving": "A signal asked the rank to leave: `signal`, `seconds` (after which the function is interrupted).",
    "left": "The call is over on this rank: `how`, `why`, `pings`.",
    # ... or by its monitor process
    "watching": "The monitor has begun: `training_pid`.",
    "no_progress": "The monitor interrupts the iteration: `record`, `silent_for` (seconds without progress).",
    "process": "What the kernel says of a rank that does not answer: `state`, `wchan`, `syscall`.",
    "killed": "The monitor ends its rank: `record`, `at_once`.",
    "died": "The training process is gone: `how`, `exit_code`, `signal`, `oom_kills` (by the kernel, in its cgroup, "
    "since the call began).",
    "store_lost": "The store does not answer: `text`.",
    # or by both
    "dropped": "`count` events were not written, because of `why`.",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        time: seconds of the monotonic clock of its host, the same for all processes there.
        wall_time: seconds since 1970, UTC.
        call: calls of wrapped functions in this process before this one.
        iteration: of that call; -1 before the first.
        rank: in this iteration.
        initial_rank: with which the process was started, or which it took.
        phase: of the restart loop, see ``protocol/phases.py``.
        kind: what happened, a key of `KINDS`.
        attributes: more of it, in JSON types.
    """

    time: float
    wall_time: float
    call: int
    iteration: int
    rank: int
    initial_rank: int
    phase: str
    kind: str
    attributes: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """The first line of each file: who writes it.

    Attributes:
        job: tells two jobs apart that were given the same directory.
        role: ``rank`` or ``monitor``.
        initial_rank: of the training process.
        pid: of the process that writes.
        host: its name.
        time: when it began to write, as an event's.
        wall_time: likewise.
        format: ``inprocess-events``.
        version: of the format.
    """

    job: str
    role: str
    initial_rank: int
    pid: int
    host: str = dataclasses.field(default_factory=socket.gethostname)
    time: float = dataclasses.field(default_factory=clock.monotonic)
    wall_time: float = dataclasses.field(default_factory=clock.wall)
    format: str = FORMAT
    version: int = VERSION


def to_line(what: Event | Header) -> bytes:
    """With its line end. What JSON does not know becomes text, what is too long is cut."""
    data = {name: getattr(what, name) for name in _FIELDS[type(what)]}
    if isinstance(what, Event):
        data["attributes"] = _plain(what.attributes, 0)
    else:
        data = _plain(data, 0)
    line = json.dumps(data, separators=(",", ":")).encode()
    if len(line) < MAX_LINE_BYTES:
        return line + b"\n"
    data = {name: value[:MAX_NAME] if isinstance(value, str) else value for name, value in data.items()}
    if isinstance(what, Event):
        data["attributes"] = {"left_out": f"{len(line)} bytes were too many"}
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def parse(line: bytes) -> Event | Header:
    """What is in one line.

    Raises:
        ValueError: half a line, another version, a field that is missing, unknown or of another type; says which.
    """
    data = strict_json.parse(line, MAX_LINE_BYTES)
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")
    kind: type[Event | Header] = Header if "format" in data else Event
    if kind is Header and (data["format"], data.get("version")) != (FORMAT, VERSION):
        told = one_line(f"{data['format']} {data.get('version')}", 60)
        raise ValueError(f"it was written in the format {told}; this library reads {FORMAT} {VERSION}")
    for name in _FIELDS[kind]:
        if name not in data:
            raise ValueError(f"it has no field {name!r}")
        if not _is_a(data[name], _TYPES[kind, name]):
            raise ValueError(f"its field {name!r} is no {_TYPES[kind, name]}")
    if unknown := set(data) - set(_FIELDS[kind]):
        raise ValueError(f"it has unknown fields: {one_line(', '.join(map(repr, sorted(unknown))), 200)}")
    return kind(**data)


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of one line."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{FORMAT} {VERSION}: one line of a file below events/",
        "oneOf": [_schema_of(Header), _schema_of(Event)],
    }


def _schema_of(kind: type[Event | Header]) -> dict[str, Any]:
    properties: dict[str, Any] = {name: {"type": _JSON_TYPES[_TYPES[kind, name]]} for name in _FIELDS[kind]}
    if kind is Header:
        properties |= {"format": {"const": FORMAT}, "version": {"const": VERSION}}
    return {
        "title": kind.__name__,
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_FIELDS = {kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in (Event, Header)}
_TYPES = {(kind, field.name): str(field.type) for kind in (Event, Header) for field in dataclasses.fields(kind)}
_JSON_TYPES = {"float": "number", "int": "integer", "str": "string", "Mapping[str, Any]": "object"}


def _is_a(value: object, kind: str) -> bool:
    if kind in ("int", "float"):
        kinds = int if kind == "int" else int | float
        return isinstance(value, kinds) and not isinstance(value, bool) and -math.inf < value < math.inf
    return isinstance(value, str if kind == "str" else dict)


def _plain(value: Any, depth: int) -> Any:
    """The value in JSON types."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and value.bit_length() <= MAX_BITS:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else f"{value[: MAX_TEXT - 3]}..."
    if isinstance(value, Mapping) and depth < MAX_DEPTH:
        return {str(key): _plain(each, depth + 1) for key, each in itertools.islice(value.items(), MAX_ITEMS)}
    if isinstance(value, list | tuple | set | frozenset | range) and depth < MAX_DEPTH:
        return [_plain(each, depth + 1) for each in itertools.islice(value, MAX_ITEMS)]
    return type(value).__name__
