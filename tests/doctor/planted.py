"""A training that works until a rank fails: a registry that grows, a group made outside, a checkpoint cut in half."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import inprocess

HOOKS = []


def on_step(hook):
    HOOKS.append(hook)


def save(model, optimizer, step):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, "checkpoints/last.pt")


def load(model, optimizer):
    if not os.path.exists("checkpoints/last.pt"):
        return 0
    state = torch.load("checkpoints/last.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


@inprocess.Wrapper()
def train(steps, call: inprocess.CallWrapper = None):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    on_step(losses.append)
    start = load(model, optimizer)
    ddp = DistributedDataParallel(model)
    for step in range(start, steps):
        call.ping()
        optimizer.zero_grad()
        loss = ddp(torch.ones(4, 8) * step).square().mean()
        loss.backward()
        optimizer.step()
        for hook in HOOKS:
            hook(loss.item())
        if dist.get_rank() == 0:
            save(model, optimizer, step + 1)
    return step


if __name__ == "__main__":
    os.makedirs("checkpoints", exist_ok=True)
    dist.init_process_group("gloo")
    train(12)
