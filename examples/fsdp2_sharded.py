"""Weights and optimizer are sharded over the ranks; ranks are killed and replaced, and the result is the same.

    python examples/fsdp2_sharded.py
    python examples/fsdp2_sharded.py --nproc 4 --faults "kill:rank=1,step=35 raise:rank=2,step=64 hang:rank=0,step=95"

What a killed rank had is nowhere else. So each one keeps a copy of its shard in host memory every ten steps, and a
second one on the next rank: all go back to the last step of which there is a copy of every shard.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

import torch
import torch._dynamo  # the first optimizer would import it: seconds, which look like a hang
import torch.distributed as dist
from fault_schedule import Faults
from live_recovery import arguments, digest, faults, launch, show, wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import inprocess


def train(
    args: argparse.Namespace, live: inprocess.LiveState, faults: Faults, call: inprocess.CallWrapper = None
) -> tuple[int, str]:
    """From the newest step that there is of every shard to the end; returns the rank, and a digest of the whole."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(args.seed)
    blocks = [torch.nn.Sequential(torch.nn.Linear(32, args.width), torch.nn.Linear(args.width, 32)) for _ in range(2)]
    network = torch.nn.Sequential(blocks[0], torch.nn.GELU(), torch.nn.Dropout(0.1), blocks[1])
    for module in (*blocks, network):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)

    step = live.recover(call, network=network, optimizer=optimizer)  # made anew: they are of this mesh
    while step < args.steps:
        call.ping()
        faults.strike(step)
        images = torch.randn(args.batch, 32)
        loss = (network(images) - images.square()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        with live.commit(step + 1):
            optimizer.step()
        step += 1

    live.wait()
    result = rank, digest(network, optimizer)
    dist.destroy_process_group()
    return result


def work(args: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)  # the ranks share the machine's cores
    logging.basicConfig(format="%(message)s")
    live = inprocess.LiveState(copy_every=10, replica_distance=1)
    show(wrapper()(train)(args, live, faults(args)))


if __name__ == "__main__":
    given = arguments(__doc__)
    sys.exit(work(given) if "RANK" in os.environ else launch(given, __file__))
