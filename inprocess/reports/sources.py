"""What metrics are made of, read from a run directory: cheap, since it is read again every two seconds.

Nobody waits for it but the thread that reads; where the disk does not answer, what was read last stays.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

from inprocess.events import files
from inprocess.events.record import Event, Header, parse
from inprocess.reports import live_reading
from inprocess.reports.accounting import Accounting
from inprocess.reports.reading import lines
from inprocess.reports.summary import FOLDER, SUMMARY, read_summary
from inprocess.system.private_folder import Folder, look

__all__ = ["Sources", "status_files"]

#: files of events, and lines of each, that are looked into for the beginning of a job
MAX_FIRST, MAX_LINES = 64, 1000
_OF_RANKS = re.compile(r"rank-.*\.jsonl")


class Sources:
    """Reads one run directory, again and again; only what has changed, where it can tell."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._mark: tuple[int, ...] = ()
        self._summary: list[Accounting] = []
        #: jobs of which nothing was written yet: without an incident there is no summary
        self._begun: dict[str, Accounting] = {}

    def read(self) -> tuple[list[Accounting], list[dict[str, Any]]]:
        """Where the time of each job went, as far as that was written, and the live files."""
        self._read_summary()
        ranks = status_files(self._run_dir)
        known = {time.job for time in self._summary}
        wanted = {rank["job"] for rank in ranks} - known
        if wanted - self._begun.keys() or not (known or self._begun):
            for time in beginnings(self._run_dir):
                self._begun.setdefault(time.job, time)
        return [*self._summary, *(time for job, time in self._begun.items() if job not in known)], ranks

    def _read_summary(self) -> None:
        """Once it has been replaced."""
        try:
            found = os.stat(os.path.join(self._run_dir, FOLDER, SUMMARY), follow_symlinks=False)
        except OSError:
            return
        mark = (found.st_ino, found.st_size, found.st_mtime_ns)
        if mark != self._mark:
            self._mark, self._summary = mark, read_summary(self._run_dir) or self._summary


def status_files(run_dir: str) -> list[dict[str, Any]]:
    """What the monitors last wrote of their ranks. What is no such file is left out."""
    try:
        found, _ = live_reading.read(run_dir)
    except OSError:
        return []
    return [rank.live for rank in found]


def beginnings(run_dir: str) -> Iterator[Accounting]:
    """When jobs began and first called their function, as the first ranks' events say."""
    try:
        folder = look(run_dir, files.FOLDER)
    except OSError:
        return
    with folder:
        for name in sorted(folder.names(_OF_RANKS), key=_rank)[:MAX_FIRST]:
            with contextlib.suppress(OSError):
                yield from _beginnings(folder, name)


def _rank(name: str) -> tuple[int, str]:
    number = name.split("-")[1]
    return int(number) if number.isdecimal() and len(number) <= 9 else 1 << 30, name


def _beginnings(folder: Folder, name: str) -> Iterator[Accounting]:
    header: Header | None = None
    for number, line in enumerate(lines(folder, name)):
        if number >= MAX_LINES:
            return
        try:
            found = parse(line)
        except ValueError:
            continue
        if isinstance(found, Header):
            header = found
        elif isinstance(found, Event) and found.kind == "run" and header is not None:
            yield Accounting(header.job, header.wall_time, found.wall_time, found.wall_time)
            header = None
