"""The smallest whole example: a training that goes on after a fault. On CPUs, under any launcher.

inprocess run --nproc-per-node 2 examples/minimal.py
"""

import os

import torch
import torch.distributed as dist

import inprocess

CHECKPOINT = os.environ.get("CHECKPOINT", "minimal.pt")


def load(model, optimizer):
    if not os.path.exists(CHECKPOINT):
        return 0
    saved = torch.load(CHECKPOINT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"]


@inprocess.Wrapper(soft_timeout=30, hard_timeout=45)
def train(steps: int, call: inprocess.CallWrapper = None) -> float:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(load(model.module, optimizer), steps):
        call.ping()
        if step == 25 and call.iteration == 0 and dist.get_rank() == 1:
            raise RuntimeError("a fault, once")
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step * 1000 + dist.get_rank()))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 10 == 0:  # rank 0 writes, whole or not at all; a restart waits until it is written
            call.save(
                {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, CHECKPOINT
            )
    dist.destroy_process_group()
    return (model.module.weight - 1).abs().max().item()


if __name__ == "__main__":
    error = train(100)
    if error is not None:  # None: this process joined when the others had finished
        print(f"process {os.getpid()}: the weights are right to {error:.4f}")
