"""What each training process did when, and how many ranks ran: from the events of a job. Pure.

Each phase ends where the next one begins, so a process is in a phase at any moment between its call and its end. A
process that says nothing of its end has gone where its monitor saw it die, or where the others went on without it.
Otherwise it still runs, and its last phase reaches to the last event of the job.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inprocess.protocol.phases import Phase
from inprocess.reports.reading import LATEST, Entry, Source, Trail

__all__ = ["Lane", "Slice", "lanes", "sizes"]

#: names of what is inside a phase
FIRST_STEP, STEPS, ABORTING, LEAVING, RESERVE = "first step", "steps", "aborting", "leaving", "reserve"


@dataclass(frozen=True)
class Slice:
    """Something that lasted, in seconds since 1970, and what is inside it, by time."""

    begin: float
    end: float
    name: str
    parts: tuple[Slice, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Lane:
    """One training process.

    Attributes:
        rank: its initial rank.
        host, pid: who it is; empty and 0: nothing but its monitor's events is left.
        begin, end: from its first event to its end, in seconds since 1970.
        ended: how: what its ``left`` event says, ``died`` or ``gone``; empty: it still runs.
        iterations: each with its phases as parts; what is before the first has the name ``start``.
        moments: events without a duration, by time, with those of its monitor.
    """

    rank: int
    host: str
    pid: int
    begin: float
    end: float
    ended: str
    iterations: tuple[Slice, ...]
    moments: tuple[Entry, ...]

    @property
    def phases(self) -> Iterator[Slice]:
        """Of all iterations."""
        return (phase for iteration in self.iterations for phase in iteration.parts)


def lanes(trail: Trail) -> list[Lane]:
    """One for each training process, by rank, then by time."""
    entries = trail.entries
    last = max((entry.at for entry in entries), default=0.0)
    found = _processes(trail, entries)
    begins = [(each[0].at, _rank(each)) for each in found]
    heights = _heights(found)
    built = []
    for each in found:
        begin, rank = each[0].at, _rank(each)
        again = min((at for at, other in begins if other == rank and at > begin), default=None)
        built.append(_lane(each, rank, last, again, heights))
    return sorted(built, key=lambda lane: (lane.rank, lane.begin))


def sizes(trail: Trail, there: Sequence[Lane]) -> list[tuple[float, int]]:
    """From when on how many active ranks ran the function; 0 once all of its `lanes` have ended."""
    found: list[tuple[float, int]] = []
    for entry in trail.of("run"):
        size = entry.event.attributes.get("world_size")
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 2**31:
            continue
        if not found or found[-1][1] != size:
            found.append((entry.at, size))
    if found and all(lane.ended for lane in there):
        found.append((max(lane.end for lane in there), 0))
    return found


# --- whose event it is --------------------------------------------------------------------------------------------


def _processes(trail: Trail, entries: Sequence[Entry]) -> list[list[Entry]]:
    """The events of each training process, with those of its monitor."""
    trained = {id(entry.source): entry.event.attributes.get("training_pid") for entry in trail.of("watching")}
    found: dict[tuple[str, int, int], list[Entry]] = {}
    for entry in entries:
        if not entry.source.is_monitor:
            found.setdefault(_key(entry.source, entry.source.header.pid), []).append(entry)
    for entry in entries:
        if not entry.source.is_monitor:
            continue
        pid = trained.get(id(entry.source))
        key = _key(entry.source, pid if isinstance(pid, int) else -1)
        key = key if key in found else _latest(found, entry) or key
        found.setdefault(key, []).append(entry)
    for each in found.values():
        each.sort(key=lambda entry: entry.at)
    return list(found.values())


def _key(source: Source, pid: int) -> tuple[str, int, int]:
    return source.header.host, pid, source.header.initial_rank


def _latest(found: Mapping[tuple[str, int, int], list[Entry]], entry: Entry) -> tuple[str, int, int] | None:
    """The process with this initial rank that began last before the event."""
    there = [(each[0].at, key) for key, each in found.items() if each[0].at <= entry.at and _rank(each) == entry.rank]
    return max(there)[1] if there else None


def _rank(entries: Sequence[Entry]) -> int:
    """The last one: a process that joins takes one later."""
    return next((entry.rank for entry in reversed(entries) if not entry.source.is_monitor), entries[-1].rank)


def _heights(found: Iterable[Sequence[Entry]]) -> list[tuple[float, int]]:
    """When the first process came to each next iteration: who is not there by then is gone."""
    starts: dict[int, float] = {}
    for entry in itertools.chain.from_iterable(found):
        if entry.kind == "run":
            before = starts.get(entry.event.iteration, LATEST)
            starts[entry.event.iteration] = min(before, entry.at)
    return sorted((at, iteration) for iteration, at in starts.items())


# --- one process --------------------------------------------------------------------------------------------------


def _lane(
    entries: Sequence[Entry], rank: int, last: float, again: float | None, heights: Sequence[tuple[float, int]]
) -> Lane:
    own = [entry for entry in entries if not entry.source.is_monitor]
    end, ended = _end(entries, own, last, again, heights)
    moments = tuple(entry for entry in entries if entry.kind not in ("phase", "stacks", "call", "watching"))
    header = own[0].source.header if own else None
    return Lane(
        rank,
        header.host if header else "",
        header.pid if header else 0,
        entries[0].at,
        end,
        ended,
        tuple(_iterations(entries, end)),
        moments,
    )


def _end(
    entries: Sequence[Entry],
    own: Sequence[Entry],
    last: float,
    again: float | None,
    heights: Sequence[tuple[float, int]],
) -> tuple[float, str]:
    if not own:
        return entries[-1].at, "gone"
    final = own[-1]
    left = [entry for entry in own if entry.kind in ("left", "call")][-1:]
    if left and left[0].kind == "left":
        return final.at, str(left[0].event.attributes.get("how", "")) or "left"
    died = [entry.at for entry in entries if entry.kind == "died" and entry.at >= final.at]
    if died:
        return died[0], "died"
    on = [at for at, iteration in heights if iteration > final.event.iteration and at > final.at]
    on += [] if again is None else [again]
    return (min(on), "gone") if on else (last, "")


def _iterations(entries: Sequence[Entry], end: float) -> Iterator[Slice]:
    """Its phases, by iteration."""
    phases = list(_phases(entries, end))
    by_iteration: dict[int, list[Entry]] = {}
    for entry in entries:
        by_iteration.setdefault(entry.event.iteration, []).append(entry)
    for (_, number), group in itertools.groupby(phases, lambda each: (each[0].event.call, each[0].event.iteration)):
        each = list(group)
        first, begin = each[0][0], each[0][0].at
        until = each[-1][1]
        inside = [entry for entry in by_iteration[number] if begin <= entry.at <= until]
        size = next((entry.event.attributes.get("world_size") for entry in inside if entry.kind == "run"), None)
        told = {"rank": first.event.rank, "call": first.event.call} | ({} if size is None else {"world size": size})
        cuts = _cuts(inside, each)
        parts = tuple(_phase(entry, stop, cuts) for entry, stop in each)
        yield Slice(begin, until, "start" if number < 0 else f"iteration {number}", parts, told)


def _phases(entries: Sequence[Entry], end: float) -> Iterator[tuple[Entry, float]]:
    """Each with its end: where the next begins, the call is over or the process dies."""
    open_: Entry | None = None
    for entry in entries:
        if entry.kind not in ("phase", "left", "died") or (entry.source.is_monitor and entry.kind != "died"):
            continue
        if open_ is not None:
            yield open_, entry.at
        open_ = entry if entry.kind == "phase" else None
    if open_ is not None:
        yield open_, max(open_.at, end)


def _cuts(inside: Sequence[Entry], phases: Sequence[tuple[Entry, float]]) -> dict[str, float]:
    """The moments of an iteration that divide its phases; `aborting` begins with the one and ends with the other."""
    at: dict[str, float] = {}
    for entry in inside:
        if not entry.source.is_monitor:
            at.setdefault(entry.kind, entry.at)
            if entry.kind == "run" and entry.event.attributes.get("reserve") is True:
                at[RESERVE] = entry.at
    if "interrupted" in at:
        aborts = [stop for entry, stop in phases if entry.event.phase == Phase.ABORT.value]
        at.setdefault("aborted", max([at["interrupted"], *aborts]))
    return at


def _phase(entry: Entry, stop: float, at: Mapping[str, float]) -> Slice:
    """What is inside it: in the function what it did, and in each phase the abort, which another thread does."""
    begin, interrupted = entry.at, at.get("interrupted", LATEST)
    marks: list[tuple[float, float, str]] = []
    if entry.event.phase == Phase.RUN.value:
        first = at.get("first_step", begin)
        marks.append((begin, min(first, interrupted), FIRST_STEP))
        marks.append((max(begin, first), interrupted, RESERVE if RESERVE in at else STEPS))
        marks.append((at.get("aborted", LATEST), stop, LEAVING))
    marks.append((interrupted, at.get("aborted", interrupted), ABORTING))
    clipped = [(max(begin, b), min(stop, e), name) for b, e, name in marks]
    parts = (Slice(b, e, name) for b, e, name in sorted(clipped) if e > b)
    return Slice(begin, stop, entry.event.phase, tuple(parts), {"after": entry.event.attributes.get("after", "")})
