"""The benchmarks run: each script once, as short as it gets. What they measure is not looked at, CI has other work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{script}", *arguments]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


FAULTS = (
    "--fault raise --where loop",
    "--fault kill --victim 0 --where allreduce",
    "--fault release --where allreduce",
    "--fault kill --victim 0 --spares 1 --setting tree",
    "--body training --fault raise --where loop",
    "--body training --fault kill --victim 0 --where allreduce",
)


@pytest.mark.parametrize("arguments", FAULTS)
def test_restart(arguments: str) -> None:
    found = run("restart", "--world-size", "2", *arguments.split())
    assert found["note"] == ""
    assert sum(found["phases"].values()) == pytest.approx(found["values"]["reduced"], abs=0.1)
    assert 0 < found["values"]["entry"] < found["values"]["reduced"]


def test_restart_by_torchrun() -> None:
    """Its workers are new processes, which go through no phases."""
    found = run("restart", "--library", "torchrun", "--world-size", "2")
    assert found["note"] == ""
    assert found["phases"] == {}
    assert 0 < found["values"]["entry"] < found["values"]["reduced"]


def test_training() -> None:
    """One job of the training and one of the empty function, with one restart each."""
    found = run("training", "--jobs", "1", "--restarts", "1", "--json")
    assert found.keys() == {"this tree"}
    for jobs in found["this tree"].values():
        (job,) = jobs
        assert job["note"] == ""
        (restart,) = job["restarts"]
        assert restart["first"]
        assert 0 < restart["entry"] < restart["step"]


def test_back_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, which takes minutes on a busy machine."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    small = "--jobs 1 --ranks 2 --workers 1 --fault smaller --json"
    ((restart,),) = run("back_to_training", *small.split()).values()
    times = [restart[name] for name in ("entry", "group", "state", "model", "batch", "step", "next")]
    assert times[0] > 0 and times == sorted(times)


def test_calls() -> None:
    values = run("calls")["values"]
    assert values.keys() == {"ping_wall", "ping_cpu", "atomic_wall", "atomic_cpu", "store_wall"}
    assert values["ping_wall"] > 0


def test_idle() -> None:
    values = run("idle", "--seconds", "1")["values"]
    assert values["monitor_mb"] > 1
    assert values["percent"] > 0


def test_goodput() -> None:
    values = run("goodput", "--seconds", "3", "--every", "1")["values"]
    assert values["faults"] == 2
    assert 0 < values["percent"] < 100


def test_step() -> None:
    assert run("step", "--steps", "20")["values"].keys() == {"mean_percent", "median_percent"}


def test_live() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.live", "--gigabytes", "0.02", "--rounds", "1"]
    command += ["--peers", ""]  # torchft would be installed
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    for row in ("recover(), from the other rank", "recover(), from that checkpoint"):
        assert f"| {row} |" in done.stdout
    assert "% of a step" in done.stdout
