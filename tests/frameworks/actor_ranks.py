"""Ranks that actors start, of Ray's or Monarch's: what they run, and what a driver's report says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import inprocess
from inprocess.initialize import RetryController
from tests.harness import ReservedPort

WORLD_SIZE, STEPS = 3, 30
FAULTS = ("raise 1", "kill 0", "kill 2", "lose 0", "lose 1")
ROOT = Path(__file__).parents[2]


def train(fault: str, call: inprocess.CallWrapper = None) -> dict[str, Any]:  # type: ignore[assignment]
    dist.init_process_group("gloo")
    for step in range(STEPS):
        call.ping()
        dist.all_reduce(total := torch.ones(1))
        if step == 10 and call.iteration == 0 and dist.get_rank() == int(fault[-1]):
            if not fault.startswith("raise"):
                os.kill(os.getpid(), 9)
            raise OSError("injected")
    return {"iteration": call.iteration, "sum": total.item(), "pid": os.getpid()}


def run(fault: str) -> dict[str, Any]:
    """The call of a rank; the others wait for a process in the place of one that was killed, unless it is lost."""
    least = WORLD_SIZE - fault.startswith("lose")
    wait = RetryController(min_world_size=least, wait_for_replacement=120)
    return inprocess.Wrapper(initialize=wait)(train)(fault)


def environ_of(rank: int, port: int, job: str) -> dict[str, str]:
    environ = {"RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**environ, "INPROCESS_JOB": job}


def report_of(driver: str, fault: str, folder: Path, **environ: str) -> dict[str, Any]:
    """Run a driver with a fault: which ranks were replaced, and what they returned, None where one is lost."""
    with ReservedPort() as port:
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name(driver), fault, str(port.number)],
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    kind, rank = fault.split()
    assert report["replaced"] == ([int(rank)] if kind == "kill" else [])
    assert [found is None for found in report["found"]] == [fault == f"lose {each}" for each in range(WORLD_SIZE)]
    for found in filter(None, report["found"]):
        assert found["sum"] == (2.0 if kind == "lose" else 3.0) and found["iteration"] >= 1
    return report
