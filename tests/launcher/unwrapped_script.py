"""A training at the level of the module, as tutorials have it; nothing in it is wrapped. Argument: what happens."""

import argparse
import gc
import os
import signal
import sys
import time
import weakref

import torch
import torch.distributed as dist
import unwrapped_module
from torch.nn.parallel import DistributedDataParallel

import inprocess

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
given = parser.parse_args()
gc.disable()

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
unwrapped_module.models.append(weakref.ref(model))
call = inprocess.current_call()


def step() -> None:
    """Uses the module's own names."""
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


for number in range(4):
    call.ping()
    step()
    if number == 2 and rank == 1 and call.iteration == 0 and given.fault:
        os.chdir("/")
        sys.argv.append("--more")
        if given.fault == "raise":
            raise ValueError("once")
        if given.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

while given.fault == "kill" and dist.get_world_size() < 2:  # until another process has taken the place of the dead one
    call.ping()
    time.sleep(0.01)
alive = sum(each() is not None for each in unwrapped_module.models)
text = f"{rank} of {dist.get_world_size()}, iteration {call.iteration}, {alive} model alive, {os.getcwd()} {__name__}"
os.write(1, f"<{text}>\n".encode())
sys.exit(3 if given.fault == "exit" else 0)
