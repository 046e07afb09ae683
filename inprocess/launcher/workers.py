"""The workers of a node: what fills each local rank, and how it is started."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from inprocess.launcher.generation import Generation
from inprocess.launcher.processes import Process, ProcessSpec, StreamFilters, WorkerLaunch
from inprocess.system.descriptors import DescriptorLimits

__all__ = ["GROW_VARIABLE", "WorkerSlot", "RESTART_VARIABLE", "joining", "process_spec", "variables"]

#: in the environment of a worker that joins others who run; how often it was started again alone, and at least 1
RESTART_VARIABLE = "INPROCESS_RESTART"
#: and in that of one whose rank nobody had before: it makes the job larger
GROW_VARIABLE = "INPROCESS_GROW"


@dataclass(eq=False)
class WorkerSlot:
    """One local rank: the processes that fill it, one after the other."""

    worker: Any
    start: WorkerLaunch
    #: how often it was started alone, over the whole job
    respawned: int
    process: Process | None = None
    #: its processes told that they run a wrapped function
    wrapped: bool = False
    #: and that they do without the launcher's store
    own_store: bool = False
    #: when it is started again (monotonic seconds)
    due: float | None = None
    #: since when that was not possible (monotonic seconds)
    failing_since: float | None = None
    #: why its process is being ended by the launcher
    reason: str = ""
    #: when it is killed if it has not ended by then (monotonic seconds)
    doomed: float | None = None
    #: its last process found nobody to join
    stranded: bool = False
    #: the call of its last process ended with an error on all ranks
    over: bool = False
    #: so long it is waited for the others of which the same is true (monotonic seconds)
    others_until: float | None = None
    #: of its last process; None once a replacement has taken over
    failure: ProcessFailure | None = None
    done: bool = False
    #: signals that its process was passed on, and that of which it has left; it is not started again then
    asked: set[signal.Signals] = field(default_factory=set)
    left: signal.Signals | None = None
    value: Any = None

    @property
    def rank(self) -> int:
        return int(self.worker.global_rank)

    def left_as_asked(self, exitcode: int) -> signal.Signals | None:
        """The signal that was passed on to its process and of which that ended."""
        return next((number for number in self.asked if exitcode in (128 + number, -number)), None)

    @property
    def fresh(self) -> bool:
        """Its process is the one that was started together with all others."""
        return self.process is not None and RESTART_VARIABLE not in self.start.env

    def __str__(self) -> str:
        pid = f", pid {self.process.pid}" if self.process else ""
        return f"rank {self.rank} (local rank {self.worker.local_rank}{pid})"


def joining(met: Generation) -> list[Worker]:
    """The workers of a node that joins a running job; empty where it does not."""
    if met.block is None:
        return []
    ranks = range(met.block.base, met.block.base + met.block.size)
    return [Worker(i, rank, rank, met.world, met.world) for i, rank in enumerate(ranks)]


def variables(group: WorkerGroup, worker: Worker, generation: int) -> dict[str, str]:
    """What torchrun sets in a worker's environment, with the store of this generation."""
    spec = group.spec
    return {
        "LOCAL_RANK": str(worker.local_rank),
        "RANK": str(worker.global_rank),
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "GROUP_RANK": str(group.group_rank),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_NAME": spec.role,
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(generation),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def process_spec(
    spec: WorkerSpec, start_method: str, limits: DescriptorLimits, take: Callable[..., Any]
) -> ProcessSpec:
    filters = StreamFilters(
        tuple(getattr(spec, "duplicate_stdout_filters", None) or ()),
        tuple(getattr(spec, "duplicate_stderr_filters", None) or ()),
    )
    numa = getattr(spec, "numa_options", None)
    assert spec.entrypoint is not None
    return ProcessSpec(spec.role, spec.entrypoint, start_method, numa, filters, limits, take)
