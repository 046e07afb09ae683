"""What torch keeps per process: each function sets it and fails in the first iteration, then says what it finds."""

from __future__ import annotations

import os
import sys
import time
import types
import urllib.request
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch import nn

from inprocess import Compose
from inprocess.kept import debug_server
from inprocess.rank_assignment import FillGaps, MaxActiveWorldSize
from tests import growth
from tests.harness.child import Context
from tests.harness.launch import PATIENT

from . import targets


def run(context: Context) -> Any:
    return context.wrap(lambda context, call: globals()[context.args["what"]](context))()


def profiler(context: Context) -> Any:
    session = torch.profiler.profile()
    session.start()
    torch.ones(3).add(1)
    context.point("fault")
    session.stop()
    return len(session.key_averages()) > 0


def profiled(context: Context) -> Any:
    """How many additions a profiler around two calls has seen."""
    with torch.profiler.profile() as session:
        for _ in range(2):
            context.wrap(_adds)()
    return sum(event.count for event in session.key_averages() if event.key == "aten::add")


def _adds(context: Context, call: Any) -> None:
    torch.ones(3).add(1)
    context.point("fault")
    torch.ones(3).add(1)


def autocast(context: Context) -> Any:
    found = torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu"):
        context.point("fault")
    return found


def grad_mode(context: Context) -> Any:
    found = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    context.point("fault")
    return found


def saved_tensors(context: Context) -> Any:
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor).__enter__()
    context.point("fault")
    return found is not None


def library(context: Context) -> Any:
    kept = torch.library.Library("inprocess_tests", "DEF")
    kept.define("next(Tensor x) -> Tensor")
    kept.impl("next", lambda x: x + 1, "CPU")
    context.point("fault")
    return torch.ops.inprocess_tests.next(torch.ones(1)).item() == 2


def attention(context: Context) -> Any:
    from torch.distributed.tensor.experimental import context_parallel

    before = F.scaled_dot_product_attention
    dist.init_process_group("gloo", timeout=targets.LONG)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    with context_parallel(mesh, buffers=[torch.ones(1, 2, 4, 8)], buffer_seq_dims=[2]):
        growth.wait_for_groups()
        context.emit("descriptors", count=len(os.listdir("/proc/self/fd")))
        context.point("fault")
    dist.destroy_process_group()
    return F.scaled_dot_product_attention is before and "scaled_dot" in before.__name__


def pipeline(context: Context) -> Any:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    dist.init_process_group("gloo", timeout=targets.LONG)
    stage = PipelineStage(nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: (output - target).sum())
    for _ in range(2):
        schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
        context.point("fault")
    dist.destroy_process_group()
    return stage.submod is not None


def default_dtype(context: Context) -> Any:
    found = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    context.point("fault")
    torch.set_default_dtype(torch.float32)
    return str(found)


def default_device(context: Context) -> Any:
    found = torch.get_default_device()
    torch.set_default_device("meta")
    context.point("fault")
    torch.set_default_device(None)
    return str(found)


def deterministic(context: Context) -> Any:
    found = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    context.point("fault")
    torch.use_deterministic_algorithms(False)
    return found


def precision(context: Context) -> Any:
    found = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    context.point("fault")
    torch.set_float32_matmul_precision("highest")
    return found


def module_hooks(context: Context) -> Any:
    hooks = nn.modules.module._global_forward_hooks
    found = len(hooks)
    nn.modules.module.register_module_forward_hook(lambda *_: None)
    context.point("fault")
    hooks.clear()
    return found


def profiler_left_running(context: Context) -> Any:
    found = torch._C._autograd._profiler_enabled()
    kept.append(torch.profiler.profile())  # nothing else ends it
    kept[-1].start()
    context.point("fault")
    kept.pop().stop()
    kept.clear()
    return found


kept: list[Any] = []


def traced(context: Context) -> Any:
    return context.wrap(_traced)()


def _traced(context: Context, call: Any) -> Any:
    """Rank 0 is inside a profiler that ends a trace when the other one raises."""

    def ready(profile: Any) -> None:
        context.emit("ready")
        time.sleep(0.5)
        context.emit("written")

    steps = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(schedule=steps, on_trace_ready=ready if context.rank == 0 else None) as profile:
        context.point("fault")
        for _ in range(2):
            profile.step()
        if call.iteration == 0:
            time.sleep(targets.LONG.total_seconds())
    return call.iteration


# --- the debug server


def served(context: Context) -> Any:
    tables: Any = types.ModuleType("tabulate")  # what torch prints tables with, which the tests need not have
    tables.tabulate = None
    sys.modules.setdefault("tabulate", tables)
    return context.wrap(_served)()


def _served(context: Context, call: Any) -> Any:
    from torch.distributed import debug

    dist.init_process_group("gloo")
    debug.start_debug_server(port=0, handlers=[])
    server = debug._WORKER_SERVER
    assert server is not None
    context.emit("served", port=server.port, page=getattr(debug._DEBUG_SERVER_PROC, "pid", None))
    dist.barrier()  # after which the other rank's fault may interrupt this one at any line
    context.point("fault")
    dist.barrier()
    answer = urllib.request.urlopen(f"http://localhost:{server.port}/handler/", timeout=30)
    with answer:
        found = answer.status
    debug_server.reset()  # which nobody does after the last iteration
    dist.destroy_process_group()
    return [call.iteration, found]


# --- torch.distributed.rpc


def spared(context: Context) -> dict[str, Any]:
    return {**PATIENT, "rank_assignment": Compose(MaxActiveWorldSize(2), FillGaps())}


def remote(context: Context) -> Any:
    return context.wrap(_remote)()


def _remote(context: Context, call: Any) -> Any:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size)
    found = rpc.rpc_sync(f"rank{(rank + 1) % size}", os.getenv, args=("RANK",))
    context.point("fault")
    rpc.shutdown()
    return [call.iteration, rank, found]
