"""A KeptLoader in real ranks: whatever is interrupted, order and random numbers are as without the fault."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import random
import signal
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from inprocess import ElasticSampler, KeptLoader, LiveState
from inprocess.initialize import RetryController
from inprocess.testing import leaks
from inprocess.testing.faults import Fault
from tests.harness import At, Kill, Raise
from tests.harness.child import Context

from . import checks
from .targets import LONG

SIZE, BATCH, STEPS = 50, 3, 7


@dataclass(frozen=True, repr=False)
class KillWorker(Fault):
    """One of the processes that load."""

    def strike(self, context: Any) -> None:
        os.kill(_children()[0], signal.SIGKILL)


class Samples(Dataset[Any]):
    """With random numbers."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, float]:
        return index, torch.rand(2), random.random()


def run(context: Context) -> Any:
    """Returns iteration, digest of the parameter, indices by step, and the workers of each iteration."""
    handler = signal.getsignal(signal.SIGCHLD)
    sampler = ElasticSampler(SIZE, BATCH, seed=3)
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    live = LiveState(model=model, optim=optim, sampler=sampler)
    spec = DataLoader(Samples(), batch_sampler=sampler, num_workers=2, multiprocessing_context="fork")
    loader, used, pids = KeptLoader(spec), dict[int, list[int]](), list[list[int]]()

    def train(context: Context, call: Any) -> list[Any]:
        dist.init_process_group("gloo", timeout=LONG)
        begin = live.recover(call)
        context.point("recovered")
        batches = loader.from_step(begin)
        pids.append(_children())
        context.emit("workers", pids=pids[-1])
        for step, (indices, samples, factors) in enumerate(batches, begin):
            call.ping()
            context.point(f"loaded {step}")
            used[step] = indices.tolist()
            optim.zero_grad()
            (model(samples).sum() * factors.sum()).backward()
            samples.zero_()  # what a program does to its batch does not show in the one that it gets again
            dist.all_reduce(model.weight.grad)
            context.point(f"summed {step}")
            with live.commit(step + 1):
                optim.step()
                sampler.advance()
            if step + 1 == STEPS:
                break
        dist.destroy_process_group()
        digest = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()[:16]
        return [call.iteration, digest, sorted(used.items()), pids]

    try:
        options = (
            {"initialize": RetryController(min_world_size=3, wait_for_replacement=60)}
            if "waits" in context.args
            else {}
        )
        value = context.wrap(train, **options)()
        left = [leaks.command_of(pid) for pid in leaks.children_of(os.getpid()) if pid in itertools.chain(*pids)]
        left += [each.name for each in threading.enumerate() if each.name == "inprocess-loader"]
        assert not left, left
        return value
    finally:
        signal.signal(signal.SIGCHLD, handler)  # torch's own, which stays


def _children() -> list[int]:
    """The workers; the monitor is a child, too, but not one of multiprocessing's."""
    return sorted(each.pid or 0 for each in multiprocessing.active_children())


def shares(step: int, count: int, rank: int, position: int, world_size: int) -> list[list[Any]]:
    """The indices of these steps, from that position of the samples on."""
    order = ElasticSampler(SIZE, BATCH, seed=3)
    begins = [position + (BATCH * (world_size * at + rank)) for at in range(count)]
    return [[step + at, [order._at(place) for place in range(each, each + BATCH)]] for at, each in enumerate(begins)]


@pytest.fixture(scope="module")
def calm() -> dict[str, list[str]]:
    """What a run without faults comes to; made once."""
    return {}


@pytest.mark.parametrize("place", ["loaded 0", "loaded 3", "summed 3", "recovered"])
def test_one_raises(launch, calm, place):
    if not calm:
        calm["digests"] = [rank.value[1] for rank in launch(run, 3).wait()]
    ranks = launch(run, 3, faults={At(1, step=place): Raise()}).wait()
    for rank in ranks:
        iteration, digest, used, pids = rank.value
        assert (iteration, digest) == (1, calm["digests"][rank.rank])
        assert used == shares(0, STEPS, rank.rank, 0, 3)
        assert pids[1:] == pids[:-1] or place == "recovered"  # the workers are the same


def test_one_dies_and_the_others_share_what_it_had(launch):
    ranks = launch(run, 3, faults={At(1, step="loaded 3"): Kill()}).wait()
    checks.died(ranks, {1: -signal.SIGKILL})
    for rank, now in ((0, 0), (2, 1)):
        _, _, used, pids = ranks[rank].value
        assert used == shares(0, 3, rank, 0, 3) + shares(3, STEPS - 3, now, 3 * 3 * BATCH, 2)
        assert pids[0] == pids[1]
    (held,) = ranks[1].of("workers")
    assert len(held["pids"]) == 2
    for pid in held["pids"]:
        with contextlib.suppress(ProcessLookupError):
            pytest.fail(f"{pid} lives on: {leaks.command_of(pid)} {os.kill(pid, 0)}")


def test_a_replacement_takes_over(launch, calm):
    """It has new workers, and loads what the dead one would have."""
    if not calm:
        calm["digests"] = [rank.value[1] for rank in launch(run, 3).wait()]
    ranks = launch(run, 3, faults={At(1, step="loaded 3"): Kill()}, respawn=1, args={"waits": True}).wait()
    checks.died(ranks, {1: -signal.SIGKILL})
    assert [ranks[rank].value[1] for rank in (0, 3, 2)] == calm["digests"]
    assert ranks[3].value[2] == shares(3, STEPS - 3, 1, 3 * 3 * BATCH, 3)


def test_a_worker_is_killed(launch, calm):
    """Its rank starts new ones; those of the others stay."""
    if not calm:
        calm["digests"] = [rank.value[1] for rank in launch(run, 3).wait()]
    ranks = launch(run, 3, faults={At(1, step="loaded 3"): KillWorker()}).wait()
    assert [rank.value[1] for rank in ranks] == calm["digests"]
    for rank in ranks:
        pids = rank.value[3]
        assert (len(pids), pids[0] == pids[1]) == (2, rank.rank != 1)
