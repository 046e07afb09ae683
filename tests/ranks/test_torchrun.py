"""Under torchrun, whose agent hosts the store: one call without faults and one with a restart."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(120)
def test_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.ranks.torchrun_script"],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # the two write to one pipe, and a line's end is a write of its own
    assert sorted(re.findall("<[^<>]*>", done.stdout)) == [
        "<(0, 0, 2, 2) (1, 0, 2, 2)>",
        "<(0, 1, 2, 2) (1, 1, 2, 2)>",
    ]
