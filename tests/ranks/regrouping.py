"""Functions that make a second default group in one process: in the next iteration, or in the same one."""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist

from inprocess.testing.ports import ReservedPort
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


def kept_store(context: Context) -> Any:
    """A store of the program's own, which it makes before the call, or names as a file; the last rank comes first."""
    path, size = context.args["path"], int(os.environ["WORLD_SIZE"])
    given: dict[str, Any] = {"init_method": f"file://{path}"}
    if context.args["how"] == "store":
        given = {"store": dist.FileStore(path, size)}

    def body(context: Context, call: Any) -> Any:
        rank, size = targets.place_in_world()
        if rank != size - 1:
            time.sleep(LATE_S)
        dist.init_process_group("gloo", timeout=targets.LONG, rank=rank, world_size=size, **given)
        targets.check_sum(size)
        context.point("fault")
        targets.check_sum(size)
        dist.destroy_process_group()
        return call.iteration

    return context.wrap(body)()


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


def beside(context: Context) -> Any:
    return context.wrap(_beside)()


def _beside(context: Context, call: Any) -> Any:
    """Groups of the program's own beside the default one, as those that send weights to inference engines: all have
    the same size, and each a store of its own, which its first rank or somebody else serves. The last rank stands for
    an engine, which this library does not wrap."""
    rank, size = targets.place_in_world()
    dist.init_process_group("gloo", timeout=targets.LONG)
    address, values, served = _address(), [], []
    with contextlib.ExitStack() as until_over:
        for number in range(2):
            if rank == 0:
                port = until_over.enter_context(ReservedPort()).number
                # torch makes another object for the same server, where there is one
                if context.args["is_served"]:
                    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, multi_tenant=True)
                    served.append(store)
                call.store.set(f"port {number}", str(port))
            port = int(call.store.get(f"port {number}"))
            group = _made_beside(f"engines {number}", port, as_engine=rank == size - 1)
            value = torch.ones(1)
            group.allreduce([value]).wait()
            values.append(int(value))
    assert _address() == address
    context.point("fault")
    dist.destroy_process_group()
    return [call.iteration, *values]


def _address() -> list[str]:
    return [os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")]


def _made_beside(name: str, port: int, as_engine: bool) -> Any:
    """What OpenRLHF, verl and slime do, each in a function of its own."""
    from torch.distributed.distributed_c10d import (
        Backend,
        PrefixStore,
        _new_process_group_helper,
        rendezvous,
    )

    meet, make = ((inspect.unwrap(each) if as_engine else each) for each in (rendezvous, _new_process_group_helper))
    store, rank, size = next(meet(f"tcp://127.0.0.1:{port}", *targets.place_in_world(), timeout=targets.LONG))
    store = PrefixStore(name, store)
    return make(size, rank, [], Backend("gloo"), store, group_name=name, timeout=targets.LONG)[0]


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
    dist.barrier()  # who is still connecting meets no group that others have destroyed
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


#: torch 2.14 and later
CAN_RECONFIGURE = "enable_reconfigure" in inspect.signature(dist.init_process_group).parameters


def reconfigure(store: Any, number: int) -> None:
    """Tell the default group who its members are: all ranks, by their handles."""
    rank, size = targets.place_in_world()
    store.set(f"handle {number} {rank}", dist._get_reconfigure_handle())  # type: ignore[attr-defined]
    handles = [store.get(f"handle {number} {each}").decode() for each in range(size)]
    dist._reconfigure(uuid=number, handles=handles, timeout=targets.LONG).wait()  # type: ignore[attr-defined]


def reconfigured(context: Context) -> Any:
    return context.wrap(_reconfigured)()


def _reconfigured(context: Context, call: Any) -> list[int]:
    """A default group that has no members until it is told who they are, twice: as torchft and its like do."""
    rank, size = targets.place_in_world()
    dist.init_process_group("gloo", enable_reconfigure=True, timeout=targets.LONG)  # type: ignore[call-arg]
    for number in (1, 2):
        context.point(f"before {number}")
        reconfigure(call.store, number)
        context.point(f"after {number}")
        targets.check_sum(size)
    dist.destroy_process_group()
    return [call.iteration, rank, size]


def reconfigured_late(context: Context) -> Any:
    return context.wrap(_reconfigured_late)()


def _reconfigured_late(context: Context, call: Any) -> list[int]:
    """Rank 1 gives its handle, and comes no further once rank 0 is inside torch's function."""
    rank, size = targets.place_in_world()
    dist.init_process_group("gloo", enable_reconfigure=True, timeout=targets.LONG)  # type: ignore[call-arg]
    if call.iteration == 0:
        handle = dist._get_reconfigure_handle()  # type: ignore[attr-defined]
        call.store.set(f"handle 1 {rank}", handle)
        if rank == 1:
            call.store.get("inside")
            raise ValueError("late")
        call.store.set("inside", "")
    reconfigure(call.store, 1)
    targets.check_sum(size)
    dist.destroy_process_group()
    return [call.iteration, rank, size]
