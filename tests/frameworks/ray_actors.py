"""Ranks that run in Ray's actors: an exception, a death, with a new actor in its place or without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.harness import ReservedPort

DRIVER = Path(__file__).with_name("ray_driver.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", ["raise 1", "kill 0", "kill 2", "lose 0", "lose 1"])
def test_actors(tmp_path: Path, fault: str) -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    with ReservedPort() as port, tempfile.TemporaryDirectory(prefix="r") as folder:  # short: it has sockets in it
        done = subprocess.run(
            [sys.executable, DRIVER, fault, str(port.number)],
            check=False,
            env=environ | {"RAY_TMPDIR": folder},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    kind, rank = fault.split()
    assert report["replaced"] == ([int(rank)] if kind == "kill" else [])
    assert [found is None for found in report["found"]] == [fault == f"lose {each}" for each in range(3)]
    for each, (pid, found) in enumerate(zip(report["before"], report["found"], strict=True)):
        if found is not None:
            assert found["sum"] == (2.0 if kind == "lose" else 3.0) and found["iteration"] >= 1
            assert (found["pid"] == pid) is (fault != f"kill {each}")
