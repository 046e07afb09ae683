"""A real job with four faults, one after the other in a job of its own, and how long each restart takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from inprocess.doctor import figures
from inprocess.doctor.figures import Figure
from inprocess.doctor.findings import Finding
from inprocess.testing.coordinates import At
from inprocess.testing.faults import Fault, Hang, Kill, Raise, Stop
from inprocess.testing.job import Job
from inprocess.testing.outcome import RankResult
from inprocess.testing.result import Result

__all__ = ["TRIALS", "Measured", "Trial", "needs_more", "run"]

#: of the jobs: a hang and a stopped process are to be noticed soon; as in the benchmarks
OPTIONS = {
    "soft_timeout": 1.0,
    "hard_timeout": 2.0,
    "heartbeat_interval": 0.1,
    "monitor_thread_interval": 0.5,
    "monitor_process_interval": 0.1,
    "progress_watchdog_interval": 0.1,
}
#: how long a job may take, and each of its ranks more (seconds)
DEADLINE_S, DEADLINE_PER_RANK_S = 30.0, 1.0
#: a restart is slow that takes so many times as long as in the tables, and as long as this (seconds)
SLOW_TIMES, SLOW_S = 10.0, 0.5


@dataclass(frozen=True)
class Trial:
    """One fault."""

    name: str
    #: for people
    what: str
    fault: Fault
    #: what is measured: from where to the entry of the function on the last rank
    begin: str
    figure: Figure | None


TRIALS = (
    Trial("exception", "a rank raises an exception", Raise(), "fault", figures.EXCEPTION),
    Trial("kill", "a rank is killed (SIGKILL)", Kill(), "fault", figures.KILL),
    Trial("hang", "a rank hangs in Python", Hang(), "detection", None),
    Trial("stop", "a process is stopped (SIGSTOP)", Stop(), "its end", figures.STOP),
)


@dataclass(frozen=True)
class Measured:
    """What came of one fault."""

    trial: Trial
    #: None: the function was not entered again
    seconds: float | None
    findings: tuple[Finding, ...]


def needs_more(trial: Trial, nproc: int) -> bool:
    """Whether nobody would be left."""
    return nproc == 1 and trial.fault.ends


def run(nproc: int, progress: Callable[[str], None], job: type[Job] = Job) -> Iterator[Measured]:
    """One job for each fault, on rank 1; on rank 0 where it is alone, and then only those that leave its process."""
    from inprocess.doctor.training import STEPS, train  # noqa: PLC0415  # imports torch

    for trial in TRIALS:
        if needs_more(trial, nproc):
            continue
        progress(f"restart: {trial.what}")
        at = At(min(1, nproc - 1), step=STEPS // 2)
        try:
            ranks = job(nproc, options=OPTIONS, deadline=DEADLINE_S + DEADLINE_PER_RANK_S * nproc)
            result = ranks.run(train, faults={at: trial.fault})
            seconds = _seconds(result, trial, at.rank)
        except (AssertionError, OSError) as error:
            yield Measured(trial, None, (_failed(trial, str(error).splitlines()[0]),))
            continue
        yield Measured(trial, seconds, tuple(_slow(trial, seconds)))


def _seconds(result: Result, trial: Trial, victim: int) -> float:
    """Raises AssertionError where some rank that is left has not entered the function again."""
    left = [rank for rank in result.ranks if not (trial.fault.ends and rank.rank == victim)]
    entered = [_first(rank, "enter", iteration=1) for rank in left]
    if math.inf in entered:
        raise AssertionError("not all ranks that are left entered the function again")
    return max(entered) - _begin(result, trial, victim)


def _begin(result: Result, trial: Trial, victim: int) -> float:
    rank = result.ranks[victim]
    if trial.begin == "fault":
        return _first(rank, "fault")
    if trial.begin == "its end":
        return _first(rank, "ended")
    return min(_first(each, "phase", name="abort", iteration=0) for each in result.ranks)


def _first(rank: RankResult, event: str, **fields: object) -> float:
    return min((float(each["t"]) for each in rank.of(event, **fields)), default=math.inf)


def _failed(trial: Trial, message: str) -> Finding:
    return Finding(
        f"restart.{trial.name}",
        "problem",
        f"{trial.what}, and the others did not go on: {message}",
        "this is what the library is for; a job of yours would not survive it either",
        "repair what else is found here first; docs/troubleshooting.md has the errors",
    )


def _slow(trial: Trial, seconds: float) -> Iterator[Finding]:
    usual = trial.figure.median if trial.figure is not None else figures.EXCEPTION.median
    if seconds > max(SLOW_S, SLOW_TIMES * usual):
        yield Finding(
            f"restart.{trial.name}",
            "warning",
            f"{trial.what}: the restart took {seconds:.2f} s, against {usual * 1e3:.0f} ms on two idle cores",
            "the time is lost on all ranks at each fault",
            "run the doctor while the machine is idle, and give each rank a core",
        )
