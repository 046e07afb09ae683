"""From what is known of a job to the values of its metrics. Pure: it knows neither Prometheus' library nor a file.

A counter never goes backwards while one `Counters` lives, although what is known of the past may change: what was
productive turns out to be repeated, and an incident gets another class once more is known of it. The gauge
``inprocess_goodput_ratio`` follows such corrections.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inprocess.events.status_files import stale_after
from inprocess.reports.accounting import Accounting, Loss, total
from inprocess.reports.incident import AROUND, PHASES
from inprocess.reports.verdict import CLASSES

__all__ = ["BUCKETS", "METRICS", "Counters", "Family", "Histogram", "families"]

#: of histograms (seconds); a hang may take minutes to be noticed
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
#: name -> (kind, labels, what it is)
METRICS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "inprocess_restarts_total": ("counter", ("class",), "Interruptions of the job, by class of their first fault."),
    "inprocess_restart_seconds": (
        "histogram",
        (),
        "From the interruption until the function was called again, without the time until the fault was noticed.",
    ),
    "inprocess_restart_phase_seconds": (
        "histogram",
        ("phase",),
        "Phases of each restart, from the fault to the first step.",
    ),
    "inprocess_productive_seconds_total": ("counter", (), "Time in which the function ran and its steps were kept."),
    "inprocess_lost_seconds_total": (
        "counter",
        ("class",),
        "Time from a fault until the function was called again, by class of the fault.",
    ),
    "inprocess_repeated_seconds_total": ("counter", (), "Time before faults that went into steps that are done again."),
    "inprocess_waiting_seconds_total": ("counter", (), "Time in which restarts waited for processes that join."),
    "inprocess_start_seconds_total": ("counter", (), "Time until the function was called for the first time."),
    "inprocess_repeated_steps_total": ("counter", (), "Steps that are done again."),
    "inprocess_goodput_ratio": ("gauge", (), "Productive share of the time since the job began."),
    "inprocess_world_size": ("gauge", (), "Ranks that run the function."),
    "inprocess_reserves": ("gauge", (), "Ranks in reserve."),
    "inprocess_rank_up": ("gauge", ("rank", "host"), "1 while the rank is in the job and its monitor writes, else 0."),
    "inprocess_step": ("gauge", ("rank",), "Steps of the rank in the running iteration."),
    "inprocess_progress_age_seconds": ("gauge", ("rank",), "Time since the rank last made progress."),
    "inprocess_heartbeat_age_seconds": ("gauge", ("rank",), "Time since the rank was last heard of by the others."),
    "inprocess_memory_bytes": ("gauge", ("rank",), "Resident memory of the rank's process."),
    "inprocess_build_info": ("gauge", ("version",), "Always 1; the version of the library that serves the metrics."),
}
Live = Mapping[str, Any]


@dataclass(frozen=True)
class Histogram:
    """How many were at most as long as each of `BUCKETS`, all of them last; and their sum."""

    counts: tuple[int, ...] = (0,) * (len(BUCKETS) + 1)
    sum: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Histogram:
        counts, each = [0] * (len(BUCKETS) + 1), list(values)
        for value in each:
            for index in range(bisect_left(BUCKETS, value), len(counts)):
                counts[index] += 1
        return cls(tuple(counts), sum(each))

    def at_least(self, other: Histogram) -> Histogram:
        """The larger one of each count, which are cumulative still."""
        return Histogram(tuple(map(max, self.counts, other.counts)), max(self.sum, other.sum))


#: these values of a label are there from the first answer on: Prometheus sees no increase in a counter that begins at 1
_EMPTY: tuple[tuple[str, Iterable[str], float | Histogram], ...] = (
    ("inprocess_restarts_total", CLASSES, 0.0),
    ("inprocess_lost_seconds_total", CLASSES, 0.0),
    ("inprocess_restart_phase_seconds", PHASES, Histogram()),
)
Samples = Mapping[tuple[str, ...], float | Histogram]


@dataclass(frozen=True)
class Family:
    """One metric with its values, by values of its labels."""

    name: str
    samples: Samples

    @property
    def kind(self) -> str:
        return METRICS[self.name][0]

    @property
    def labels(self) -> tuple[str, ...]:
        return METRICS[self.name][1]

    @property
    def help(self) -> str:
        return METRICS[self.name][2]


class Counters:
    """What was served before, so that no counter goes backwards, and no incident is counted in two classes."""

    def __init__(self) -> None:
        self._classes: dict[tuple[str, int], str] = {}
        self._highest: dict[str, dict[tuple[str, ...], float | Histogram]] = {}

    def settled(self, jobs: Iterable[Accounting]) -> list[Accounting]:
        """Each incident with the class with which it was first counted."""
        return [dataclasses.replace(job, losses=tuple(self._settled(job.job, job.losses))) for job in jobs]

    def _settled(self, job: str, losses: Iterable[Loss]) -> Iterator[Loss]:
        for loss in losses:
            yield dataclasses.replace(loss, kind=self._classes.setdefault((job, loss.number), loss.kind))

    def kept(self, families: Iterable[Family]) -> Iterator[Family]:
        """With counters and histograms at least as high as they were."""
        for family in families:
            if family.kind == "gauge":
                yield family
                continue
            highest = self._highest.setdefault(family.name, {})
            for labels, value in family.samples.items():
                highest[labels] = _higher(value, highest.get(labels))
            yield Family(family.name, dict(highest))


def _higher(value: float | Histogram, before: float | Histogram | None) -> float | Histogram:
    if before is None:
        return value
    if isinstance(value, Histogram):
        return value.at_least(before) if isinstance(before, Histogram) else value
    return value if isinstance(before, Histogram) else max(value, before)


def families(jobs: Sequence[Accounting], ranks: Sequence[Live], now: float, version: str) -> list[Family]:
    """All metrics.

    Args:
        jobs: where their time went, as far as that was written.
        ranks: live files; of a rank with several the last one counts.
        now: seconds since 1970.
        version: of this library.
    """
    samples: dict[str, Samples] = {**_of_jobs(jobs, ranks), **_of_ranks(_latest(ranks, now), now)}
    for name, values, nothing in _EMPTY:
        samples[name] = {**{(value,): nothing for value in values}, **samples.get(name, {})}
    samples["inprocess_build_info"] = {(version,): 1.0}
    return [Family(name, samples.get(name, {})) for name in METRICS]


# --- time ---------------------------------------------------------------------------------------------------------


def _of_jobs(jobs: Sequence[Accounting], ranks: Sequence[Live]) -> dict[str, Samples]:
    time = total(jobs)
    if time is None:
        return {}
    running = [_since(job, [rank for rank in ranks if rank["job"] == job.job]) for job in jobs]
    productive = time.productive + sum(each for each, _ in running)
    seconds = time.seconds + sum(each for _, each in running)
    return {
        "inprocess_restarts_total": {(kind,): float(count) for kind, count in time.restarts.items()},
        "inprocess_restart_seconds": {(): Histogram.of(_restarts(time.losses))},
        "inprocess_restart_phase_seconds": {
            (name,): Histogram.of(value for loss in time.losses if (value := loss.phases.get(name)) is not None)
            for name in PHASES
        },
        "inprocess_productive_seconds_total": {(): productive},
        "inprocess_lost_seconds_total": {(kind,): sum(each.values()) for kind, each in time.lost.items()},
        "inprocess_repeated_seconds_total": {(): time.repeated},
        "inprocess_waiting_seconds_total": {(): time.waiting},
        "inprocess_start_seconds_total": {(): time.starting},
        "inprocess_repeated_steps_total": {(): float(time.repeated_steps)},
        "inprocess_goodput_ratio": {(): min(1.0, productive / seconds) if seconds > 0 else 1.0},
    }


def _since(job: Accounting, ranks: Sequence[Live]) -> tuple[float, float]:
    """(productive, all) seconds since the last event that is accounted for.

    What went by since the last progress of any rank may have been a hang, and is not productive yet.
    """
    if not ranks:
        return 0.0, 0.0
    newest = max((rank["call"], rank["iteration"]) for rank in ranks)
    here = [rank for rank in ranks if (rank["call"], rank["iteration"]) == newest]
    moments = [_productive_until(rank) for rank in here]
    until = max((moment for moment in moments if moment is not None), default=0.0)
    last = max(rank["wall_time"] for rank in ranks)
    return max(0.0, min(until, last) - job.end), max(0.0, last - job.end)


def _productive_until(rank: Live) -> float | None:
    if rank["state"] == "left":
        return float(rank["wall_time"])
    if rank["state"] != "running" or rank["phase"] != "run" or rank["role"] != "active":
        return None
    return float(rank["wall_time"]) - max(0.0, rank["progress_age"] or 0.0)


def _restarts(losses: Iterable[Loss]) -> Iterator[float]:
    """Of those that led to another call of the function."""
    for loss in losses:
        parts = [value for name, value in loss.phases.items() if name not in AROUND]
        known = [value for value in parts if value is not None]
        if known and len(known) == len(parts):
            yield sum(known)


# --- ranks --------------------------------------------------------------------------------------------------------


def _latest(ranks: Iterable[Live], now: float) -> list[Live]:
    """One for each initial rank, by rank.

    A monitor whose rank has left may stay for others, and renew its file beside that of the rank's next call.
    """
    found: dict[int, Live] = {}
    for rank in sorted(ranks, key=lambda each: (each["initial_rank"], _is_up(each, now), each["wall_time"])):
        found[rank["initial_rank"]] = rank
    return list(found.values())


def _is_up(rank: Live, now: float) -> bool:
    return bool(rank["state"] == "running" and now - rank["wall_time"] < stale_after(rank))


def _of_ranks(ranks: Sequence[Live], now: float) -> dict[str, Samples]:
    ages = ("inprocess_progress_age_seconds", "inprocess_heartbeat_age_seconds")
    names = ("inprocess_rank_up", "inprocess_step", "inprocess_memory_bytes", *ages)
    found: dict[str, dict[tuple[str, ...], float | Histogram]] = {name: {} for name in names}
    for rank in ranks:
        labels = (str(rank["initial_rank"]),)
        age = max(0.0, now - rank["wall_time"])
        is_there = rank["state"] == "running"
        found["inprocess_rank_up"][(labels[0], rank["host"])] = float(_is_up(rank, now))
        found["inprocess_step"][labels] = float(rank["steps"])
        for name in ("progress_age", "heartbeat_age") if is_there else ():
            if rank[name] is not None:
                found[f"inprocess_{name}_seconds"][labels] = max(0.0, rank[name]) + age
        if is_there and rank["memory_bytes"] is not None:
            found["inprocess_memory_bytes"][labels] = float(rank["memory_bytes"])
    sizes = {f"inprocess_{name}": _newest(ranks, name) for name in ("world_size", "reserves")}
    return {**found, **sizes}


def _newest(ranks: Iterable[Live], name: str) -> Samples:
    """What those in the latest iteration say, the last one of them; 0 once nobody is left."""
    here = list(ranks)
    there = [rank for rank in here if rank["state"] == "running"]
    if here and not there:
        return {(): 0.0}
    known = [rank for rank in there if rank[name] is not None]
    if not known:
        return {}
    newest = max(known, key=lambda rank: (rank["call"], rank["iteration"], rank["wall_time"]))
    return {(): float(newest[name])}
