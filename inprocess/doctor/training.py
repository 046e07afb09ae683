"""What the ranks of the doctor's own job run: steps with an all-reduce. Imported in ranks, and for its name."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist

from inprocess.call_wrapper import CallWrapper
from inprocess.wrap import Wrapper

__all__ = ["STEPS", "train"]

#: of each run of the function; a fault strikes before the last one
STEPS = 20


@Wrapper()
def train(call: CallWrapper) -> float:
    """All ranks add up ones; the sum of the last step."""
    if call.iteration == 0:
        gc.collect()  # a rank is forked: a collection during the restart would copy its parent's pages
    dist.init_process_group("gloo")
    total = torch.zeros(1)
    for _ in range(STEPS):
        call.ping()
        total = torch.ones(1)
        dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)
