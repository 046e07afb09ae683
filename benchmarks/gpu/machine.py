"""What is measured on; a process of its own, so that the others do not touch CUDA: `python -m benchmarks.gpu.machine`.

Prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import subprocess
from typing import Any

import torch
import torch.distributed as dist

#: variables that change what is measured begin so
PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "CUDA_", "PYTORCH_", "GLOO_", "OMP_NUM_THREADS")


def driver() -> str:
    """As the driver's own program has it; that may not be installed."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
        return done.stdout.split("\n")[0].strip()
    return "unknown"


def gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def describe() -> dict[str, Any]:
    """Of the machine and of what runs on it."""
    found = gpus()
    has_nccl = dist.is_available() and dist.is_nccl_available()
    return {
        "gpus": found,
        "driver": driver() if found else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "",  # type: ignore[no-untyped-call]
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "date": datetime.date.today().isoformat(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
    }


if __name__ == "__main__":
    print(json.dumps(describe()))
