"""What only a GPU can tell, and `tests.gpu.lease` asks first: times, memory, bits, and torch's other backends."""

from __future__ import annotations

import importlib.metadata
import signal
import statistics
import time

import pytest
import torch.distributed as dist

from inprocess.testing.coordinates import When
from tests.harness import At, Kill, Raise
from tests.ranks import checks

from . import machine, targets

pytestmark = machine.pytestmark
RESTARTS = 8
#: MiB that the driver may use more, or less, from one moment to the next
ALLOWANCE = 32


def in_ms(seconds):
    """Median, least and most."""
    return [round(1000 * value, 1) for value in (statistics.median(seconds), min(seconds), max(seconds))]


@pytest.mark.parametrize("wake", [True, False], ids=["wakes NCCL's threads", "waits for them"])
def test_abort_times(job, wake):
    """The first restart is left out of the figures: what it loads is there later on."""
    ranks = job(targets.run_aborts, 2, args={"wake": wake, "restarts": RESTARTS})
    checks.went_on(ranks, iteration=RESTARTS)
    numbers = range(1, RESTARTS)
    aborts = [max(rank.of("aborted", number=number)[0]["seconds"] for rank in ranks) for number in numbers]
    raised = [rank.of("raises", iteration=number)[0]["t"] for number in numbers for rank in [ranks[number % 2]]]
    reduced = [max(rank.of("reduced", iteration=number + 1)[0]["t"] for rank in ranks) for number in numbers]
    restarts = [end - begin for begin, end in zip(raised, reduced, strict=True)]
    machine.tell(wake=wake, abort_ms=in_ms(aborts), exception_to_first_sum_ms=in_ms(restarts))


def settled(before):
    """MiB in use once all ranks have ended; the driver takes a moment."""
    end = time.monotonic() + 10
    while (used := machine.used_memory()) is not None and used > before + ALLOWANCE and time.monotonic() < end:
        time.sleep(0.2)
    return used


def test_memory_is_given_back(job):
    """By a restart to the process, and by the ranks' ends to the machine."""
    before = machine.used_memory()
    ranks = job(targets.run_restarts, 2, args={"restarts": RESTARTS})
    checks.went_on(ranks, iteration=RESTARTS)
    after = before if before is None else settled(before)
    samples = [rank.of("sample") for rank in ranks]
    names = samples[0][0].keys() & {"allocated", "reserved", "used"}
    early, late = (
        {name: min(sample[name] for rank in samples for sample in rank[part]) >> 20 for name in sorted(names)}
        for part in (slice(2, 5), slice(-3, None))
    )
    machine.tell(before_mib=before, after_mib=after, early_mib=early, late_mib=late)
    assert all(late[name] <= early[name] + ALLOWANCE for name in names)
    assert before is None or after <= before + ALLOWANCE


@pytest.mark.parametrize(
    ("size", "step", "fault"),
    [(2, "between 3", Raise), (2, "summed 3", Raise), (2, "between 3", Kill), (3, "between 3", Kill)],
    ids=["raises in a step", "raises before a step", "is replaced", "is not replaced"],
)
def test_ddp_is_the_same_bit_for_bit(job, size, step, fault):
    """As without a fault, where the number of ranks is the same; among the ranks in any case."""
    last, compare = size - 1, size == 2
    more = {"respawn": 1} if compare and fault is Kill else {}
    ranks = job(targets.run_exact, size, faults={At(last, step=step): fault()}, args={"compare": compare}, **more)
    left = [rank for rank in ranks if rank.value]
    if fault is Kill:
        checks.died(ranks, {last: -signal.SIGKILL})
    assert len(left) == (2 if compare else size - 1), ranks.exceptions
    assert all(rank.value[1:3] == [place, len(left)] for place, rank in enumerate(left)), ranks.exceptions
    digests = {found for rank in left for found in rank.value[3:]}
    machine.tell(fault=fault.__name__, step=step, ranks=size, digests=sorted(found[:12] for found in digests))
    assert len(digests) == 1


def test_a_coalesced_batch(job):
    """An interruption inside torch's coalescing leaves NCCL's group call open: what arrives later must be right."""
    checks.went_on(job(targets.run_exchange, 2, args={"restarts": RESTARTS}), iteration=RESTARTS)


def is_known(backend):
    """To torch, or to what it loads backends from when one is asked for."""
    entries = importlib.metadata.entry_points(group="torch.distributed.backends")
    return backend in dist.Backend.backend_list or backend in entries.names


@machine.cuda_only
@pytest.mark.parametrize("backend", ["nccl2", "nccl-legacy"])
@pytest.mark.parametrize("fault", [Raise, Kill], ids=["raises", "dies"])
def test_other_backends(job, backend, fault):
    """nccl2 takes its device from the rank, unless it is told."""
    if not is_known(backend):
        pytest.skip(f"this torch has no {backend}")
    faults = {At(1, step=1): fault(when=When("waits", 1))}
    ranks = job(targets.run_train, 2, faults=faults, args={"backend": backend, "eager": backend == "nccl2"})
    checks.went_on(ranks, without=[1] if fault is Kill else [])
