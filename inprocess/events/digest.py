"""The most important events of a process in a few bytes, as the lines of a file of events. Pure.

A rank's report needs who failed, where its main thread was, and when it went on; all else is left out, the least
important first.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inprocess.events.record import Event, Header, parse, to_line

__all__ = ["MAX_BYTES", "cut", "lines_of"]

#: of a digest with its headers
MAX_BYTES = 4096
#: kind -> the attributes that stay; the most important kind first
_KEPT: dict[str, tuple[str, ...]] = {
    "raised": ("rank", "interruption", "initial_rank", "message", "where", "pings", "lines"),
    "died": ("how", "exit_code", "signal", "oom_kills"),
    "killed": ("record", "at_once"),
    "no_progress": ("record", "silent_for"),
    "stacks": ("threads", "where", "waits", "left_collective", "pings", "text"),
    "interrupted": ("cause",),
    "restart": ("restart", "pings", "kept", "world_size"),
    "run": ("world_size", "before", "reserve", "took", "silent"),
    "process": ("state", "wchan", "syscall"),
    "store_lost": ("text",),
    "left": ("how", "why", "pings"),
    "abort": ("why",),
    "aborted": (),
    "phase": ("after",),
    "first_step": (),
    "recovered": ("step", "source"),
}
_IMPORTANCE = {kind: number for number, kind in enumerate(_KEPT)}
#: (longest text, most items of a list) of an event; the first that leaves room for its line is taken
_SIZES = ((300, 16), (160, 10), (100, 4))
#: of an object, such as a record
MAX_NAMES = 16
#: the library's line that calls the wrapped function: what is further out says nothing
_ENTRY = f"{os.sep}inprocess{os.sep}call{os.sep}loop.py:"


def cut(sources: Sequence[tuple[Header, Sequence[Event]]], limit: int = MAX_BYTES) -> bytes:
    """The lines of a file with these headers and what has room of their events; empty where nothing has."""
    found = [
        (_IMPORTANCE[event.kind], event.time, number, event)
        for number, (_, events) in enumerate(sources)
        for event in events
        if event.kind in _IMPORTANCE
    ]
    headers = [to_line(header) for header, _ in sources]
    chosen: dict[int, list[tuple[float, bytes]]] = {}
    left = limit
    # of one kind the latest first: that is the incident that is wanted
    for _, at, number, event in sorted(found, key=lambda item: (item[0], -item[1])):
        room = left - (0 if number in chosen else len(headers[number]))
        line = next((line for line in _lines(event) if len(line) <= room), None)
        if line is not None:
            left = room - len(line)
            chosen.setdefault(number, []).append((at, line))
    return b"".join(headers[number] + b"".join(line for _, line in sorted(chosen[number])) for number in sorted(chosen))


def lines_of(data: bytes, job: str) -> tuple[Header | None, list[bytes]]:
    """The first header, and all lines, of what somebody else wrote; only those of this job that can be read.

    Raises:
        ValueError: it is no digest.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes are more than {MAX_BYTES}")
    first, is_of_job, lines = None, False, []
    for line in data.splitlines(keepends=True):
        found = parse(line)
        if isinstance(found, Header):
            is_of_job = found.job == job
            first = first or (found if is_of_job else None)
        if is_of_job:
            lines.append(line)
    return first, lines


def _lines(event: Event) -> Iterator[bytes]:
    """Its line, shorter and shorter."""
    attributes = {name: event.attributes[name] for name in _KEPT[event.kind] if name in event.attributes}
    for text, items in _SIZES:
        slim = {name: _slim(value, text, items, 0) for name, value in attributes.items()}
        if "threads" in slim:
            slim["threads"] = _main(attributes["threads"], text, items)
        yield to_line(dataclasses.replace(event, phase=event.phase[:40], attributes=slim))


def _main(threads: object, text: int, items: int) -> list[Any]:
    """Of all threads the main one, the lines of its function: the innermost and the outermost."""
    for thread in threads if isinstance(threads, list | tuple) else ():
        if isinstance(thread, Mapping) and thread.get("main") and isinstance(thread.get("frames"), list | tuple):
            frames = [str(frame) for frame in thread["frames"]]
            end = next((number for number, frame in enumerate(frames) if _ENTRY in frame), 0) or len(frames)
            kept = frames[:end] if end <= items else [*frames[: items - 2], *frames[end - 2 : end]]
            return [{"name": str(thread.get("name", ""))[:40], "main": True, "frames": [one[-text:] for one in kept]}]
    return []


def _slim(value: Any, text: int, items: int, depth: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= text else f"{value[: text - 3]}..."
    if isinstance(value, Mapping):
        pairs = list(value.items())[:MAX_NAMES] if depth < 3 else []
        return {str(name)[:40]: _slim(each, text, items, depth + 1) for name, each in pairs}
    if isinstance(value, list | tuple):  # of the lines of a traceback the last ones are the innermost
        return [_slim(each, text, items, depth + 1) for each in value[-items:]] if depth < 3 else []
    return value if isinstance(value, bool | int | float) or value is None else type(value).__name__
