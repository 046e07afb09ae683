"""The examples of `LiveState`: each trains twice, with faults and without, and compares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("live_recovery.py", "rank 0 goes on at step 18, with the state from rank 1"),
        ("fsdp2_sharded.py", "rank 0 goes on at step 10, with the state from a copy of rank 1; 8 steps are done again"),
    ],
)
def test_the_result_is_the_same(script: str, said: str) -> None:
    faults = "kill:rank=0,step=18 raise:rank=2,step=25"
    command = [sys.executable, EXAMPLES / script, "--nproc", "3", "--steps", "30", "--faults", faults]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": equal" in done.stdout.splitlines()[-1]
    assert said in done.stderr


def test_a_wrong_schedule_is_named() -> None:
    command = [sys.executable, EXAMPLES / "live_recovery.py", "--faults", "kill:rank=0"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "KIND:rank=R,step=S" in done.stderr
