"""Jobs that a launcher has started anew under one name, from made-up events: no incident is lost, none counts twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inprocess.events.record import Event, Header, to_line
from inprocess.reports.accounting import account
from inprocess.reports.incident import Incident, all_incidents
from inprocess.reports.launches import launches
from inprocess.reports.reading import read

from .test_reports import record


class Process:
    """A rank and its monitor, each with a file; ``pid``: as a container gives the same one again, with one file."""

    def __init__(self, run_dir: Path, rank: int, at: float, pid: int) -> None:
        (run_dir / "events").mkdir(exist_ok=True)
        self.run_dir, self.rank, self.pid = run_dir, rank, pid
        for role in ("rank", "monitor"):
            self._append(role, to_line(Header("job", role, rank, pid, "host", at, 1000.0 + at)))
        self(at, "call", "join", -1, world_size=2, pid=pid)

    def __call__(
        self,
        at: float,
        kind: str,
        phase: str = "run",
        iteration: int = 0,
        /,
        call: int = 0,
        role: str = "rank",
        **more: Any,
    ) -> None:
        self._append(role, to_line(Event(at, 1000.0 + at, call, iteration, self.rank, self.rank, phase, kind, more)))

    def _append(self, role: str, line: bytes) -> None:
        with (self.run_dir / "events" / f"{role}-{self.rank}-host-{self.pid}.jsonl").open("ab") as file:
            file.write(line)

    def dies(self, at: float) -> None:
        self(at, "died", role="monitor", how="killed by SIGKILL", signal=9)


def launch(run_dir: Path, at: float, pids: tuple[int, int]) -> list[Process]:
    """Two ranks, whose function runs a second later."""
    ranks = [Process(run_dir, rank, at + 0.1 * rank, pid) for rank, pid in enumerate(pids)]
    for each in ranks:
        each(at + 0.5, "phase", "assign ranks", after="ok")
        each(at + 1.0, "run", world_size=2, before=0)
    return ranks


def completes(ranks: list[Process], at: float, iteration: int = 0) -> None:
    for each in ranks:
        each(at, "left", "out", iteration, how="completed", pings=10)


def restarts(ranks: list[Process], at: float, number: int) -> None:
    told = record(0, "exception", "ValueError: second")
    ranks[0](at, "raised", "run", number - 1, **told)
    for each in ranks:
        each(at + 0.1, "interrupted", "run", number - 1)
        each(at + 0.2, "restart", "end round", number, restart=number, records=[told], pings=3)
        each(at + 0.3, "run", "run", number, world_size=2, before=2, took=0.3)


def found_in(run_dir: Path) -> list[Incident]:
    trails, _ = read(str(run_dir))
    ((_, found),) = all_incidents(trails)
    return found


@pytest.mark.parametrize("pids", [(10, 11, 12, 13), (1, 2, 1, 2)], ids=["other processes", "the pids of before"])
def test_all_ranks_die_and_the_next_launch_completes(tmp_path: Path, pids: tuple[int, int, int, int]) -> None:
    for each in launch(tmp_path, 0.0, pids[:2]):
        each.dies(5.0)
    completes(launch(tmp_path, 10.0, pids[2:]), 21.0)
    trails, _ = read(str(tmp_path))
    ((trail, (incident,)),) = all_incidents(trails)
    assert (incident.verdict.kind, incident.before, incident.after) == ("signal", 2, 0)
    assert incident.verdict.also == (1,) and incident.decision == "the job ended, and was started anew"
    time = account(trail, [incident])
    assert time is not None
    # from the deaths to the function's next call
    assert time.losses[0].seconds == pytest.approx(6.0) and time.starting == pytest.approx(1.0)
    assert time.productive == pytest.approx(4.0 + 10.0)


def test_the_next_launch_has_incidents_of_its_own(tmp_path: Path) -> None:
    for each in launch(tmp_path, 0.0, (10, 11)):
        each.dies(5.0)
    ranks = launch(tmp_path, 10.0, (12, 13))
    restarts(ranks, 13.0, 1)
    completes(ranks, 21.0, 1)
    found = found_in(tmp_path)
    assert [(each.number, each.verdict.kind, each.at) for each in found] == [
        (1, "signal", 1005.0),
        (2, "exception", 1013.0),
    ]


def test_the_last_word_of_a_monitor_comes_after_the_next_call(tmp_path: Path) -> None:
    """It is of the launch before, and no incident of the next one."""
    first = launch(tmp_path, 0.0, (10, 11))
    for each in first:
        each(0.4, "watching", "join", -1, role="monitor", training_pid=each.pid)
    first[0].dies(5.0)
    second = launch(tmp_path, 10.0, (12, 13))
    first[1].dies(10.6)
    completes(second, 21.0)
    (incident,) = found_in(tmp_path)
    assert incident.verdict.also == (1,)


def test_a_call_that_fails_without_a_decision_and_is_made_again(tmp_path: Path) -> None:
    """In the same processes: a later call that completes does not hide it."""
    ranks = launch(tmp_path, 0.0, (10, 11))
    for each in ranks:
        each(5.0, "store_lost", role="monitor", text="it does not answer")
        each(5.1, "left", "out", how="failed", why="StoreLost")
        each(6.0, "call", "join", -1, call=1, world_size=2)
        each(7.0, "run", call=1, world_size=2, before=0)
        each(9.0, "left", "out", call=1, how="completed", pings=3)
    (incident,) = found_in(tmp_path)
    assert (incident.verdict.kind, incident.call) == ("store_lost", 0)


def test_what_is_no_launch_of_its_own(tmp_path: Path) -> None:
    """A process that joins, and a call that goes on over another store, with iterations counted anew."""
    ranks = launch(tmp_path, 0.0, (10, 11))
    ranks[1].dies(2.0)
    joiner = Process(tmp_path, 1, 3.0, 12)
    joiner(4.0, "restart", "end round", 1, restart=1, records=[])
    joiner(4.1, "run", "run", 1, world_size=2, before=2)
    for each in (ranks[0], joiner):
        each(6.0, "left", "out", 1, how="moved")
        each(6.1, "call", "join", -1, world_size=2)
        each(6.2, "phase", "assign ranks", after="ok")
    ((trail,), _) = read(str(tmp_path))
    assert launches(trail) == [trail]


def test_a_time_between_two_launches_of_which_the_first_went_on_after_its_failure(tmp_path: Path) -> None:
    """Its first call was aborted, and its second one completed."""
    ranks = launch(tmp_path, 0.0, (10, 11))
    for rank in ranks:
        rank(2.0, "abort", text="ended", records=[])
        rank(3.0, "call", "join", -1, call=1, world_size=2, pid=rank.pid)
        rank(3.5, "run", call=1, world_size=2, before=0)
        rank(5.0, "left", call=1, how="completed")
    completes(launch(tmp_path, 65.0, (12, 13)), 76.0)
    trails, _ = read(str(tmp_path))
    ((trail, found),) = all_incidents(trails)
    time = account(trail, found)
    assert len(found) == 1 and time is not None
    assert time.starting == pytest.approx(1.0 + 61.0)


def test_a_time_between_two_launches_in_which_nothing_failed(tmp_path: Path) -> None:
    """The first one completed, and somebody started the next one a minute later: that is no training."""
    completes(launch(tmp_path, 0.0, (10, 11)), 5.0)
    completes(launch(tmp_path, 65.0, (12, 13)), 76.0)
    trails, _ = read(str(tmp_path))
    ((trail, found),) = all_incidents(trails)
    time = account(trail, found)
    assert not found and time is not None
    assert time.starting == pytest.approx(1.0 + 61.0) and time.productive == pytest.approx(4.0 + 10.0)
