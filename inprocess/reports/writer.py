"""The program that writes the incidents of a run directory: a folder for each, with its report as JSON and as a page.

A monitor process starts it, see ``events/incidents``. Each file is replaced as a whole, so a reader never sees half of
one. What is there already, and would say the same, is left alone; what was incomplete is written again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from inprocess.reports.accounting import LATE, Accounting, total
from inprocess.reports.drawing import svg
from inprocess.reports.history import History, histories
from inprocess.reports.incident import Incident
from inprocess.reports.page import incident_page, index_page
from inprocess.reports.reading import Trail, read
from inprocess.reports.summary import FOLDER, SUMMARY, accounted, look, numbered, read_summary
from inprocess.system import clock, descriptors, private_folder
from inprocess.system.private_folder import Folder

__all__ = ["main", "write"]

#: the page with all of them, in the run directory
INDEX = "index.html"
#: so many are kept, the latest ones
MAX_INCIDENTS = 200
#: which incidents are there: job, call and iteration of the last one of each job
MARK = "latest.json"
#: how much later an incident is written again of which something was missing (seconds), such as its first step
AGAIN_S = 6.0
#: how often it is looked whether another one has written, and how long one before is waited for: it may write for long,
#: or for a disk that does not answer (seconds)
LOOK_S, BEFORE_S = 0.25, 30.0
#: a file that was being written when its writer was killed is removed after so long (seconds)
STALE_S = 3600.0
MAX_MARK_BYTES = 1 << 16
#: a folder of an incident; what is in one; and what a writer that was killed left of any file
_INCIDENT = re.compile(r"\d{4,9}")
_REPORT = re.compile(r"incident\.(json|html)(\.\d+)?")
_BESIDE = re.compile(r"(incident|latest|summary)\.(json|html)\.\d+")


def main(told: Mapping[str, Any]) -> int:
    """The program."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    work(told)
    return 0


def work(told: Mapping[str, Any]) -> None:
    """Write them.

    ``told``: ``run_dir``; ``unless``: what another one may have written within ``after`` seconds; ``before``: the
    process that may still write them, and ends first; ``last``: it is not worth while to wait for what is missing;
    ``writes``: false where that process is only waited for. SIGTERM asks not to wait for what is missing, since its
    monitor, which ends, writes all that there is.
    """
    run_dir = str(told["run_dir"])
    if told["before"] is not None and not _has_ended(int(told["before"])):
        return
    if not told["writes"] or (
        told["unless"] is not None and _is_written_within(told["after"], run_dir, *told["unless"])
    ):
        return
    if not write(run_dir) and not told["last"] and not _is_to_end(AGAIN_S):
        write(run_dir)


def _has_ended(pid: int) -> bool:
    """A child, which is reaped when this process ends."""
    pidfd = os.pidfd_open(pid)
    try:
        return descriptors.await_readable(pidfd, BEFORE_S)
    finally:
        os.close(pidfd)


def _is_written_within(seconds: float, *what: Any) -> bool:
    for _ in range(round(seconds / LOOK_S)):
        if _is_written(*what):
            return True
        _is_to_end(LOOK_S)
    return _is_written(*what)


def _is_to_end(seconds: float) -> bool:
    """Wait; whether it was asked to end."""
    return signal.sigtimedwait({signal.SIGTERM}, seconds) is not None


def write(run_dir: str) -> bool:
    """Write what is not there yet. Returns: whether nothing is missing of the latest incident.

    Raises:
        OSError: the events cannot be read, or nothing can be written.
    """
    trails, _ = read(run_dir, in_job=True)
    summary = read_summary(run_dir)
    jobs = numbered(summary, trails)
    found = [(trail, each) for trail, incidents in jobs for each in incidents]
    told = histories([incident for _, incident in found])
    kept = list(zip(found, told, strict=True))[-MAX_INCIDENTS:]
    with private_folder.own(run_dir) as above, private_folder.own(run_dir, FOLDER) as folder:
        for number, ((trail, incident), history) in enumerate(kept, 1):
            if number > len(kept) - LATE or not _is_there(folder, incident):
                _write_one(folder, trail, incident, history)
        _tidy(folder, found[-1][1].number if found else 0)
        times = accounted(summary, jobs)
        latest = [(trail.job, incidents[-MAX_INCIDENTS:]) for trail, incidents in jobs]
        _replace(above, INDEX, index_page(latest, total(times), FOLDER, svg(jobs)))
        _replace(folder, SUMMARY, _summary(times))
        # last, when all is there
        marks = {trail.job: [incident.call, incident.iteration] for trail, incident in found}
        _replace(folder, MARK, json.dumps(marks))
    return not found or found[-1][1].is_whole


def _summary(times: Sequence[Accounting]) -> str:
    told = {"format": "inprocess-summary", "version": 1, "jobs": [time.to_row() for time in times]}
    return json.dumps(told) + "\n"


def _is_there(folder: Folder, incident: Incident) -> bool:
    try:
        with folder.below(f"{incident.number:04d}", makes=False) as own:
            return bool(own.stat("incident.html"))
    except FileNotFoundError:
        return False


def _write_one(folder: Folder, trail: Trail, incident: Incident, history: History) -> None:
    told = {"format": "inprocess-incident", "version": 1, "job": trail.job}
    told |= incident.to_json() | {"history": history.to_json(), "ranks": incident.ranks_to_json()}
    with folder.below(f"{incident.number:04d}") as own:
        _replace(own, "incident.json", json.dumps(told, indent=1) + "\n")
        _replace(own, "incident.html", incident_page(incident, history, trail.job))


def _replace(folder: Folder, name: str, text: str) -> None:
    """In one step, and only where something changes."""
    data = text.encode(errors="replace")
    if _read(folder, name, len(data) + 1) != data:
        folder.replace(name, data)


def _read(folder: Folder, name: str, limit: int) -> bytes:
    """Nothing, where that is no file that can be read."""
    try:
        return folder.read(name, limit)
    except OSError:
        return b""


def _is_written(run_dir: str, job: str, call: int, iteration: int) -> bool:
    try:
        mark = json.loads(look(run_dir, MARK, MAX_MARK_BYTES)).get(job)
        return tuple(mark) >= (call, iteration)
    except (ValueError, TypeError, AttributeError):  # there is none, or it is something else
        return False


def _tidy(folder: Folder, latest: int) -> None:
    """Older incidents than those that are kept, and what a writer that was killed left."""
    _remove_stale(folder)
    for name in folder.names(_INCIDENT):
        with contextlib.suppress(OSError):
            if int(name) <= latest - MAX_INCIDENTS:
                folder.remove_below(name, _REPORT)
                continue
            with folder.below(name, makes=False) as own:
                _remove_stale(own)


def _remove_stale(folder: Folder) -> None:
    for name in folder.names(_BESIDE):
        with contextlib.suppress(OSError):
            if clock.wall() - folder.stat(name).st_mtime > STALE_S:
                folder.remove(name)
