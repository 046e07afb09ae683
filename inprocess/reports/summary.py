"""Where the time of each job went, as its run directory remembers it: also of what its events do not say any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from inprocess.attribution import ranges
from inprocess.reports.accounting import Accounting, Loss, account, merge
from inprocess.reports.incident import Incident, all_incidents
from inprocess.reports.reading import Trail
from inprocess.system import private_folder, strict_json

__all__ = ["FOLDER", "SUMMARY", "accounted", "gaps", "look", "numbered", "read_summary"]

#: below this in the run directory, a folder for each incident, such as 0003
FOLDER = "incidents"
#: where the time of each job went, with all of its incidents, also those that are not kept
SUMMARY = "summary.json"
#: some 50,000 incidents
MAX_BYTES = 1 << 24
#: what is known of an incident changes its beginning by less (seconds)
SAME_S = 60.0


def numbered(summary: Sequence[Accounting], trails: Sequence[Trail]) -> list[tuple[Trail, list[Incident]]]:
    """The incidents of each job, with the numbers that they had before, as the summary says.

    The events count restarts anew in each call and each launch, and of those that are gone they do not know how many
    there were.
    """
    known: dict[tuple[str, int, int], list[Loss]] = {}
    for time in summary:
        for loss in time.losses:
            known.setdefault((time.job, loss.call, loss.iteration), []).append(loss)
    jobs, shift = [], 0
    for trail, found in all_incidents(trails):
        shifts = [_shift(each, known.get((trail.job, each.call, each.iteration), ())) for each in found]
        shift = next((each for each in shifts if each is not None), shift)
        now = []
        for incident, each in zip(found, shifts, strict=True):
            shift = max(shift, each or 0)  # no number twice
            now.append(replace(incident, number=incident.number + shift))
        jobs.append((trail, now))
    return jobs


def _shift(incident: Incident, known: Sequence[Loss]) -> int | None:
    """By how much its number was higher; None: it was not known."""
    nearest = min(known, key=lambda loss: abs(loss.at - incident.at), default=None)
    if nearest is None or abs(nearest.at - incident.at) > SAME_S:
        return None
    return max(0, nearest.number - incident.number)


def accounted(summary: Sequence[Accounting], jobs: Sequence[tuple[Trail, list[Incident]]]) -> list[Accounting]:
    """Of each job; of one whose oldest events are gone, with what the summary knew of them."""
    before = {time.job: time for time in summary}
    found = [time for trail, incidents in jobs if (time := account(trail, incidents)) is not None]
    return [merge(before[time.job], time) if time.job in before else time for time in found]


def read_summary(run_dir: str) -> list[Accounting]:
    """The time of each job, as it was when something was last written; empty where that is nothing, or damaged."""
    data = look(run_dir, SUMMARY, MAX_BYTES)
    try:
        told = strict_json.parse(data, MAX_BYTES)
        if (told["format"], told["version"]) != ("inprocess-summary", 1):
            return []
        return [Accounting.from_row(row) for row in told["jobs"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def look(run_dir: str, name: str, limit: int) -> bytes:
    """What is in a file beside the incidents; nothing where that is none."""
    try:
        with private_folder.look(run_dir, FOLDER) as folder:
            return folder.read(name, limit)
    except OSError:
        return b""


def gaps(incidents: Iterable[Incident], times: Iterable[Accounting]) -> str:
    """The numbers of incidents of which nothing is known any more, such as ``1-44``; empty: there are none."""
    known = {incident.number for incident in incidents} | {loss.number for time in times for loss in time.losses}
    missing = set(range(1, max(known, default=0))) - known
    return ranges(sorted(missing)) if missing else ""
