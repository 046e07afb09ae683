"""Monitors die too: alone, together with their rank, and where they host the store."""

from __future__ import annotations

import signal

import pytest

from tests.harness import At, HoldGIL, HostLoss, KillMonitor, Raise, When
from tests.harness.launch import ALONE, BEATING, KILLING, PATIENT

from . import checks, targets


@pytest.mark.parametrize("victim", [1, 2])
def test_training_does_not_notice_the_death_of_a_monitor(launch, victim):
    ranks = launch(targets.run_with_new_monitor, 3, faults={At(victim, step="monitor"): KillMonitor()}).wait()
    checks.went_on(ranks, iteration=0)


def test_the_new_monitor_protects_its_rank(launch):
    faults = {At(1, step="monitor"): KillMonitor(), At(1, step=1): HoldGIL()}
    ranks = launch(targets.run_with_new_monitor, 3, faults=faults, wrapper=KILLING).wait()
    assert ranks[1].exitcode in (-signal.SIGTERM, -signal.SIGKILL)
    checks.went_on(ranks, without=[1])


def test_a_restart_after_the_death_of_a_monitor(launch):
    faults = {At(2, step="monitor"): KillMonitor(), At(2, step=1): Raise(), At(2, iteration=1, step=1): Raise()}
    ranks = launch(targets.run_with_new_monitor, 3, faults=faults).wait()
    checks.went_on(ranks, iteration=2)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_lost_host_is_noticed_by_its_heartbeats(launch, victim):
    run = launch(
        targets.run_train, 3, faults={At(victim, step=1): HostLoss()}, wrapper=BEATING, args={"full_exit": True}
    )
    ranks = run.wait()
    checks.died(ranks, {victim: -signal.SIGKILL})
    checks.went_on(ranks, without=[victim])


def test_two_lost_hosts(launch):
    faults = {At(rank, iteration, step=1): HostLoss() for rank in (1, 2) for iteration in (0, 1)}
    ranks = launch(targets.run_train, 4, faults=faults, wrapper=BEATING).wait()
    checks.went_on(ranks, without=[1, 2], iteration=max(rank.entries()[-1][0] for rank in ranks))


@pytest.mark.parametrize("fault", [KillMonitor(), HostLoss()], ids=["monitor", "host"])
def test_the_store_hosts_end_without_standbys_is_a_clear_error_on_every_rank(launch, fault):
    ranks = launch(targets.run_train, 3, faults={At(0, step=1): fault}, wrapper=ALONE, args={"steps": 10**9}).wait(20)
    for rank in ranks[1:]:
        assert rank.exception == "StoreLost", rank.trace
        assert rank.exitcode == 0
    if isinstance(fault, KillMonitor):
        checks.failed(ranks, {0: "StoreLost"})


def test_the_store_hosts_end_while_the_others_block(launch):
    args = {"place": "all_reduce", "victims": [0]}
    faults = {At(0, step="fault"): HostLoss(when=When("blocked", 2))}
    ranks = launch(targets.run_blocked, 3, args=args, faults=faults, wrapper=ALONE).wait(20)
    checks.failed(ranks, {1: "StoreLost", 2: "StoreLost"})


def test_the_store_hosts_end_between_two_iterations(launch):
    """It interrupts once more whoever was interrupted: a MonitorThread must not wait for itself there."""
    faults = {At(1, step=1): Raise(when=When("enter", 2)), At(0, 0, "finalize"): KillMonitor()}
    ranks = launch(targets.run_alone, 3, faults=faults, wrapper=ALONE, args={"steps": 10**9}).wait(45)
    checks.failed(ranks, {0: "StoreLost", 1: "StoreLost", 2: "StoreLost"})


@pytest.mark.parametrize("hard", [False, True])
def test_a_healthy_rank_without_descriptors_is_interrupted(launch, hard):
    """It frees them as it leaves its function. Its abort fails where no limit can be raised."""
    args, faults = {"victim": 1, "hard": hard}, {At(0, step="fault"): Raise(when=When("blocked", 1))}
    ranks = launch(targets.run_without_descriptors, 2, args=args, faults=faults).wait(30)
    assert [ranks[rank].value for rank in range(2)] == [[1, 0, 2], [1, 1, 2]]
    assert ("on this iteration's store failed in iteration 0; the restart goes on: too many" in ranks[1].log) == hard


@pytest.mark.parametrize("left", [None, 0, 4])
def test_a_rank_without_descriptors_says_so(launch, left):
    """The limit and the remedy, whichever part of it needs the next one: its MonitorThread, its monitor, a connection.
    The others go on where they had begun."""
    args = {"victim": 1, "left": left}
    wrapper = PATIENT if left is None else targets.IMPATIENT
    ranks = launch(targets.run_out_of_descriptors, 2, wrapper=wrapper, args=args).wait()
    assert ranks[1].exception == "RestartError", ranks[1].message
    for word in (f"of {targets.FEW} descriptors open (RLIMIT_NOFILE", "ulimit -n"):
        assert word in ranks[1].message, ranks[1].message
    if left is None:
        assert ranks[0].value[1:] == [0, 1]
