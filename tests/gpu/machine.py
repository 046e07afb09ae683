"""Where these tests run, and what that means for ranks: their environment, options and what they may leave behind."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import Ranks, Run

from .targets import ON

if ON not in ("cuda", "cpu"):
    raise ValueError(f"INPROCESS_GPU_TESTS_ON={ON!r}: use cuda, or cpu for a dry run")
#: seconds for the ranks of one test
DEADLINE = 55.0
#: of each rank. A host id of its own lets ranks share one GPU (NCCL: "Duplicate GPU detected" otherwise); plugins for
#: other networks, and NVLink between "hosts", are out
ENVIRONMENT = {
    "INPROCESS_GPU_TESTS_ON": ON,
    "LOCAL_RANK": "0",
    "NCCL_HOSTID": "host{rank}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_MNNVL_ENABLE": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic algorithms ask for it
}
#: threads and descriptors of the driver and of NCCL stay until the process ends; test_restarts counts them
_KEPT_BY_CUDA = re.compile(r"rank \d+ left behind: (thread|descriptor) ")


def _missing() -> str:
    """Why nothing can run here. Counting devices asks NVML, so this process needs no CUDA context."""
    if ON == "cpu":
        return ""
    if not dist.is_nccl_available():
        return "needs a torch with NCCL"
    return "" if torch.cuda.device_count() else "needs a GPU"


_why = _missing()
#: of every file here
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_why), reason=_why)]
cuda_only = pytest.mark.skipif(ON == "cpu", reason="a dry run: this is about CUDA itself")


def finish(run: Run, deadline: float = DEADLINE) -> Ranks:
    """Wait for all ranks, and check what they left and the invariants."""
    ranks = run.wait(deadline, check=False)
    problems = [line for line in ranks.problems if ON == "cpu" or not _KEPT_BY_CUDA.match(line)]
    assert not problems, "\n".join(problems)
    return ranks


def tell(**figures: Any) -> None:
    """One line that `tests.gpu.lease` keeps."""
    print("LEASE " + json.dumps(figures), flush=True)


def used_memory() -> int | None:
    """MiB of the first GPU that are in use, as the driver's own program has it. None without that program."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
