"""What the events say of one interruption, by initial rank. No judgement; that is in ``verdict``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from inprocess.attribution import Interruption, InterruptionRecord, is_echo
from inprocess.reports.reading import Entry

__all__ = ["Evidence", "Witness", "gather", "of_the_function"]

_FIELDS = tuple(field.name for field in fields(InterruptionRecord))
#: the library's line that calls the wrapped function
_ENTRY = f"{os.sep}inprocess{os.sep}call{os.sep}loop.py:"


@dataclass
class Witness:
    """What is known of one rank."""

    rank: int
    host: str = ""
    pid: int = 0
    #: its records, the first first
    records: list[InterruptionRecord] = field(default_factory=list)
    #: the events that tell of it, one of each kind, the first
    events: dict[str, Entry] = field(default_factory=dict)

    def of(self, kind: str) -> Mapping[str, Any]:
        """Attributes of its event of this kind; empty where there is none."""
        return self.events[kind].event.attributes if kind in self.events else {}

    def has(self, interruption: Interruption) -> bool:
        return any(record.interruption is interruption for record in self.records)

    @property
    def frames(self) -> list[str]:
        """Of its main thread before it was unwound, or of the error that it raised; innermost first."""
        if isinstance(lines := self.of("raised").get("lines"), list):
            return [line for line in reversed(lines) if isinstance(line, str)]
        threads = self.of("stacks").get("threads")
        for thread in threads if isinstance(threads, list) else ():
            if isinstance(thread, dict) and thread.get("main") and isinstance(thread.get("frames"), list):
                return of_the_function([frame for frame in thread["frames"] if isinstance(frame, str)])
        return []

    @property
    def answered(self) -> bool:
        """Its interpreter still ran Python code when the iteration was interrupted."""
        return "interrupted" in self.events

    @property
    def pings(self) -> int | None:
        """In the iteration that ended."""
        found = self.of("restart").get("pings")
        return found if isinstance(found, int) else None

    @property
    def kept(self) -> int:
        """Those of them before the last ``atomic()``, in which programs save."""
        found = self.of("restart").get("kept")
        return found if isinstance(found, int) else 0


@dataclass
class Evidence:
    """Of one interruption."""

    witnesses: dict[int, Witness]
    #: the ranks that did not wait, as the ranks agreed after a soft timeout
    stuck: Sequence[InterruptionRecord] = ()
    #: the restart line's reason
    why: str = ""
    entries: Sequence[Entry] = ()
    #: ranks that were in the job before and not afterwards, without a word
    missing: Sequence[int] = ()
    #: why records could not be read
    unread: Sequence[str] = ()

    @property
    def records(self) -> list[InterruptionRecord]:
        """Of all ranks, without those that only saw another one's failure, where there is another."""
        found = [record for witness in self.witnesses.values() for record in witness.records]
        return [record for record in found if not is_echo(record)] or found


def of_the_function(frames: list[str]) -> list[str]:
    """Without those that lead to the wrapped function."""
    entry = next((number for number, frame in enumerate(frames) if _ENTRY in frame), 0)
    return frames[:entry] if entry else frames


def gather(entries: Sequence[Entry], records: object, stuck: object, why: str) -> Evidence:
    """From the events between two runs of the function, and what the end round agreed on."""
    witnesses: dict[int, Witness] = {}
    for entry in entries:
        witness = witnesses.setdefault(entry.rank, Witness(entry.rank))
        if not entry.source.is_monitor or not witness.host:
            witness.host = entry.source.header.host
        if not entry.source.is_monitor:
            witness.pid = entry.source.header.pid
        witness.events.setdefault(entry.kind, entry)
    unread: list[str] = []
    for record in (*parsed(records, unread), *_recorded(entries, unread)):
        rank = record.rank if record.initial_rank is None else record.initial_rank
        known = witnesses.setdefault(rank, Witness(rank)).records
        if all(record.interruption is not each.interruption for each in known):
            known.append(record)
    return Evidence(witnesses, parsed(stuck, unread), why, entries, unread=unread)


def _recorded(entries: Sequence[Entry], unread: list[str]) -> Iterable[InterruptionRecord]:
    """What ranks and monitors said before they may have died."""
    for entry in entries:
        if entry.kind == "raised":
            names = ("rank", "interruption", "initial_rank", "message", "where", "pings")
            yield from parsed(
                [{name: entry.event.attributes[name] for name in names if name in entry.event.attributes}], unread
            )
        elif entry.kind in ("no_progress", "killed"):
            yield from parsed([entry.event.attributes.get("record")], unread)
        elif entry.kind == "died":
            told = {"rank": entry.event.rank, "interruption": "terminated", "initial_rank": entry.rank}
            yield from parsed([{**told, "message": str(entry.event.attributes.get("how", ""))}], unread)


def parsed(records: object, unread: list[str]) -> tuple[InterruptionRecord, ...]:
    """Those that are some; a file may hold anything. A newer version may say more of a record than is known here.

    ``unread``: gets the reason for each that is none.
    """
    found = []
    for record in records if isinstance(records, list | tuple) else ():
        if record is None:  # nothing is known
            continue
        known = {name: record[name] for name in _FIELDS if name in record} if isinstance(record, dict) else record
        try:
            found.append(InterruptionRecord.from_dict(known))
        except (ValueError, TypeError) as error:
            unread.append(str(error))
    return tuple(found)
