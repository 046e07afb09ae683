"""The live files below a run directory: how each rank is now, and its stacks where somebody asks. Their format, no IO.

``docs/status.md`` lists the fields. A monitor process writes them, see ``status_file``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from inprocess.attribution import one_line
from inprocess.system import strict_json

__all__ = [
    "DUMP",
    "FOLDER",
    "MAX_DUMP_BYTES",
    "MAX_FILE_BYTES",
    "REQUESTS",
    "parse",
    "parse_dump",
    "stale_after",
]

#: below the run directory
FOLDER = "live"
#: below that: a file for each request for stacks; the answers to the request ID are in dump-ID/
REQUESTS, DUMP = "requests", "dump-"
FORMAT, DUMP_FORMAT, VERSION = "inprocess-live", "inprocess-dump", 1
#: how often a file is renewed (seconds), and the longest time that is taken for that
INTERVAL_S, MAX_INTERVAL_S = 2.0, 3600.0
#: a file that is older is stale (seconds), and older than so many intervals at which it is renewed
STALE_S, STALE_AFTER = 10.0, 5
#: one file has far less
MAX_FILE_BYTES, MAX_DUMP_BYTES = 1 << 16, 1 << 20
MAX_TEXT = 300
STATES = ("running", "left", "dead")
ROLES = ("active", "reserve", "unknown")
#: field -> its type; those that end in ``?`` may be null
FIELDS = {
    "job": "text",
    "host": "text",
    "pid": "count",
    "monitor_pid": "count",
    "initial_rank": "count",
    "rank": "count",
    "role": "text",
    "call": "count",
    "iteration": "integer",
    "phase": "text",
    "state": "text",
    "steps": "count",
    "progress_age": "number?",
    "heartbeat_age": "number?",
    "world_size": "count?",
    "reserves": "count?",
    "memory_bytes": "count?",
    "time": "number",
    "wall_time": "number",
}
#: of an answer with stacks
DUMP_FIELDS = {"job": "text", "host": "text", "pid": "count", "initial_rank": "count", "why": "text"}
_MOST = 1 << 62


def parse(data: Any) -> dict[str, Any]:
    """A live file, from its bytes or from the JSON object in it.

    Raises:
        ValueError: half a file, another version, a field that is missing or of another type; says which.
    """
    found = _object(data, MAX_FILE_BYTES, FORMAT, FIELDS)
    if found["state"] not in STATES or found["role"] not in ROLES:
        raise ValueError("its state or its role is none that is known")
    return found


def stale_after(live: Mapping[str, Any]) -> float:
    """The age in seconds at which nobody renews it any more: its monitor is gone, its host, or the disk."""
    interval = live.get("interval")
    given = float(interval) if isinstance(interval, int | float) and 0 < interval < MAX_INTERVAL_S else 0.0
    return max(STALE_S, STALE_AFTER * given)


def parse_dump(data: bytes) -> dict[str, Any]:
    """The answer of one rank to a request for its stacks. Raises ValueError."""
    found = _object(data, MAX_DUMP_BYTES, DUMP_FORMAT, DUMP_FIELDS)
    threads = found.get("threads")
    found["threads"] = [each for each in map(_thread, threads if isinstance(threads, list) else ()) if each]
    found["process"] = found["process"] if isinstance(found.get("process"), dict) else {}
    return found


def _object(data: Any, limit: int, kind: str, fields: dict[str, str]) -> dict[str, Any]:
    found = strict_json.parse(data, limit) if isinstance(data, bytes) else data
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    if (found.get("format"), found.get("version")) != (kind, VERSION):
        told = one_line(f"{found.get('format')} {found.get('version')}"[:200], 60)
        raise ValueError(f"it was written in the format {told}; this library reads {kind} {VERSION}")
    for name, wanted in fields.items():
        if name not in found:
            raise ValueError(f"it has no field {name!r}")
        if not (found[name] is None and wanted.endswith("?")) and not _is_a(found[name], wanted.rstrip("?")):
            raise ValueError(f"its field {name!r} is no {wanted.rstrip('?')}")
    return dict(found)


def _is_a(value: object, kind: str) -> bool:
    if kind == "text":
        return isinstance(value, str) and len(value) <= MAX_TEXT
    if isinstance(value, bool) or not isinstance(value, int | float if kind == "number" else int):
        return False
    return math.isfinite(value) and (-1 if kind == "integer" else 0 if kind == "count" else -_MOST) <= value <= _MOST


def _thread(given: object) -> dict[str, Any] | None:
    if not isinstance(given, dict) or not isinstance(frames := given.get("frames"), list):
        return None
    name, lines = str(given.get("name", "")), [frame for frame in frames if isinstance(frame, str)]
    return {"name": name, "main": given.get("main") is True, "frames": lines} if lines else None
