"""Every kind of fault, with 2 and 4 ranks on one GPU: the guilty one may go, all others go on in the next iteration."""

from __future__ import annotations

import signal

import pytest

from inprocess.testing.coordinates import When
from inprocess.tools.inject_fault import Fault
from tests.harness import At, Hang, Kill, Raise, Stop
from tests.ranks import checks
from tests.ranks.test_hangs import KILLED

from . import machine, targets

pytestmark = machine.pytestmark
sizes = pytest.mark.parametrize("size", [2, 4])


def others_wait(size):
    """The others are in the all-reduce, or on their way."""
    return When("waits", size - 1)


@sizes
@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=machine.cuda_only)], ids=["", "eager"])
def test_an_exception(job, size, eager):
    """`eager`: the communicator is made with the group, as `init_process_group(device_id=...)` does."""
    faults = {At(1, step=1): Raise(when=others_wait(size))}
    checks.went_on(job(targets.run_train, size, faults=faults, args={"eager": eager}))


@sizes
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank(job, size, victim):
    ranks = job(targets.run_train, size, faults={At(victim, step=1): Kill(when=others_wait(size))})
    checks.died(ranks, {victim: -signal.SIGKILL})
    checks.went_on(ranks, without=[victim])


@sizes
def test_a_stopped_rank(job, size):
    faults = {At(1, step=1): Stop(when=others_wait(size))}
    ranks = job(targets.run_train, size, faults=faults, wrapper=targets.HASTY)
    assert ranks[1].exitcode in KILLED
    checks.went_on(ranks, without=[1])


@sizes
def test_a_sleeping_rank(job, size):
    """The others wait on the GPU, in C; it is released, and nobody is killed."""
    faults = {At(1, step=1): Hang(when=others_wait(size))}
    checks.went_on(job(targets.run_train, size, faults=faults, wrapper=targets.HASTY))


@sizes
@pytest.mark.parametrize("fault", [Fault.STUCK_COLLECTIVE, Fault.WORKLOAD_EXC], ids=lambda fault: fault.value)
def test_faults_that_need_no_gpu(job, size, fault):
    checks.went_on(job(targets.run_injected, size, args={"fault": fault.value}, wrapper=targets.HASTY))


@sizes
@machine.cuda_only
def test_an_endless_kernel_that_its_rank_waits_for(job, size):
    """Nothing interrupts a thread that waits for the GPU: its monitor kills the rank."""
    args = {"fault": Fault.GPU_SLEEP.value}
    ranks = job(targets.run_injected, size, args=args, wrapper=targets.HASTY)
    assert ranks[1].exitcode in KILLED
    checks.went_on(ranks, without=[1])


@sizes
@machine.cuda_only
def test_an_endless_kernel_is_found_by_the_health_check(job, size):
    """The rank itself can leave: it raises before it waits for the GPU."""
    args = {"fault": Fault.GPU_SLEEP.value, "raises": True}
    ranks = job(targets.run_injected, size, args=args, wrapper=targets.checked)
    checks.failed(ranks, {1: "HealthCheckError"})
    assert "did not answer" in ranks[1].message
    checks.went_on(ranks, without=[1])


@sizes
@machine.cuda_only
def test_a_lost_context(job, size):
    ranks = job(targets.run_injected, size, args={"fault": Fault.GPU_ERROR.value}, wrapper=targets.checked)
    checks.failed(ranks, {1: "HealthCheckError"})
    assert "device-side assert" in ranks[1].message
    checks.went_on(ranks, without=[1])


@sizes
@machine.cuda_only
def test_out_of_memory(job, size):
    """What filled the GPU is free again when the function is entered anew."""
    ranks = job(targets.run_injected, size, args={"fault": Fault.GPU_OOM.value}, wrapper=targets.checked)
    assert "OutOfMemoryError" in ranks[0].log + ranks[1].log
    _, after = (event["allocated"] for event in ranks[1].of("memory"))
    assert after < 100 << 20
    checks.went_on(ranks)
