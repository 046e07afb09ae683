"""Ranks that Monarch's actors start: an exception, a death, with a new process in its place or without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ReservedPort

DRIVER = Path(__file__).with_name("monarch_driver.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", ["raise 1", "kill 0", "kill 2", "lose 0", "lose 1"])
def test_actors(tmp_path: Path, fault: str) -> None:
    with ReservedPort() as port:
        done = subprocess.run(
            [sys.executable, DRIVER, fault, str(port.number)],
            check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    kind, rank = fault.split()
    assert "was called in thread 'monarch-actor-driver': call it in the main thread" in report["refused"]
    assert report["replaced"] == ([int(rank)] if kind == "kill" else [])
    assert [found is None for found in report["found"]] == [fault == f"lose {each}" for each in range(3)]
    for found in filter(None, report["found"]):
        assert found["sum"] == (2.0 if kind == "lose" else 3.0) and found["iteration"] >= 1
