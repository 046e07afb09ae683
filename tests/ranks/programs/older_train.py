"""Training as one wrote it for 0.2, with all its options and hooks: rank 1 raises in the first run, rank 3 is killed in
the second, and of the three that are left two train on."""

import datetime
import json
import os
import signal
from datetime import timedelta
from typing import Optional

import nvidia_resiliency_ext.inprocess as inprocess
import nvidia_resiliency_ext.inprocess.abort
import nvidia_resiliency_ext.inprocess.rank_filter
import nvidia_resiliency_ext.inprocess.store
import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
told = []


class Announce(inprocess.initialize.Initialize):
    def __call__(self, state):
        told.append(f"initialize {state.iteration} {state.world_size} {state.status.name}")
        return state


class NoteAbort(nvidia_resiliency_ext.inprocess.abort.Abort):
    def __call__(self, state):
        told.append("abort")
        return state


class NoteFinalize(inprocess.finalize.Finalize):
    def __call__(self, state, train_ex=None):
        told.append(f"finalize {type(train_ex).__name__}")
        return state, train_ex


class NoteCheck(inprocess.health_check.HealthCheck):
    def __call__(self, state, train_ex=None):
        if train_ex is not None:
            told.append(f"check {train_ex}")
        return state, train_ex


class FirstRanks(nvidia_resiliency_ext.inprocess.rank_filter.RankFilter):
    def __call__(self, state):
        told.append(f"filter {state.active_world_size}")
        return state


def flush(what, how):
    told.append(f"flush {what} {how}")


@inprocess.Wrapper(
    store_factory=nvidia_resiliency_ext.inprocess.store.TCPStore,
    store_kwargs={"timeout": timedelta(seconds=60)},
    initialize=inprocess.Compose(
        Announce(),
        inprocess.initialize.RetryController(max_iterations=5, min_world_size=2, min_active_world_size=2),
    ),
    abort=inprocess.Compose(NoteAbort(), nvidia_resiliency_ext.inprocess.abort.AbortTorchDistributed()),
    finalize=inprocess.Compose(
        inprocess.finalize.ThreadedFinalize(timedelta(seconds=30), flush, ("files",), {"how": "now"}), NoteFinalize()
    ),
    health_check=inprocess.Compose(
        inprocess.health_check.CudaHealthCheck(timeout=timedelta(seconds=20)),
        inprocess.health_check.FaultCounter(max_rank_faults=3),
        NoteCheck(),
    ),
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.ShiftRanks(),
        inprocess.rank_assignment.FilterGroupedByKey(
            key_or_fn=lambda rank, _: f"node {rank // 2}",
            condition=lambda count: count >= 1,
            timeout=timedelta(seconds=60),
        ),
    ),
    rank_filter=inprocess.Compose(
        FirstRanks(),
        nvidia_resiliency_ext.inprocess.rank_filter.WorldSizeDivisibleBy(2),
        nvidia_resiliency_ext.inprocess.rank_filter.MaxActiveWorldSize(4),
    ),
    monitor_thread_interval=timedelta(seconds=1),
    monitor_process_interval=timedelta(seconds=1),
    progress_watchdog_interval=timedelta(seconds=1),
    soft_timeout=timedelta(seconds=60),
    hard_timeout=timedelta(seconds=90),
    heartbeat_timeout=timedelta(seconds=30),
    barrier_timeout=timedelta(seconds=120),
    completion_timeout=timedelta(seconds=120),
    last_call_wait=timedelta(seconds=1),
    termination_grace_time=timedelta(seconds=5),
    monitor_process_logfile=os.path.abspath("monitor_{rank}.log"),
    enabled=True,
)
def train(steps: int, call: Optional[inprocess.CallWrapper] = None):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.zeros(1)
    for step in range(steps):
        call.ping()
        if (call.iteration, rank, step) == (0, 1, 2):
            raise ValueError("a bad batch")
        if (call.iteration, rank, step) == (1, 3, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        with call.atomic():
            total += ones
    dist.barrier()
    dist.destroy_process_group()
    return [call.iteration, rank, size, total.item()]


result = train(4)
with open(f"result_{RANK}.json", "w") as file:
    json.dump({"result": result, "told": told}, file)
