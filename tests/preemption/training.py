"""What is trained while ranks are asked to leave: a small network with a LiveState, until a file says: enough.

Usage: training.py FOLDER. Each process writes what happens, with the time, into a file of its own there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import inprocess

FOLDER = Path(sys.argv[1])
OUT = (FOLDER / f"{os.getpid()}.jsonl").open("w", buffering=1)
torch.set_num_threads(1)
torch.manual_seed(0)
MODEL = torch.nn.Linear(8, 4)
OPTIM = torch.optim.SGD(MODEL.parameters(), lr=0.01)
LIVE = inprocess.LiveState(model=MODEL, optim=OPTIM, folder=FOLDER / "checkpoints", save_every=1_000_000)


def note(what: str, **more: Any) -> None:
    OUT.write(json.dumps({"at": time.monotonic(), "what": what, "pid": os.getpid(), **more}) + "\n")


def is_enough() -> bool:
    told = torch.tensor([int((FOLDER / "enough").exists())])
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told)


@inprocess.Wrapper(leave_grace=10, on_preemption=lambda state: note("hook"))
def train(call: inprocess.CallWrapper) -> int:
    dist.init_process_group("gloo")
    step = LIVE.recover(call)
    note("enter", iteration=call.iteration, world_size=dist.get_world_size(), step=step)
    ddp = DistributedDataParallel(MODEL)
    while not is_enough():
        call.ping()
        torch.manual_seed(step)
        loss = ddp(torch.randn(4, 8)).square().mean()
        OPTIM.zero_grad()
        loss.backward()
        with LIVE.commit(step + 1):
            OPTIM.step()
        step += 1
        note("step", step=step)
        time.sleep(0.01)  # stands for the rest of a step
    dist.destroy_process_group()
    return step


if __name__ == "__main__":
    note("call")
    try:
        note("completed", step=train())
    except SystemExit as error:
        note("left", code=error.code, step=LIVE.step)
        raise
