"""Incidents as files: written while the job goes on, and by whoever is left."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from inprocess.system.descriptors import await_readable
from inprocess.testing import run as testing_run
from inprocess.testing.faults import HostLoss
from tests.harness import At, Kill, KillTogether, Raise
from tests.harness.child import Context
from tests.harness.launch import BEATING, PATIENT

from . import targets
from .test_repeats import run_again

#: within this a report is promised (seconds)
PROMISE_S = 10.0


def report(run_dir: str | Path, number: int, limit: float = 2 * PROMISE_S) -> Any:
    """What the file says, as soon as it is there."""
    path, until = Path(run_dir, "incidents", f"{number:04d}", "incident.json"), time.monotonic() + limit
    while not path.exists():
        assert time.monotonic() < until, f"no {path.name} within {limit} s"
        time.sleep(0.05)
    return json.loads(path.read_text())


def train_until_reported(context: Context, call: Any) -> list[float]:
    """After the fault the function goes on until the report of it is there; returns how long that took."""
    started = time.monotonic()
    rank = targets.train(context, call)[1]
    if rank == 0:
        report(context.args["run_dir"], call.iteration)
    return [time.monotonic() - started, *targets.place_in_world()]


def run_until_reported(context: Context) -> Any:
    return context.wrap(train_until_reported)()


@pytest.mark.parametrize(
    ("name", "faults", "options", "rank", "kind"),
    [
        ("raises", {At(1, step=1): Raise(ValueError)}, PATIENT, 1, "exception"),
        ("killed", {At(1, step=1): Kill()}, PATIENT, 1, "signal"),
        ("the first host is lost", {At(0, step=1): HostLoss()}, BEATING, 0, "host_lost"),
    ],
)
def test_the_report_is_there_while_the_job_goes_on(launch, tmp_path, name, faults, options, rank, kind):
    results = launch(
        run_until_reported,
        3,
        faults=faults,
        wrapper=options | {"run_dir": str(tmp_path)},
        args={"run_dir": str(tmp_path)},
    ).wait()
    took = max(result.value[0] for result in results if result.value)
    assert took < PROMISE_S
    told = report(tmp_path, 1)
    assert (told["verdict"]["initial_rank"], told["verdict"]["class"]) == (rank, kind)
    assert told["history"]["in_a_row"] == 1
    assert "<h1>" in (tmp_path / "incidents/0001/incident.html").read_text()
    assert "incidents/0001" in (tmp_path / "index.html").read_text()


def test_the_report_is_there_when_all_ranks_died(launch, tmp_path):
    """The monitors are what is left."""
    faults = {At(rank, step=1): KillTogether(3) for rank in range(3)}
    launch(targets.run_train, 3, faults=faults, wrapper=PATIENT | {"run_dir": str(tmp_path)}).wait()
    told = report(tmp_path, 1)
    verdict = told["verdict"]
    assert verdict["class"] == "signal"
    assert {verdict["initial_rank"], *verdict["also"]} == {0, 1, 2}
    assert told["world_size"] == {"before": 3, "after": 0}


def test_the_report_of_the_end_of_a_job(launch, tmp_path):
    options = PATIENT | {"run_dir": str(tmp_path), "max_repeats": 3}
    launch(run_again, 2, wrapper=options, args={"until": 99, "raising": [1]}).wait()
    told = report(tmp_path, 3)
    assert told["verdict"]["initial_rank"] == 1 and told["world_size"] == {"before": 2, "after": 0}
    assert "the same error" in told["details"]["decision"]
    assert told["history"]["deterministic"] and told["history"]["same_error"] == [1, 2]


def arguments(pid: int) -> str:
    """Its command line, where a program that writes reports has the run directory; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def await_monitors(run_dir: Path) -> None:
    """Until those that have written events there have ended, in place of whom a writer may go on."""
    for path in (run_dir / "events").iterdir():
        header = json.loads(path.read_bytes().partition(b"\n")[0])
        try:
            pidfd = os.pidfd_open(header["pid"])
        except ProcessLookupError:
            continue
        assert await_readable(pidfd, 60), f"{header} has not ended"
        os.close(pidfd)


@pytest.mark.parametrize(
    ("faults", "options"),
    [
        ({At(1, step=1): Raise(ValueError)}, {}),
        ({At(1, iteration, step=1): Raise(ValueError) for iteration in range(2)}, {"max_repeats": 2}),
        ({At(0, step=1): Kill()}, {}),
    ],
    ids=["completed", "ended with an error", "one died"],
)
def test_no_writer_outlives_the_monitors(launch, tmp_path, monkeypatch, faults, options):
    """Also not one that looks whether another one has written, nor one that waits for what is missing."""
    found: list[list[int]] = []

    def reap(find: Any, end: float) -> list[str]:
        """Called when all ranks have ended; waits for whatever they have left."""
        await_monitors(tmp_path)
        found.append([pid for pid in find() if str(tmp_path) in arguments(pid)])
        return really(find, end)

    really = testing_run.reap
    monkeypatch.setattr(testing_run, "reap", reap)
    launch(targets.run_train, 3, faults=faults, wrapper=PATIENT | {"run_dir": str(tmp_path)} | options).wait()
    assert found[0] == []
    assert report(tmp_path, 1)["world_size"]["before"] == 3


def test_a_run_directory_in_which_nothing_can_be_written_but_events(launch, tmp_path):
    """Training is not disturbed, and nothing is left behind."""
    (tmp_path / "incidents").write_text("a file in place of the folder")
    faults = {At(1, step=1): Raise(ValueError)}
    launch(targets.run_train, 2, faults=faults, wrapper=PATIENT | {"run_dir": str(tmp_path)}).wait()
    assert os.listdir(tmp_path / "events")
    assert not (tmp_path / "index.html").exists()
