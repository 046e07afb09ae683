"""Where the time of a job went: what was productive, what each restart cost and why. The parts add up to the whole.

It is the time of the job, not of each rank: a job restarts as a whole, so its ranks lose the same seconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from operator import itemgetter
from typing import Any

from inprocess.reports.incident import ENDED, PHASES, Incident
from inprocess.reports.launches import launches
from inprocess.reports.reading import Trail

__all__ = ["LATE", "OTHER", "Accounting", "Loss", "account", "merge", "total"]

#: the part of a restart of which nothing is known, in place of one of `PHASES`
OTHER = "other"
#: of so many incidents, the latest, more may become known
LATE = 5


@dataclass(frozen=True)
class Loss:
    """What one incident cost.

    Attributes:
        number: of the incident.
        kind: class of its verdict.
        seconds: from the fault until the function was called again, without ``waiting``.
        waiting: of that time, for processes that replace others, since there were too few ranks.
        repeated: before the fault, for steps that are done again.
        steps: begun in the iteration that was interrupted.
        repeated_steps: of these, those that are done again.
        phases: how long each of `PHASES` took, to the first step; None: not known.
        call, iteration, at: which one it was: see `Incident`.
    """

    number: int
    kind: str
    seconds: float
    waiting: float
    repeated: float
    steps: int
    repeated_steps: int
    phases: Mapping[str, float | None]
    call: int = 0
    iteration: int = 0
    at: float = 0.0

    def by_phase(self) -> Iterator[tuple[str, float]]:
        """Parts of ``seconds``. The last phase, to the first step, is none of them: the function runs."""
        left = self.seconds
        for name in PHASES[:-1]:
            part = min(left, self.phases.get(name) or 0.0)
            if part > 0.0:
                left -= part
                yield name, part
        if left > 1e-6:  # less is an error of rounding
            yield OTHER, left


@dataclass(frozen=True)
class Accounting:
    """The time of one job.

    Attributes:
        job: as in the header of the events; empty for several together.
        begin, started, end: the first event, the function's first call and the last event (seconds since 1970). Where
            a launch that nothing interrupted is followed by another one, ``started`` is later by the time between them.
        losses: one for each incident, by number.
        last_steps: begun in iterations that nothing interrupted.
    """

    job: str
    begin: float
    started: float
    end: float
    losses: tuple[Loss, ...] = ()
    last_steps: int = 0

    @property
    def seconds(self) -> float:
        """The whole."""
        return self.end - self.begin

    @property
    def starting(self) -> float:
        """Before the function was called for the first time, in each launch that no fault has caused."""
        return self.started - self.begin

    @property
    def lost(self) -> dict[str, dict[str, float]]:
        """Class -> phase -> seconds."""
        found: dict[str, dict[str, float]] = {}
        for loss in self.losses:
            phases = found.setdefault(loss.kind, {})
            for name, seconds in loss.by_phase():
                phases[name] = phases.get(name, 0.0) + seconds
        return found

    @property
    def repeated(self) -> float:
        return sum(loss.repeated for loss in self.losses)

    @property
    def waiting(self) -> float:
        return sum(loss.waiting for loss in self.losses)

    @property
    def productive(self) -> float:
        """What is left: the function ran, and what it did was kept."""
        lost = sum(loss.seconds for loss in self.losses)
        return max(0.0, self.seconds - self.starting - lost - self.repeated - self.waiting)

    @property
    def goodput(self) -> float:
        """The productive share of the whole."""
        return min(1.0, self.productive / self.seconds) if self.seconds > 0.0 else 1.0

    @property
    def restarts(self) -> Mapping[str, int]:
        """Class -> incidents."""
        return Counter(loss.kind for loss in self.losses)

    @property
    def repeated_steps(self) -> int:
        return sum(loss.repeated_steps for loss in self.losses)

    @property
    def kept_steps(self) -> int:
        return max(0, sum(loss.steps for loss in self.losses) + self.last_steps - self.repeated_steps)

    def to_json(self) -> dict[str, Any]:
        """As ``inprocess report --json`` prints it; in seconds."""
        lost = {kind: {name: round(s, 6) for name, s in phases.items()} for kind, phases in self.lost.items()}
        parts = ("seconds", "productive", "starting", "repeated", "waiting")
        return {name: round(getattr(self, name), 6) for name in parts} | {
            "lost": lost,
            "restarts": dict(self.restarts),
            "kept_steps": self.kept_steps,
            "repeated_steps": self.repeated_steps,
        }

    def to_row(self) -> dict[str, Any]:
        """All of it, for `from_row`."""
        return asdict(self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Accounting:
        """Raises ValueError, TypeError or KeyError for anything but what `to_row` made, here or in a newer version."""
        losses = tuple(Loss(**_known(Loss, each)) for each in row["losses"])
        found = cls(**{**_known(cls, row), "losses": losses})
        numbers = [found.begin, found.started, found.end, found.last_steps]
        for loss in losses:
            if not isinstance(loss.kind, str):
                raise TypeError("the class of an incident is no text")
            numbers += [loss.number, loss.seconds, loss.waiting, loss.repeated, loss.steps, loss.repeated_steps]
            numbers += [loss.call, loss.iteration, loss.at]
            numbers += [seconds for seconds in loss.phases.values() if seconds is not None]
        if not isinstance(found.job, str) or not all(isinstance(each, int | float) for each in numbers):
            raise TypeError("a field is of another type")
        return found


def _known(kind: type[Accounting | Loss], row: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: row[field.name] for field in fields(kind) if field.name in row}


def account(trail: Trail, found: Sequence[Incident]) -> Accounting | None:
    """Of one job with these incidents; None: its function never ran."""
    each = launches(trail)
    runs = sorted(
        (entry.at, (number, entry.event.call, entry.event.iteration))
        for number, launch in enumerate(each)
        for entry in launch.of("run")
    )
    if not runs:
        return None
    begin, end = trail.entries[0].at, trail.entries[-1].at
    waits = [entry.at for entry in trail.of("too_few")]
    losses, since = [], runs[0][0]
    for index, incident in enumerate(found):
        interrupted = (incident.launch, incident.call, incident.iteration)
        later, earlier = (where(runs, incident.at, key=itemgetter(0)) for where in (bisect_right, bisect_left))
        # of two that overlap, the time belongs to the later one from its fault on
        at = min(max(incident.at, since), end)
        following = found[index + 1].at if index + 1 < len(found) else end
        # a rank may enter the interrupted iteration when another one hangs there already
        again = next((entered for entered, where in runs[later:] if where != interrupted), end)
        until = max(at, min(again, following) if following > at else again)
        waited = next((until - wait for wait in waits if at <= wait < until), 0.0)
        pings = max((witness.pings or 0 for witness in incident.evidence.witnesses.values()), default=0)
        ran = at - max(since, runs[earlier - 1][0] if earlier else begin)
        steps = incident.steps_lost or 0  # where it is not known
        repeated = ran * min(1.0, steps / pings) if pings and ran > 0.0 else 0.0
        seconds, kind = until - at - waited, incident.verdict.kind
        spent = (seconds, waited, repeated, pings, steps, dict(incident.phases))
        losses.append(Loss(incident.number, kind, *spent, incident.call, incident.iteration, incident.at))
        since = until
    started = runs[0][0] + sum(_between(each, found))
    return Accounting(trail.job, begin, started, end, tuple(losses), sum(map(_last_steps, each)))


def _between(each: Sequence[Trail], found: Sequence[Incident]) -> Iterator[float]:
    """Seconds from the end of each launch to the function's call in the next one, where no incident accounts for it."""
    last = {incident.launch: incident for incident in found}
    for number, (before, now) in enumerate(pairwise(each)):
        failed = (
            number in last
            and last[number].decision.startswith(ENDED)
            and all(entry.at <= last[number].at for entry in before.of("run"))
        )
        if not failed and (runs := now.of("run")):
            yield max(0.0, runs[0].at - before.entries[-1].at)


def _last_steps(trail: Trail) -> int:
    steps: dict[int, int] = {}
    for entry in trail.of("left"):
        pings = entry.event.attributes.get("pings")
        if entry.event.attributes.get("how") == "completed" and isinstance(pings, int):
            steps[entry.event.call] = max(pings, steps.get(entry.event.call, 0))
    return sum(steps.values())


def total(each: Iterable[Accounting]) -> Accounting | None:
    """Several jobs together; None: of none is anything known."""
    jobs = list(each)
    if not jobs:
        return None
    return Accounting(
        ", ".join(job.job for job in jobs),
        0.0,
        sum(job.starting for job in jobs),
        sum(job.seconds for job in jobs),
        tuple(loss for job in jobs for loss in job.losses),
        sum(job.last_steps for job in jobs),
    )


def merge(before: Accounting, now: Accounting) -> Accounting:
    """What was known ``before`` of the same job, when events that are gone by now were still there, and what is known
    ``now``; that alone, where it is another job of the same name."""
    if now.begin > before.end or now.end < before.begin:
        return now
    is_whole = now.begin <= before.begin
    latest = {loss.number for loss in before.losses[-LATE:]}
    found = {loss.number: loss for loss in now.losses}
    known, previous = frozenset(found), 0
    for loss in before.losses:
        # of the first one after a gap something may be gone: the file of a rank that died early stays, others do not
        is_there = previous in known if previous else is_whole
        if not is_there or loss.number not in latest:
            found[loss.number] = loss
        previous = loss.number
    losses = tuple(found[number] for number in sorted(found))
    first = now if is_whole else before
    last_steps = max(before.last_steps, now.last_steps)
    return Accounting(now.job, first.begin, first.started, max(before.end, now.end), losses, last_steps)
