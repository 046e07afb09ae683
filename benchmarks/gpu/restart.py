"""One fault in one job of NCCL ranks: from the fault to the first all-reduce of the new group, split by phase.

The library is as everybody has it: times come from its hooks, and from the function itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import inprocess
from benchmarks.gpu.place import Place
from benchmarks.gpu.plan import CASES, PHASES, TIMEOUTS, Case, Phase, Request, Timeouts
from benchmarks.job import Job, Mark, free_port, last, mark
from benchmarks.libraries import Marks
from benchmarks.restart import LONG, SETTLE, explain, in_ms
from inprocess.exception import HealthCheckError
from inprocess.health_check import CudaHealthCheck

VICTIM = 1
#: an endless kernel ends after this time (seconds), should nobody end it
ENDLESS = 120
#: cycles in a second, at most: a slower clock makes it a longer one
CLOCK = 2_000_000_000
NOBODY = Timeouts(0.0, 0.0, 30.0)


# --- inside a rank ------------------------------------------------------------------------------------------------


class Check:
    """CudaHealthCheck. On a CPU, where no context can break, what the fault has said."""

    def __init__(self, timeout: float) -> None:
        self._check = CudaHealthCheck(timeout)
        self.broken = False

    def __call__(self, state: Any) -> Any:
        if self.broken:
            raise HealthCheckError("stands in for a broken CUDA context")
        return self._check(state)


class Rank:
    """What one process of the job does."""

    def __init__(self, place: Place, case: Case, world_size: int, rank: int) -> None:
        self._place, self._case, self._rank = place, case, rank
        self._device = place.enter(rank, world_size)
        self._timeouts = TIMEOUTS[place.kind] if case.waits else NOBODY
        self._check = Check(self._timeouts.check)

    def run(self) -> None:
        marks = Marks(self._rank)
        wrap = inprocess.Wrapper(
            abort=marks.around("abort", inprocess.abort.AbortTorchDistributed(), "aborted"),
            finalize=marks.hook("left"),
            health_check=marks.around("check", self._check, "healthy"),
            rank_assignment=marks.around("assign", inprocess.rank_assignment.ShiftRanks(), "assigned"),
            initialize=marks.hook("initialize"),
            max_repeats=None,  # the same fault again and again is what is measured
            **(self._timeouts.options() if self._case.waits else {}),
        )

        def train(call: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]
            self._train(call.iteration)

        wrap(train)()

    def _train(self, iteration: int) -> None:
        mark("entry", self._rank, iteration)
        self._place.init_process_group()
        mark("group", self._rank, iteration)
        number = torch.ones(1, device=self._device)
        self._reduce(number)
        mark("reduced", self._rank, iteration)
        if iteration == 0:
            if self._rank == VICTIM:
                time.sleep(SETTLE)  # by then the others wait on the device
                self._fail()
            self._reduce(number)
        dist.destroy_process_group()

    def _reduce(self, number: torch.Tensor) -> None:
        dist.all_reduce(number)
        self._place.synchronize()

    def _fail(self) -> None:
        mark("fault", self._rank, 0)
        case = self._case.name
        if case == "exception":
            raise RuntimeError("injected by the benchmark")
        if case == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "poison":
            self._poison()
        if case in ("kernel", "check"):
            self._never_end(waits=case == "kernel")
        time.sleep(LONG)

    def _poison(self) -> None:
        if not self._place.is_cuda:
            self._check.broken = True
            raise RuntimeError("stands in for a failed assertion on the device")
        torch.zeros(1, device=self._device)[torch.tensor([1 << 20], device=self._device)].add_(1)
        torch.cuda.synchronize()
        raise AssertionError("the device did not notice an index out of range")

    def _never_end(self, waits: bool) -> None:
        if self._place.is_cuda:
            torch.cuda._sleep(ENDLESS * CLOCK)  # type: ignore[no-untyped-call]
            if waits:
                torch.cuda.synchronize()
        elif waits:
            never()
        else:
            self._check.broken = True


def never() -> None:
    """Wait as cudaDeviceSynchronize does: in C, without the interpreter lock, and for no signal."""
    mutex = ctypes.create_string_buffer(128)  # PTHREAD_MUTEX_INITIALIZER is all zeros on Linux
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


# --- outside ------------------------------------------------------------------------------------------------------


def measure(place: Place, request: Request) -> dict[str, Any]:
    """Run the job once."""
    case = next(case for case in CASES if case.name == request.case)
    everybody = set(range(request.world_size))
    going_on = everybody if case.stays else everybody - {VICTIM}
    with Job(request.world_size) as job:
        job.start(lambda rank: Rank(place, case, request.world_size, rank).run(), free_port())
        job.wait(lambda marks: last(marks, "reduced", 1, going_on) is not None, request.limit)
        job.let_end()
        return evaluate(case, request, job, going_on)


def evaluate(case: Case, request: Request, job: Job, going_on: set[int]) -> dict[str, Any]:
    """What was measured, or why nothing could be."""
    marks = job.marks
    fault, reduced = last(marks, "fault", 0, {VICTIM}), last(marks, "reduced", 1, going_on)
    killed = sorted(rank for rank in going_on if job.codes.get(rank, 0) < 0)
    if fault is None or reduced is None or killed:
        note = explain(request.limit, job, going_on, killed)
        return {"values": {}, "note": note, "errors": job.errors()}
    phases = split(marks, fault, case)
    waited = sum(phases[name] for name in case.waits)
    start = [last(marks, name, 0, set(range(request.world_size))) or 0 for name in ("entry", "reduced")]
    values = {
        "total": reduced - fault,
        "waited": waited,
        "restart": reduced - fault - waited,
        # the same in the first iteration, when nothing has failed yet
        "group at the start": start[1] - start[0],
    }
    return {
        "values": {name: in_ms(value) for name, value in values.items()},
        "phases": {name: in_ms(value) for name, value in phases.items()},
        "note": "",
        "leaving": job.errors(),
        "victim": "" if case.stays else how_it_ended(job),
    }


def split(marks: Sequence[Mark], begin: int, case: Case) -> dict[str, int]:
    """How long each phase took, in nanoseconds; they follow each other without gaps."""
    phases: dict[str, int] = {}
    for phase in PHASES:
        if phase.optional and phase.name not in case.waits:
            continue
        end = max(_end(marks, phase, begin), begin)
        phases[phase.name] = end - begin
        begin = end
    return phases


def _end(marks: Sequence[Mark], phase: Phase, default: int) -> int:
    times: dict[int, list[int]] = {}
    for found in marks:
        if (found.name, found.iteration) == (phase.mark, phase.iteration):
            times.setdefault(found.rank, []).append(found.t)
    if phase.mark == "ended":
        return max(times.get(VICTIM, [default]))
    if phase.mark == "abort":  # it may run once more, which is part of it
        firsts = [min(per_rank) for per_rank in times.values()]
        return (min if phase.first else max)(firsts, default=default)
    return max((max(per_rank) for per_rank in times.values()), default=default)


def how_it_ended(job: Job) -> str:
    """The process in which the fault was."""
    code = job.codes.get(VICTIM)
    if code is None:
        return "has not ended"
    if code < 0:
        return signal.Signals(-code).name
    texts = [str(found.fields["text"]) for found in job.marks if (found.name, found.rank) == ("raised", VICTIM)]
    return texts[0].partition(":")[0] if texts else f"exit code {code}"
