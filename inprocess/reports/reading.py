"""Reading a run directory, as far as it can be read: what is wrong with it is named, and the rest is used."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from inprocess.attribution import one_line
from inprocess.events.files import FOLDER, MAX_FILE_BYTES, RELAYED
from inprocess.events.record import MAX_LINE_BYTES, Event, Header, parse
from inprocess.system import clock, private_folder
from inprocess.system.private_folder import Folder

__all__ = ["LATEST", "Entry", "Source", "Trail", "lines", "read"]

#: files that are read at most, and problems that are named
MAX_FILES, MAX_PROBLEMS = 100_000, 50
#: by how much the wall clock of a host is set, at most, while its name stands for the same monotonic clock (seconds)
SAME_CLOCK_S = 180.0
#: a time behind this one is none: the calendar ends, and nothing is drawn so far away (seconds since 1970)
LATEST = 1.8e10
#: a new file may be empty for a moment (seconds)
JUST_MADE_S = 0.2


@dataclass(frozen=True)
class Source:
    """A process that wrote events; ``offset``: the wall clock of its host when the monotonic clock was 0."""

    header: Header
    offset: float = field(default=0.0, compare=False)

    @property
    def is_monitor(self) -> bool:
        return self.header.role == "monitor"


@dataclass(frozen=True)
class Entry:
    """One event, who wrote it, and when: in seconds since 1970 by the clock that all processes of its host share."""

    at: float
    source: Source
    event: Event

    @property
    def kind(self) -> str:
        return self.event.kind

    @property
    def rank(self) -> int:
        """The initial rank that it is about."""
        return self.event.initial_rank


_moment = attrgetter("at")


@dataclass
class Trail:
    """Everything that one job left in a run directory, by time."""

    job: str
    entries: list[Entry] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    _kinds: dict[str, list[Entry]] = field(default_factory=dict)

    def settle(self) -> None:
        """All entries are there: put them in order."""
        self.entries.sort(key=_moment)
        self._kinds.clear()
        for entry in self.entries:
            self._kinds.setdefault(entry.kind, []).append(entry)

    def of(self, *kinds: str) -> Sequence[Entry]:
        """The entries of these kinds, by time."""
        found = [self._kinds.get(kind, []) for kind in kinds]
        return found[0] if len(found) == 1 else sorted(chain.from_iterable(found), key=_moment)

    def between(self, after: float, before: float) -> Sequence[Entry]:
        """Those after one moment and before another."""
        begin, end = bisect_right(self.entries, after, key=_moment), bisect_left(self.entries, before, key=_moment)
        return self.entries[begin:end]


class _Files:
    """All files of a directory, and what is wrong with them."""

    def __init__(self) -> None:
        self.trails: dict[str, Trail] = {}
        self.problems: list[str] = []
        #: host -> its wall clock when its monotonic clock was 0, once for each time that it was started
        self._offsets: dict[str, list[float]] = {}

    def read(self, folder: Folder, name: str) -> None:
        source: Source | None = None
        bad = number = 0
        for number, line in enumerate(lines(folder, name), 1):
            if not line.strip():
                continue
            try:
                found = parse(line)
                if isinstance(found, Header):
                    source = self._begin(found)
                elif source is None:
                    raise ValueError("no header comes before it")
                else:
                    self._add(source, found)
            except ValueError as error:
                bad += 1
                if bad == 1:
                    self.blame(f"{name}: line {number} is left out: {one_line(str(error), 200)}")
        if bad > 1:
            self.blame(f"{name}: {bad} lines are left out in all")
        if not number and clock.wall() - folder.stat(name).st_mtime > JUST_MADE_S:
            self.blame(f"{name}: it is empty, as where the disk was full")

    def _begin(self, header: Header) -> Source:
        offset, known = header.wall_time - header.time, self._offsets.setdefault(header.host, [])
        # one for all processes of a host, although the wall clock may be set meanwhile; a pod that is replaced keeps
        # its name, and may run on another machine, with another clock
        near = next((each for each in known if abs(each - offset) <= SAME_CLOCK_S), None)
        if near is None:
            known.append(offset)
        source = Source(header, offset if near is None else near)
        self._trail(header).sources.append(source)
        return source

    def _trail(self, header: Header) -> Trail:
        return self.trails.setdefault(header.job, Trail(header.job))

    def _add(self, source: Source, event: Event) -> None:
        at = event.time + source.offset
        if abs(at - event.wall_time) > 3600:  # the host was started anew, or its clock was set
            at = event.wall_time
        if not 0 <= at < LATEST:
            raise ValueError(f"it is of {at:.6g} seconds after 1970, which is no time")
        self._trail(source.header).entries.append(Entry(at, source, event))

    def blame(self, problem: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(one_line(problem))


def read(run_dir: str, in_job: bool = False) -> tuple[list[Trail], list[str]]:
    """What jobs left there, the one that began first first, and what is wrong with the directory, in words.

    Args:
        run_dir: the directory.
        in_job: the events have to be this user's own, also where that is root.

    Raises:
        OSError: there is no such directory, or it has no events.
    """
    below = os.path.join(run_dir, FOLDER)
    if not os.path.isdir(run_dir):
        raise FileNotFoundError(f"{run_dir} is no directory")
    if not os.path.isdir(below):
        raise FileNotFoundError(
            f"{run_dir} is no run directory: there is no folder 'events' in it. A job writes one with "
            "Wrapper(run_dir=...), INPROCESS_RUN_DIR=... or `inprocess run --run-dir ...`"
        )
    with private_folder.own(run_dir, FOLDER) if in_job else private_folder.look(run_dir, FOLDER) as folder:
        return _read(folder)


def _read(folder: Folder) -> tuple[list[Trail], list[str]]:
    files = _Files()
    # what was set aside first
    names = sorted(folder.names(), key=lambda name: (name.removesuffix(".1"), not name.endswith(".1")))
    there = set(names)
    # what went through the store, since that rank's own file was not here, or the disk was full
    names = [
        name
        for name in names
        if not (name.startswith(RELAYED) and _own(name) in there and _has_content(folder, _own(name)))
    ]
    for name in names[:MAX_FILES]:
        if not name.endswith((".jsonl", ".jsonl.1")):
            files.blame(f"{name[:200]}: no file of events")
            continue
        try:
            files.read(folder, name)
        except OSError as error:
            files.blame(f"{name[:200]}: {error.strerror or error}")
    trails = [trail for trail in files.trails.values() if trail.entries]
    for trail in trails:
        trail.settle()
    trails.sort(key=lambda trail: trail.entries[0].at)
    if len(trails) > 1:
        jobs = ", ".join(one_line(trail.job, 60) for trail in trails)
        files.blame(f"{len(trails)} jobs share this directory: {jobs}; their incidents follow each other")
    return trails, files.problems


def _has_content(folder: Folder, name: str) -> bool:
    try:
        return folder.stat(name).st_size > 0
    except OSError:  # it is just being set aside
        return True


def _own(relayed: str) -> str:
    """The file that the rank itself writes; it may have set none aside yet."""
    return f"rank{relayed.removeprefix(RELAYED).removesuffix('.1')}"


def lines(folder: Folder, name: str) -> Iterator[bytes]:
    """Of one file, as far as they are looked into."""
    with open(folder.open(name), "rb") as file:
        left = 2 * MAX_FILE_BYTES
        while left > 0 and (line := file.readline(MAX_LINE_BYTES + 2)):
            left -= len(line)
            yield line
