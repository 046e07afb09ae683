"""Two jobs of plain processes with the same MASTER_PORT: no process of one waits, or trains, in the other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from inprocess.stores import serving
from inprocess.stores.owner import OWNER_KEY, Owner
from tests.harness.launch import PATIENT

from . import meeting, targets


class Jobs:
    """Two jobs, of which the second has the port of the first."""

    def __init__(self, launch, folder: Path) -> None:
        self._launch, self._folder, self.port = launch, folder, None

    def start(self, job, size, target=meeting.run_held, wrapper=None, **env):
        port = {} if self.port is None else {"MASTER_PORT": str(self.port)}
        args = {"job": job, "flag": str(self._folder / "flag"), "folder": str(self._folder)}
        run = self._launch(target, size, wrapper=wrapper, env=port | env, args=args)
        self.port = self.port or run.port
        return run

    def end(self) -> None:
        (self._folder / "flag").touch()


@pytest.fixture
def jobs(launch, tmp_path):
    return Jobs(launch, tmp_path)


def refused(ranks, port) -> None:
    assert ranks.exceptions == ["OptionError"] * len(ranks)
    for rank in ranks:
        assert f":{port}" in rank.message and "MASTER_PORT of its own" in rank.message, rank.message
        assert "INPROCESS_RESTART=1" in rank.message


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_first_one_runs(jobs, size):
    first = jobs.start("first", 2)
    first.wait_event("at", count=2)
    refused(jobs.start("second", size).wait(check=False), jobs.port)
    jobs.end()
    assert first.wait().values == [[["first"], 2]] * 2


def test_jobs_with_names(jobs):
    """Each has one of its own; that another one has the port is told as soon."""
    first = jobs.start("first", 2, INPROCESS_JOB="one")
    first.wait_event("at", count=2)
    ranks = jobs.start("second", 2, INPROCESS_JOB="two").wait(check=False)
    refused(ranks, jobs.port)
    assert "'one'" in ranks[1].message
    jobs.end()
    assert first.wait().values == [[["first"], 2]] * 2


def test_a_rank_of_the_first_one_has_died(jobs):
    """Its slot is free, and stays so; for one that replaces it by name, it is there."""
    first = jobs.start("first", 3, INPROCESS_JOB="one")
    first.wait_event("at", count=3)
    os.kill(first.pids[1], signal.SIGKILL)
    first.wait_event("enter", count=2, iteration=1)
    refused(jobs.start("second", 3).wait(check=False), jobs.port)
    first.start_another(1, env={"INPROCESS_RESTART": "0"})
    first.wait_event("enter", count=3, iteration=2)
    jobs.end()
    ranks = first.wait()
    assert [ranks[number].value for number in (0, 2, 3)] == [[["first"], 3]] * 3


@pytest.mark.parametrize("second", [meeting.run_held, meeting.run_held_elsewhere])
def test_both_start_at_once(jobs, second):
    """As long as one trains, no other one does: all others end with an error, and nobody without having trained. That
    it is one with its own processes alone is certain only where something tells them apart, here the folder: see
    docs/notebook/joining.md."""
    # whose own rank 0 has gone learns so at barrier_timeout
    wrapper = PATIENT | {"soft_timeout": 15, "hard_timeout": 16, "heartbeat_timeout": 10, "barrier_timeout": 20}
    runs = [jobs.start("first", 2, wrapper=wrapper), jobs.start("second", 2, second, wrapper)]
    for run in runs:
        run.wait_event("settled", count=2, deadline=60)
    jobs.end()  # not before: when one is over, the next one may begin
    ended = [run.wait(60, check=False) for run in runs]
    values = [rank.value for ranks in ended for rank in ranks if rank.exception is None]
    assert values == [] or (len(values) == 2 and values[0] == values[1] and values[0][1] == 2)
    if second is meeting.run_held_elsewhere:
        assert values in ([], [[["first"], 2]] * 2, [[["second"], 2]] * 2)


def test_the_server_of_the_job_before_is_still_there(jobs):
    """The next job waits until it goes."""
    server = serving.serve("127.0.0.1", 0)
    server.set(OWNER_KEY, Owner(drawn="x", world_size=2, over=True).to_json())
    jobs.port = port = server.port
    jobs.end()
    run = jobs.start("second", 2)
    targets.wait_until(lambda: _is_connected(run.pids[1], port))
    del server
    assert run.wait().values == [[["second"], 2]] * 2


def _is_connected(pid, port) -> bool:
    return any(each.raddr and each.raddr.port == port for each in psutil.Process(pid).net_connections())
