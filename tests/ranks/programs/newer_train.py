"""Training as one wrote it for 0.4 to 0.7, with all options and hooks of 0.7: rank 1 raises in the first run, rank 3 is
killed in the second, and of the three that are left two train on."""

import json
import os
import signal
from datetime import timedelta
from typing import Optional

import nvidia_resiliency_ext.inprocess as inprocess
import nvidia_resiliency_ext.inprocess.abort
import nvidia_resiliency_ext.inprocess.store
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess import nested_restarter

RANK = int(os.environ["RANK"])
told = []


class NoteInitialize(inprocess.initialize.Initialize):
    def __call__(self, state):
        told.append(f"initialize {state.iteration} {state.world_size} {state.mode.name}")
        return state


class NoteAbort(nvidia_resiliency_ext.inprocess.abort.Abort):
    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        told.append("abort")
        return state


class NoteFinalize(inprocess.finalize.Finalize):
    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        told.append(f"finalize {type(state.fn_exception).__name__}")
        return state


class NoteCheck(inprocess.health_check.HealthCheck):
    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        if state.fn_exception is not None:
            told.append(f"check {state.fn_exception}")
        return state


class NoteCompletion(inprocess.completion.Completion):
    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        told.append("completion")
        return state


class NoteTerminate(inprocess.terminate.Terminate):
    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        told.append("terminate")
        return state


class Reversed(inprocess.rank_assignment.RankAssignment):
    """Only for the healthy: what is terminated has been removed by the part before."""

    def __call__(self, ctx: inprocess.rank_assignment.RankAssignmentCtx) -> inprocess.rank_assignment.RankAssignmentCtx:
        assert not ctx.terminated_ranks
        ctx.store.set(f"seen {ctx.state.rank}", "yes")
        ctx.state.rank = ctx.state.world_size - 1 - ctx.state.rank
        return ctx


class NoteFilter(inprocess.rank_assignment.RankFilter):
    def __call__(self, ctx: inprocess.rank_assignment.RankAssignmentCtx) -> inprocess.rank_assignment.RankAssignmentCtx:
        told.append(f"filter {ctx.state.active_world_size}")
        return ctx


def flush(what, how):
    told.append(f"flush {what} {how}")


@inprocess.Wrapper(
    store_factory=nvidia_resiliency_ext.inprocess.store.TCPStore,
    store_kwargs={"timeout": timedelta(seconds=60)},
    initialize=inprocess.Compose(
        NoteInitialize(),
        nested_restarter.NestedRestarterHandlingCompleted(),
        inprocess.initialize.RetryController(max_iterations=5, min_world_size=2, min_active_world_size=2),
    ),
    abort=inprocess.Compose(
        NoteAbort(),
        nvidia_resiliency_ext.inprocess.abort.AbortTransformerEngine(),
        nvidia_resiliency_ext.inprocess.abort.AbortTorchDistributed(torch_fr_trace_path=os.path.abspath("records")),
        nvidia_resiliency_ext.inprocess.abort.AbortPersistentCheckpointProcesses(),
        nested_restarter.NestedRestarterHandlingStarting(),
    ),
    completion=inprocess.Compose(NoteCompletion(), nested_restarter.NestedRestarterFinalized()),
    terminate=inprocess.Compose(NoteTerminate(), nested_restarter.NestedRestarterAborted()),
    finalize=inprocess.Compose(
        inprocess.finalize.ThreadedFinalize(timedelta(seconds=30), flush, ("files",), {"how": "now"}), NoteFinalize()
    ),
    health_check=inprocess.Compose(
        inprocess.health_check.CudaHealthCheck(timeout=timedelta(seconds=20)),
        inprocess.health_check.ChainedGPUHealthCheck(device_index=0),
        inprocess.health_check.ChainedNVLHealthCheck(),
        inprocess.health_check.ChainedNicHealthCheck(0),
        inprocess.health_check.FaultCounter(max_rank_faults=3),
        NoteCheck(),
    ),
    rank_assignment=inprocess.Compose(
        NoteFilter(),
        inprocess.rank_assignment.ActiveWorldSizeDivisibleBy(2),
        inprocess.rank_assignment.MaxActiveWorldSize(4),
        Reversed(),
        inprocess.rank_assignment.ShiftRanks(),
        inprocess.rank_assignment.FilterCountGroupedByKey(
            key_or_fn=lambda state: f"node {state.rank // 2}",
            condition=lambda count: count >= 1,
            timeout=timedelta(seconds=60),
        ),
    ),
    monitor_thread_interval=timedelta(seconds=1),
    monitor_process_interval=timedelta(seconds=1),
    heartbeat_interval=timedelta(seconds=1),
    progress_watchdog_interval=timedelta(seconds=1),
    soft_timeout=timedelta(seconds=60),
    hard_timeout=timedelta(seconds=90),
    heartbeat_timeout=timedelta(seconds=30),
    barrier_timeout=timedelta(seconds=120),
    completion_timeout=timedelta(seconds=120),
    last_call_wait=timedelta(seconds=1),
    termination_grace_time=timedelta(seconds=5),
    monitor_process_logfile=os.path.abspath("monitor_{rank}.log"),
    monitor_process_pidfile=os.path.abspath("monitor_{rank}.pid"),
    enabled=True,
)
def train(steps: int, call_wrapper: Optional[inprocess.CallWrapper] = None):
    with call_wrapper.disable_hang_protection():
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.zeros(1)
    for step in range(steps):
        call_wrapper.ping()
        if (call_wrapper.iteration, RANK, step) == (0, 1, 2):
            raise ValueError("a bad batch")
        if (call_wrapper.iteration, RANK, step) == (1, 3, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        with call_wrapper.atomic():
            total += ones
    dist.barrier()
    dist.destroy_process_group()
    return [call_wrapper.iteration, rank, size, total.item()]


result = train(4)
with open(f"result_{RANK}.json", "w") as file:
    json.dump({"result": result, "told": told}, file)
