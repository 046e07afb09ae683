"""One, several, all ranks raise: everybody restarts in the same process with the same ranks and world size."""

from __future__ import annotations

import asyncio
import builtins
import errno
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemWriter

from inprocess import RestartAbort
from inprocess.protocol import verbs
from tests import growth
from tests.harness import At, Raise, Uncopyable, Unpicklable
from tests.harness.child import Context
from tests.harness.launch import PATIENT

from . import checks, targets
from .test_reports import report


def test_without_a_fault_the_function_runs_once(launch):
    ranks = launch(targets.run_train, 4, args={"full_exit": True}).wait()
    assert ranks.values == [[0, rank, 4] for rank in range(4)]
    assert [len(rank.entries()) for rank in ranks] == [1] * 4


def test_one_rank_alone(launch):
    ranks = launch(targets.run_train, 1, faults={At(0, step=1): Raise()}).wait()
    checks.went_on(ranks)


@pytest.mark.parametrize("kind", [ValueError, Uncopyable, Unpicklable, RuntimeError], ids=lambda kind: kind.__name__)
def test_one_raises(launch, kind):
    ranks = launch(targets.run_train, 2, faults={At(1, step=1): Raise(kind)}).wait()
    checks.went_on(ranks)


# --- errors that are no `Exception`


class FullDisk(FileSystemWriter):
    """Of rank 1, once."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write_data(plan, planner)


def save(context: Context, call: Any, rank: int) -> None:
    """torch raises a CheckpointException on every rank, which is no `Exception`."""
    writer = FullDisk if call.iteration == 0 else FileSystemWriter
    path = f"{context.args['run_dir']}/{call.iteration}"
    checkpoint.save({"weight": torch.ones(2)}, storage_writer=writer(path))


def cancel(context: Context, call: Any, rank: int) -> None:
    async def step() -> None:
        if call.iteration == 0 and rank == 1:
            raise asyncio.CancelledError

    asyncio.run(step())


def group(context: Context, call: Any, rank: int) -> None:
    """As a TaskGroup does; with what is to leave the job in it, the rank leaves."""
    error: BaseException = context.args.get("holds", asyncio.CancelledError)()
    if call.iteration == 0 and rank == 1:
        raise vars(builtins)["BaseExceptionGroup"]("unhandled errors", [ValueError("first"), error])


def fails(context: Context, call: Any) -> list[int]:
    rank, size = targets.place_in_world()
    dist.init_process_group("gloo", timeout=targets.LONG)
    {"save": save, "cancel": cancel, "group": group}[context.args["how"]](context, call, rank)
    targets.check_sum(size)
    dist.destroy_process_group()
    return [call.iteration, rank, size]


def run_failing(context: Context) -> Any:
    def finalize(state: Any) -> Any:
        context.emit("finalized", error=type(state.fn_exception).__name__)
        return state

    return context.wrap(fails, finalize=finalize)()


@pytest.mark.parametrize(
    ("how", "name"), [("save", "CheckpointException"), ("cancel", "CancelledError"), ("group", "BaseExceptionGroup")]
)
def test_any_other_error_is_a_failure(launch, tmp_path, how, name):
    args = {"how": how, "run_dir": str(tmp_path)}
    ranks = launch(run_failing, 3, wrapper=PATIENT | {"run_dir": str(tmp_path)}, args=args).wait()
    checks.went_on(ranks)
    # "save" raises it on all ranks, and the first one may interrupt the others before they do
    raised = {rank.rank for rank in ranks if rank.of("finalized")[0]["error"] == name}
    assert {rank.rank for rank in ranks if f"rank {rank.rank}: an error that is new in this call" in rank.log} == raised
    (incident,) = report(tmp_path)
    verdict = incident.verdict
    assert verdict.kind == "exception" and verdict.confidence > 0.9
    assert verdict.message.startswith(name)
    failed = {verdict.initial_rank, *verdict.also}
    assert failed == raised == {1} if how != "save" else failed <= raised


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, RestartAbort], ids=lambda kind: kind.__name__)
def test_a_group_that_holds_an_exit_leaves(launch, kind):
    ranks = launch(run_failing, 3, args={"how": "group", "holds": kind}).wait()
    checks.failed(ranks, {1: "BaseExceptionGroup"})
    checks.went_on(ranks, without=[1])


@pytest.mark.parametrize("raising", [(0,), (0, 1), (0, 1, 2)], ids=str)
def test_some_raise_at_the_same_step(launch, raising):
    ranks = launch(targets.run_train, 3, faults={At(rank, step=1): Raise() for rank in raising}).wait()
    checks.went_on(ranks)


def test_one_after_the_other(launch):
    faults = {
        At(0, iteration=0, step=2): Raise(),
        At(1, iteration=1, step=0): Raise(Uncopyable),
        At(2, iteration=2, step="enter"): Raise(Unpicklable),
        At(1, iteration=3, step="end"): Raise(),
    }
    ranks = launch(targets.run_train, 3, faults=faults).wait()
    checks.went_on(ranks, iteration=4)
    entered = [[entry[0] for entry in rank.entries()] for rank in ranks]
    # in iteration 2 the fault comes at the entry: who has not entered by then does not any more
    assert [[number for number in numbers if number != 2] for numbers in entered] == [[0, 1, 3, 4]] * 3
    assert entered[2] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["ordinary", "kept"])
def test_many_restarts_leave_nothing(launch, kind):
    """What fifty restarts leave behind, also where the program keeps every exception; `nox -s leaks` is the long form.

    An entry may see a few things more than the one before: the groups of the last iteration end in the background.
    """
    found = growth.series(launch, kind, 2, restarts=50, every=2, deadline=60, memory=False)
    for (rank, name), points in found.items():
        first, last = ([value for at, value in points if at in times] for times in (range(5, 15), range(41, 51)))
        if name in growth.COUNTED:
            assert min(last) <= max(first), f"{name} of rank {rank}: {points}"
        if name == "keys":  # those of the last iterations
            assert min(last) <= max(value for at, value in points if verbs.KEEP_VERDICTS + 5 <= at < 35), points
