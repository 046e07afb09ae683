"""Functions that make a second default group in one process: in the next iteration, or in the same one."""

from __future__ import annotations

import os
import socket
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


def elsewhere(context: Context) -> Any:
    return context.wrap(_elsewhere)()


def _elsewhere(context: Context, call: Any) -> Any:
    """The function names an address by itself, where nobody listens."""
    rank, size = targets.place_in_world()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody will, while it is bound
        given: dict[str, Any] = {}
        if context.args["how"] == "tcp":
            given = {"init_method": f"tcp://127.0.0.1:{taken.getsockname()[1]}", "rank": rank, "world_size": size}
        else:
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(taken.getsockname()[1])
        dist.init_process_group("gloo", timeout=targets.LONG, **given)
        targets.check_sum(size)
        context.point("fault")
        dist.destroy_process_group()
    return [call.iteration, rank, size]


def stale(context: Context) -> Any:
    context.args["before"] = targets.place_in_world()
    return context.wrap(_stale)()


def _stale(context: Context, call: Any) -> Any:
    """Rank and world size are those that the process was started with, as in many programs."""
    rank, size = context.args["before"]
    given = {"rank": rank, "world_size": size}
    if context.args["only_size"]:
        given["rank"] = targets.place_in_world()[0]
    try:
        dist.init_process_group("gloo", timeout=targets.LONG, **given)
    except ValueError as error:
        context.emit("error", text=str(error))
        dist.init_process_group("gloo", timeout=targets.LONG)
    # a group of one rank is none of all
    context.point("fault")
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    return [call.iteration, *targets.place_in_world()]


def unserved(context: Context) -> Any:
    before = vars(dist.TCPStore).get("__init__")
    try:
        return context.wrap(_unserved)()
    finally:
        assert vars(dist.TCPStore).get("__init__") is before


def _unserved(context: Context, call: Any) -> Any:
    """A store of the program's own; nobody serves it in the first iteration."""
    rank, size = targets.place_in_world()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if call.iteration == 0:
            context.emit("waiting")
            serves = rank == 0 and context.args["serves"]
            dist.TCPStore("127.0.0.1", 0 if serves else taken.getsockname()[1], size, serves)
    served = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=targets.LONG)
    return [call.iteration, served.timeout == targets.LONG]
