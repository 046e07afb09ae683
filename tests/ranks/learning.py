"""Bodies that train a small network with a LiveState, with points for faults in everything that it does."""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from inprocess import LiveState
from inprocess.initialize import RetryController
from inprocess.live import state as live_state
from tests.harness.child import Context

from .targets import LONG


class Position:
    """A part that is neither a module nor an optimizer, and runs ahead of what is committed."""

    def __init__(self) -> None:
        self.drawn = 0

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


class Counting(torch.nn.Module):
    """Its buffer changes in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x * (1 + self.seen / 1000)


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), Counting(), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    )


class Striking(torch.optim.AdamW):
    """With a point in the middle of a step, where half of the parameters are new."""

    strike: Callable[[], None] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:
        kept = self.param_groups
        half = len(kept[0]["params"]) // 2
        try:
            for chosen in (kept[0]["params"][:half], kept[0]["params"][half:]):
                self.param_groups = [kept[0] | {"params": chosen}]
                super().step()
                self.strike()
        finally:
            self.param_groups = kept


def steps(context: Context, call: Any, step: int) -> Iterator[int]:
    while step < context.args.get("steps", 6):
        context.point(f"before {step}")
        call.ping()
        yield step
        step += 1


def gradients(model: torch.nn.Module, position: Position) -> None:
    position.drawn += 1
    (model(torch.randn(5, 8)) * position.drawn).square().mean().backward()


def run_replicated(context: Context, **options: Any) -> Any:
    """All ranks have everything, in objects that outlive iterations. Returns step, digest, position, sources."""
    torch.manual_seed(context.rank)  # the first weights differ: rank 0's count
    model, position = network(), Position()
    position.drawn = context.args.get("apart", 0) * context.rank
    optim = Striking(model.parameters(), lr=0.01)
    live = LiveState(model=model, optim=optim, position=position, **context.args.get("live", {}))
    sources: list[str] = []

    def learn(context: Context, call: Any) -> list[Any]:
        dist.init_process_group("gloo", timeout=LONG)
        _trace(context)
        context.point("recover")
        if live.step <= 0 and call.iteration == 0:
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)
        begin = live.recover(call)
        sources.append(live.source)
        for step in steps(context, call, begin):
            optim.zero_grad()
            gradients(model, position)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            context.point(f"summed {step}")
            with live.commit(step + 1):
                optim.strike = lambda step=step: context.point(f"inside {step}")
                optim.step()
            context.point(f"after {step}")
        live.wait()
        dist.destroy_process_group()
        return [live.step, digest([*model.parameters(), *model.buffers()]), position.drawn, sources]

    return _wrapped(context, learn, **options)()


def run_ddp(context: Context) -> Any:
    """DistributedDataParallel with BatchNorm, whose averages are each rank's own between a forward pass and the next
    one. ``args["buffers"]``: they are made rank 0's before each commit. Returns step, digests, nothing, sources."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    live, early = LiveState(model=model, optim=optim), context.args["buffers"]
    sources: list[str] = []

    def learn(context: Context, call: Any) -> list[Any]:
        dist.init_process_group("gloo", timeout=LONG)
        begin = live.recover(call)
        sources.append(live.source)
        ddp = DistributedDataParallel(model, broadcast_buffers=not early, find_unused_parameters=True)
        for step in steps(context, call, begin):
            optim.zero_grad()
            ddp(torch.randn(5, 8)).square().mean().backward()
            for buffer in model.buffers() if early else ():
                dist.broadcast(buffer, 0)
            with live.commit(step + 1):
                optim.step()
        del ddp  # else its C++ part is the group's last owner, and waits for threads that wait for the interpreter
        dist.destroy_process_group()
        return [live.step, digest([*model.parameters()]), digest([*model.buffers()]), sources]

    return _wrapped(context, learn)()


def run_accumulating(context: Context) -> Any:
    """DistributedDataParallel, whose constructor gives all ranks rank 0's first weights; two micro-batches a step, and
    gradients are cleared after it. Returns step, digest, nothing, sources."""
    torch.manual_seed(context.rank)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    live = LiveState(model=model, optim=optim)
    sources: list[str] = []

    def learn(context: Context, call: Any) -> list[Any]:
        dist.init_process_group("gloo", timeout=LONG)
        begin = live.recover(call)
        sources.append(live.source)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        for step in steps(context, call, begin):
            with ddp.no_sync():
                ddp(torch.randn(5, 8)).square().mean().backward()
            context.point(f"micro {step}")
            ddp(torch.randn(5, 8)).square().mean().backward()
            with live.commit(step + 1):
                optim.step()
            optim.zero_grad()
        del ddp
        dist.destroy_process_group()
        return [live.step, digest([*model.parameters()]), 0, sources]

    return _wrapped(context, learn)()


def run_sharded(context: Context, **options: Any) -> Any:
    """Each rank has a shard; model and optimizer are made anew in each iteration."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    live = LiveState(**context.args["live"])
    sources: list[str] = []

    def learn(context: Context, call: Any) -> list[Any]:
        dist.init_process_group("gloo", timeout=LONG)
        _trace(context)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(7)
        model, position = network(), Position()
        for layer in (model[0], model[4], model):
            fully_shard(layer, mesh=mesh)
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        context.point("recover")
        begin = live.recover(call, model=model, optim=optim, position=position)
        sources.append(f"{live.source} at {begin}")
        for step in steps(context, call, begin):
            optim.zero_grad()
            gradients(model, position)
            live.wait()
            dist.barrier()  # now the last copy is kept elsewhere: what a fault finds does not depend on the machine
            context.point(f"summed {step}")
            with live.commit(step + 1):
                context.point(f"inside {step}")
                optim.step()
            context.point(f"after {step}")
        live.wait()
        moments = [value for state in optim.state_dict()["state"].values() for value in state.values()]
        parts = [*model.parameters(), *moments]
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in parts]
        result = [live.step, digest([*whole, *model.buffers()]), position.drawn, sources]
        dist.destroy_process_group()
        return result

    try:
        value = _wrapped(context, learn, **options)()
        disk = live._saving.disk
        assert disk is None or disk.nbytes == 0, "the copy for a checkpoint has outlived the call"
        return value
    finally:
        disk = live = None  # its parts have a mesh, and that has groups with threads
        gc.collect()


def run_sharded_apart(context: Context) -> Any:
    """Each rank has a folder of its own."""
    folder = context.args["live"]["folder"]
    context.args["live"]["folder"] = folder + "/other" * context.rank
    return run_sharded(context)


def rotate(ctx: Any) -> Any:
    """A rank assignment: after each restart each process has the next rank."""
    from inprocess.rank_assignment import ShiftRanks

    before = ctx.state.rank
    ctx = ShiftRanks()(ctx)
    ctx.state.rank = (before + 1) % ctx.state.world_size
    return ctx


def one_waits(ctx: Any) -> Any:
    """A rank assignment: after the first restart the last rank is in reserve, after the second one it is not."""
    from inprocess import Compose
    from inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks

    most = ctx.state.world_size - (ctx.state.iteration == 1)
    return Compose(MaxActiveWorldSize(most), ShiftRanks())(ctx)


def run_replicated_with_a_reserve(context: Context) -> Any:
    return run_replicated(context, rank_assignment=one_waits)


def run_sharded_rotating(context: Context) -> Any:
    return run_sharded(context, rank_assignment=rotate)


def _wrapped(context: Context, learn: Callable[[Context, Any], Any], **options: Any) -> Callable[[], Any]:
    everybody = RetryController(min_world_size=dist_size(), wait_for_replacement=60)
    return context.wrap(learn, initialize=everybody, **options)


def _trace(context: Context) -> None:
    """Points inside of recover, and where checkpoints are written: before each of these."""

    if not hasattr(live_state.Wire, "traced"):
        live_state.Wire.traced = True
        context.trace(live_state.Wire, "send", "send")
        context.trace(live_state.Wire, "receive", "receive")
        if context.args.get("live", {}).get("transport") == "http":
            from inprocess.live import http

            context.trace(http.HttpWire, "send", "send")
            context.trace(http.HttpWire, "receive", "receive")
        if "folder" in context.args.get("live", {}):
            from inprocess.live import checkpoints

            context.trace(checkpoints.Checkpoints, "stage", "stage")
            context.trace(checkpoints._Summed, "write_data", "write")  # in a thread
            context.trace(checkpoints._Writer, "finish", "finish")  # rank 0's, when all have written
            context.trace(checkpoints, "load", "load")


def digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])
