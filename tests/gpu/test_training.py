"""Trainings: DistributedDataParallel, a state that comes back over NCCL, the example, and what many restarts leave."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import statistics
import time

import pytest

from inprocess.testing.command import Command
from inprocess.testing.coordinates import When
from tests.examples import test_digits
from tests.harness import At, Kill, Raise
from tests.ranks import checks

from . import machine, targets

pytestmark = machine.pytestmark
sizes = pytest.mark.parametrize("size", [2, 4])
RESTARTS = int(os.environ.get("INPROCESS_GPU_RESTARTS", "100"))


@sizes
@pytest.mark.parametrize("fault", [Raise, Kill], ids=["raises", "dies"])
def test_ddp(job, size, fault):
    ranks = job(targets.run_ddp, size, faults={At(1, step=2): fault(when=When("waits", size - 1))})
    checks.went_on(ranks, without=[1] if fault is Kill else [])


def check_sources(ranks):
    """Rank 1 had its state from another one, at a step that was made; all finished."""
    assert [rank.value[:3] for rank in ranks] == [[1, rank.rank, len(ranks)] for rank in ranks], ranks.exceptions
    assert ranks[1].value[3][0] == "nowhere at 0"
    assert ranks[1].value[3][1] in [f"rank {rank} at {step}" for rank in range(len(ranks)) for step in (3, 4)]


@sizes
def test_a_lagging_rank_gets_the_state_of_another_one(job, size):
    """It raises before the step that the others have made."""
    faults = {At(1, step="summed 3"): Raise(when=When("committed 4", size - 1))}
    check_sources(job(targets.run_live, size, faults=faults))


@sizes
def test_a_torn_state_is_replaced(job, size):
    """It raises in the middle of its optimizer's step."""
    check_sources(job(targets.run_live, size, faults={At(1, step="inside 3"): Raise()}))


@sizes
def test_a_replacement_gets_the_state(job, size):
    last = size - 1  # whoever replaces it is started with its NCCL_HOSTID
    ranks = job(targets.run_live, size, faults={At(last, step="summed 3"): Kill()}, respawn=1)
    checks.died(ranks, {last: -signal.SIGKILL})
    assert ranks[size].value[3][0].startswith("rank ")
    assert all(rank.value[2] == size for rank in ranks if rank.rank != last or rank is ranks[size])


def early_and_late(values):
    """What is usual in the second tenth, and the least of the last.

    While groups of the last iteration end in the background there may be more; rarely a thread begins only later.
    """
    tenth = len(values) // 10
    return statistics.median(values[tenth : 2 * tenth]), min(values[-tenth:])


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("size", [2])
def test_many_restarts_leave_nothing(job, size):
    """Memory of the GPU, threads and descriptors are where they were. The one test here that takes minutes."""
    ranks = job(targets.run_restarts, size, deadline=450, args={"restarts": RESTARTS})
    checks.went_on(ranks, iteration=RESTARTS)
    for rank in ranks:
        samples = rank.of("sample")
        names = samples[0].keys() & {"threads", "descriptors", "allocated", "reserved"}
        assert len(samples) == RESTARTS + 1 and {"threads", "descriptors"} <= names
        held = {name: early_and_late([sample[name] for sample in samples]) for name in names}
        assert all(late <= early for early, late in held.values()), f"rank {rank.rank}: (early, late) are {held}"


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the example needs scikit-learn")
@sizes
def test_the_example(size):
    """`python examples/digits_ddp.py`, where all ranks share the GPU."""
    last = size - 1
    faults = f"raise:rank=0,step=40 hang:rank={last},step=80 kill:rank={last},step=120"
    more = [] if machine.ON == "cpu" else ["--share-gpu"]
    more += ["--soft-timeout", targets.HASTY["soft_timeout"], "--hard-timeout", targets.HASTY["hard_timeout"]]
    variables = {name: machine.ENVIRONMENT[name] for name in ("NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_NET")}
    arguments = [test_digits.SCRIPT, "--nproc", size, "--faults", faults, *more]
    # not by the plugin's fixture: in a plain checkout there is no plugin
    until = time.monotonic() + 100
    with contextlib.closing(
        Command(list(map(str, arguments)), until, env={**variables, "NCCL_DEBUG": "VERSION"})
    ) as it:
        code = it.finish()
        result = (it.out, it.err)
    report = "".join(result)
    assert code == 0, report
    assert test_digits.accuracy(result[0]) >= 0.95
    assert f"{last} of {size} processes finished" in result[0]
    assert machine.ON == "cpu" or "NCCL version" in report
