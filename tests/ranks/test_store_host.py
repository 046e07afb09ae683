"""The host of the store is lost: the others go on over the store of a standby.

Of four ranks those of 2 and 1 stand by, in this order.
"""

from __future__ import annotations

import signal

import pytest

from tests.harness import At, HostLoss, Kill, KillMonitor, KillTogether, Raise, Stop, When
from tests.harness.launch import BEATING
from tests.net import hostwise

from . import checks, targets

FOUR = range(4)


def test_the_job_survives_the_host_of_rank_0(launch):
    ranks = launch(targets.run_train, 4, faults={At(0, step=1): HostLoss()}, wrapper=BEATING).wait()
    checks.died(ranks, {0: -signal.SIGKILL})
    checks.went_on(ranks, without=[0])


def test_while_the_others_wait_in_a_collective(launch):
    args = {"place": "all_reduce", "victims": [0]}
    faults = {At(0, step="fault"): HostLoss(when=When("blocked", 3))}
    ranks = launch(targets.run_blocked, 4, args=args, faults=faults, wrapper=BEATING).wait()
    checks.died(ranks, {0: -signal.SIGKILL})
    checks.went_on(ranks, without=[0])


def test_its_monitor_alone(launch):
    ranks = launch(targets.run_train, 4, faults={At(0, step=1): KillMonitor()}, wrapper=BEATING).wait()
    checks.went_on(ranks)


def test_the_host_of_the_first_standby_too(launch):
    faults = {At(rank, step=1): KillTogether(2, hosts=True) for rank in (0, 2)}
    ranks = launch(targets.run_train, 4, faults=faults, wrapper=BEATING).wait()
    checks.died(ranks, {0: -signal.SIGKILL, 2: -signal.SIGKILL})
    checks.went_on(ranks, without=[0, 2])


def test_who_stood_by_and_died_is_replaced_by_another_one(launch):
    """After one restart, or two, only ranks 0 and 3 are left."""
    faults = {At(rank, step=1): KillTogether(2) for rank in (1, 2)}
    faults |= {At(0, i, step="stands by"): HostLoss(when=When("stands by", 1)) for i in (1, 2)}
    ranks = launch(targets.run_stood_by, 4, faults=faults, wrapper=BEATING).wait()
    checks.died(ranks, {0: -signal.SIGKILL, 1: -signal.SIGKILL, 2: -signal.SIGKILL})
    assert ranks[3].value[1:] == [0, 1]


def test_no_standby_is_left(launch):
    faults = {At(rank, step=1): KillTogether(3, hosts=True) for rank in (0, 1, 2)}
    ranks = launch(targets.run_train, 4, faults=faults, wrapper=BEATING, args={"steps": 10**9}).wait(20)
    checks.failed(ranks, {3: "StoreLost"})


def test_the_new_host_too(launch):
    """Three go on; the monitor of the second one serves. Then two, with that of the last."""
    faults = {At(0, step=1): HostLoss(), At(2, iteration=1, step=1): HostLoss()}
    ranks = launch(targets.run_train, 4, faults=faults, wrapper=BEATING).wait()
    checks.died(ranks, {0: -signal.SIGKILL, 2: -signal.SIGKILL})
    checks.went_on(ranks, without=[0, 2], iteration=2)


def test_a_restart_over_the_new_store(launch):
    faults = {At(0, step=1): HostLoss(), At(3, iteration=1, step=1): Raise(), At(1, iteration=2, step=1): Kill()}
    ranks = launch(targets.run_train, 4, faults=faults, wrapper=BEATING).wait()
    checks.died(ranks, {0: -signal.SIGKILL, 1: -signal.SIGKILL})
    checks.went_on(ranks, without=[0, 1], iteration=3)


def test_a_rank_dies_on_the_way(launch):
    faults = {At(0, step=1): HostLoss(), At(3, iteration=0, step="finalize"): Kill()}
    ranks = launch(targets.run_train, 4, faults=faults, wrapper=BEATING).wait()
    checks.died(ranks, {0: -signal.SIGKILL, 3: -signal.SIGKILL})
    checks.went_on(ranks, without=[0, 3])


@pytest.mark.parametrize("step", ["rank_assignment", "finalize"])
def test_during_a_restart(launch, step):
    faults = {At(1, step=1): Raise(when=When("enter", 3)), At(0, iteration=1, step=step): HostLoss()}
    if step == "finalize":
        faults = {At(1, step=1): Raise(when=When("enter", 3)), At(0, iteration=0, step=step): HostLoss()}
    ranks = launch(targets.run_train, 4, faults=faults, wrapper=BEATING).wait()
    checks.died(ranks, {0: -signal.SIGKILL})
    assert len({tuple(rank.value) for rank in ranks[1:]}) == 3
    assert {rank.value[2] for rank in ranks[1:]} == {3}


def test_the_next_call_begins_where_the_job_is(launch):
    """The member that served the store last serves it again, on the same port."""
    faults = {At(0, step=1): HostLoss(), At(1, call=1, step=1): Kill()}
    ranks = launch(targets.run_twice, 4, faults=faults, wrapper=BEATING).wait()
    checks.died(ranks, {0: -signal.SIGKILL, 1: -signal.SIGKILL})
    assert [rank.value for rank in ranks[2:]] == [[[1, 1, 3], [1, 0, 2]], [[1, 2, 3], [1, 1, 2]]]


def test_spares(launch):
    """Two are active, and two wait; then there is one spare."""
    run = launch(targets.run_train, 4, faults={At(0, step=1): HostLoss()}, wrapper=targets.two_active_beating)
    ranks = run.wait()
    checks.died(ranks, {0: -signal.SIGKILL})
    assert [rank.value for rank in ranks[1:]] == [[1, 0, 2], [1, 1, 2], None]


def test_the_controller_counts_all_iterations(launch):
    faults = {At(0, step=1): HostLoss(), At(3, iteration=1, step=1): Raise()}
    ranks = launch(targets.run_train, 4, faults=faults, wrapper=targets.at_most_two_iterations_beating).wait()
    checks.failed(ranks, {1: "RestartAbort", 2: "RestartAbort", 3: "RestartAbort"})
    assert "iteration=2 reached max_iterations=2" in ranks[1].message


def test_its_host_stands_still(launch):
    """No connection tells, heartbeats do. It wakes up when the others have gone on without it, and ends."""
    run = launch(targets.run_train, 4, faults={At(0, step=1): Stop()}, wrapper=BEATING | {"heartbeat_timeout": 4})
    run.wait_event("fault")
    host = hostwise.processes(run, 0)
    hostwise.send(host[1:], signal.SIGSTOP)  # the training process stops itself, and would do so once more
    run.wait_event("enter", count=3, iteration=1, world_size=3)
    hostwise.send(host, signal.SIGCONT)
    ranks = run.wait(fenced=[0])
    checks.died(ranks, {0: -signal.SIGKILL})
    checks.went_on(ranks, without=[0])


def test_a_standby_stands_still_until_the_others_have_returned(launch):
    """It finds that their processes have ended, and must not take that for a reason to go on alone."""
    faults = {At(3, step=1): Raise(), At(2, iteration=0, step="finalize"): Stop()}
    run = launch(targets.run_train, 4, faults=faults, wrapper=BEATING | {"heartbeat_timeout": 4})
    run.wait_event("fault", count=2)
    host = hostwise.processes(run, 2)
    hostwise.send(host[1:], signal.SIGSTOP)
    with hostwise.until_ended([pid for rank in (0, 1, 3) for pid in hostwise.processes(run, rank)[1:]]):
        run.wait_event("done", count=3)
    hostwise.send(host, signal.SIGCONT)
    ranks = run.wait(fenced=[2])
    if ranks[2].done:  # it has heard at its own standby that the others completed, or that nobody comes any more
        assert (ranks[2].exception in ("Fenced", "StoreLost"), ranks[2].exitcode) == (True, 0), ranks[2].trace
    else:
        hostwise.killed(ranks, [2])
    checks.went_on(ranks, without=[2])
    assert [iteration for iteration, _, _ in ranks[2].entries()] == [0]
