"""Loggers and metrics across restarts: their threads, files and processes do not add up, and their values are right."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import inprocess
from inprocess.testing import At, Kill, Raise, here

from .kept import PATIENT, check_beliefs, replaced

STEPS = 6


@inprocess.Wrapper()
def tensorboard(folder: str, call: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]
    from torch.utils.tensorboard import SummaryWriter

    dist.init_process_group("gloo")
    with SummaryWriter(f"{folder}/{dist.get_rank()}") as writer:
        for step in range(STEPS):
            call.ping()
            writer.add_scalar("loss", 1 / (step + 1), step)
            dist.barrier()


@inprocess.Wrapper()
def wandb(folder: str, call: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]
    """The main process logs, whichever that is."""
    import wandb

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        with wandb.init(project="test", dir=folder, mode="offline") as run:
            _steps(call, run.log)
    else:
        _steps(call, lambda values: None)


def _steps(call: inprocess.CallWrapper, log: Any) -> None:
    for step in range(STEPS):
        call.ping()
        log({"loss": 1 / (step + 1)})
        dist.barrier()


PROGRAMS = {"TensorBoard": tensorboard, "wandb": wandb}


@pytest.mark.parametrize("name", PROGRAMS)
def test_twenty_restarts_leave_nothing(ranks: Any, tmp_path: Any, name: str) -> None:
    faults = {At(rank=i % 2, step=2, iteration=i): Raise(OSError) for i in range(20)}
    result = ranks(2, env={"WANDB_SILENT": "true"}, **PATIENT).run(PROGRAMS[name], str(tmp_path), faults=faults)
    assert result.restarts == 20 and result.same_pids
    result.assert_nothing_grows()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_dies(ranks: Any, tmp_path: Any, name: str, rank: int) -> None:
    """Where it is rank 0, another one logs from then on."""
    faults = {At(rank=rank, step=2): Kill()}
    env = {"WANDB_SILENT": "true"}
    result = ranks(3, env=env, **PATIENT).run(PROGRAMS[name], str(tmp_path), faults=faults)
    assert result.world_sizes == [3, 2]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_dies_and_is_replaced(ranks: Any, tmp_path: Any, name: str, rank: int) -> None:
    env = {"WANDB_SILENT": "true"}
    result = ranks(2, env=env, **replaced(2)).run(PROGRAMS[name], str(tmp_path), faults={At(rank=rank, step=2): Kill()})
    assert result.world_sizes == [2, 2]


def metric_outside() -> None:
    """It is kept outside of the wrapped function."""
    from torchmetrics import SumMetric

    metric = SumMetric()

    @inprocess.Wrapper()
    def summed(call: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]
        dist.init_process_group("gloo")
        metric.reset()  # what docs/frameworks.md says to do
        for step in range(STEPS):
            call.ping()
            metric.update(torch.ones(1))
            here("computing")
            value = metric.compute().item()  # over all ranks
            here("belief", believed=value, true=float((step + 1) * int(os.environ["WORLD_SIZE"])))

    summed()


@pytest.mark.parametrize("fault", [Raise(OSError), Kill()], ids=["raise", "kill"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_metric_that_was_interrupted_while_it_was_synchronized(ranks: Any, rank: int, fault: Any) -> None:
    result = ranks(3, **PATIENT).run(metric_outside, faults={At(rank=rank, label="computing", step=3): fault})
    assert result.world_sizes == [3, 2 if isinstance(fault, Kill) else 3]
    check_beliefs(result, 2 * STEPS)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_metric_where_one_dies_and_is_replaced(ranks: Any, rank: int) -> None:
    faults = {At(rank=rank, label="computing", step=3): Kill()}
    result = ranks(2, **replaced(2)).run(metric_outside, faults=faults)
    assert result.world_sizes == [2, 2]
    check_beliefs(result, 2 * STEPS)


def test_a_metric_after_twenty_restarts(ranks: Any) -> None:
    faults = {At(rank=i % 2, label="computing", step=2, iteration=i): Raise(OSError) for i in range(20)}
    result = ranks(2, **PATIENT).run(metric_outside, faults=faults)
    assert result.restarts == 20 and result.same_pids
    result.assert_nothing_grows()
    check_beliefs(result, 2 * STEPS)
