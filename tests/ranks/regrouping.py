"""Functions that make a second default group in one process: in the next iteration, or in the same one."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.child import Context

from . import targets

#: seconds that a rank comes later than the others
LATE_S = 0.3


def split(context: Context) -> Any:
    return context.wrap(_split)()


def _split(context: Context, call: Any) -> Any:
    """As a DeviceMesh does where the default group is bound to a device."""
    _, size = targets.place_in_world()
    dist.init_process_group("gloo", timeout=targets.LONG)
    default = dist.group.WORLD
    assert default is not None
    # torch's own function wants a group that is bound to an accelerator
    part: Any = default.split_group(list(range(size)), None, None, "part", "")  # type: ignore[attr-defined]
    value = torch.ones(1)
    part.allreduce([value]).wait()
    context.point("fault")
    dist.destroy_process_group()
    return [call.iteration, int(value)]


def again(context: Context) -> Any:
    return context.wrap(_again)()


def _again(context: Context, call: Any) -> Any:
    """Train, destroy, and make a group again to evaluate; the last rank comes late to each."""
    rank, size = targets.place_in_world()
    given = {"store": call.store, "rank": rank, "world_size": size} if context.args["own_store"] else {}
    for _ in range(2):
        if rank == size - 1:
            time.sleep(LATE_S)
        dist.init_process_group("gloo", timeout=targets.LONG, **given)
        targets.check_sum(size)
        dist.destroy_process_group()
    context.point("fault")
    return call.iteration
