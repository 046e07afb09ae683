"""A function that is interrupted in a coalescing context; what NCCL and torch count is that of stand-ins."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from inprocess.collectives import coalescing
from tests.harness.child import Context
from tests.threads.group_calls import Backend, Nccl

from . import targets

DEVICE = torch.device("cuda", 0)
_nccl = Nccl()


def run(context: Context) -> Any:
    _pretend()
    return context.wrap(_body)()


def _pretend() -> None:
    """In this process each group has NCCL for tensors on a GPU."""
    kind: Any = dist.ProcessGroup
    get_backend = kind._get_backend
    kind._get_backend = lambda group, device: (
        Backend(_nccl) if torch.device(device).type == "cuda" else get_backend(group, device)
    )
    kind._start_coalescing = lambda group, device: _nccl.start()
    kind._end_coalescing = lambda group, device: _nccl.end()
    coalescing._nccl = lambda: _nccl
    dist.is_nccl_available = lambda: True  # type: ignore[method-assign]
    dist.ProcessGroupNCCL = Backend  # type: ignore[attr-defined,misc]


def _body(context: Context, call: Any) -> Any:
    _, size = targets.place_in_world()
    dist.init_process_group("gloo", timeout=targets.LONG)
    targets.check_sum(size)
    counted = [_nccl.depth, _nccl.counted]
    if call.iteration == 0:
        if context.args["replaced"]:
            with dist._coalescing_manager(device=DEVICE):
                _stay(context)
        dist.group.WORLD._start_coalescing(DEVICE)
        _stay(context)
    dist.destroy_process_group()
    return [call.iteration, *counted]


def _stay(context: Context) -> None:
    context.emit("entered")
    context.point("fault")
    time.sleep(targets.LONG.total_seconds())
