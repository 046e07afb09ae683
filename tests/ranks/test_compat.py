"""A program under the other library's name, as a whole: its own store, which the monitor process imports, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

STORE = """
import os
from nvidia_resiliency_ext.inprocess.store import FileStore

def make():
    return FileStore(os.environ["STORE"])
"""
PROGRAM = """
from typing import Optional
import nvidia_resiliency_ext.inprocess as inprocess
import torch.distributed as dist
import its_store

@inprocess.Wrapper(store_factory=its_store.make)
def train(call: Optional[inprocess.CallWrapper] = None):
    dist.init_process_group("gloo")
    if call.iteration == 0:
        raise ValueError("once")
    dist.destroy_process_group()
    return call.iteration

print(train())
"""


def test_restarts_under_the_other_name(tmp_path: Path) -> None:
    (tmp_path / "its_store.py").write_text(STORE)
    (tmp_path / "train.py").write_text(PROGRAM)
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # no store is served there
    done = subprocess.run(
        [sys.executable, "-m", "inprocess.compat", "train.py"],
        cwd=tmp_path,
        env={**os.environ, **place, "STORE": str(tmp_path / "store")},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "restart 1: rank 0 raised an exception: ValueError: once [train.py:" in done.stderr
