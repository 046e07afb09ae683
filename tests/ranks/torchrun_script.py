"""Started by torchrun: calls a wrapped function twice, without a fault and with one, and prints what came out."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from inprocess import CallWrapper, Wrapper

#: what torch's watchdog does about an error: torchrun sets "end the process"
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@Wrapper(soft_timeout=40, hard_timeout=45, barrier_timeout=50, completion_timeout=50)
def work(faulty: bool, call: CallWrapper | None = None) -> tuple[int, int, int, int]:
    assert call is not None
    dist.init_process_group("gloo")
    if faulty and call.iteration == 0 and dist.get_rank() == 1:
        raise ValueError("injected")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    assert os.environ[HANDLING] == "0"
    return call.iteration, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(total)


if __name__ == "__main__":
    assert os.environ[HANDLING] == "1"
    print(f"<{work(False)} {work(True)}>", flush=True)
    assert os.environ[HANDLING] == "1"
