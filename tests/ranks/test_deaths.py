"""A rank dies, any rank: the others go on with consecutive ranks in the same processes."""

from __future__ import annotations

import signal

import pytest

from tests.harness import At, Exit, Kill, Raise

from . import checks, targets

DEADLY = [
    (Kill(signal.SIGKILL), -signal.SIGKILL),
    (Kill(signal.SIGTERM), -signal.SIGTERM),
    (Kill(signal.SIGSEGV), -signal.SIGSEGV),
    (Exit(5), 5),
    (Exit(0), 0),
]


def early_and_late(victims, fault):
    """At the same step; who was interrupted by the first fault before its own strikes has it in the next iteration."""
    return {At(victim, iteration, step=1): fault for victim in victims for iteration in (0, 1)}


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("fault", "exitcode"), DEADLY, ids=["kill", "term", "segv", "exit5", "exit0"])
def test_one_dies(launch, fault, exitcode, victim):
    ranks = launch(targets.run_train, 3, faults={At(victim, step=1): fault}).wait()
    checks.died(ranks, {victim: exitcode})
    checks.went_on(ranks, without=[victim])


def test_the_last_one_dies(launch):
    ranks = launch(targets.run_train, 3, faults={At(2, step=1): Kill()}).wait()
    checks.died(ranks, {2: -signal.SIGKILL})
    checks.went_on(ranks, without=[2])


@pytest.mark.parametrize("victims", [(0, 1), (0, 3), (1, 2)], ids=str)
def test_two_die_at_once(launch, victims):
    ranks = launch(targets.run_train, 4, faults=early_and_late(victims, Kill())).wait()
    checks.died(ranks, dict.fromkeys(victims, -signal.SIGKILL))
    checks.went_on(ranks, without=victims, iteration=max(rank.entries()[-1][0] for rank in ranks))


def test_all_but_one_die_one_after_the_other(launch):
    faults = {At(rank, iteration=rank, step=1): Kill() for rank in range(3)}
    ranks = launch(targets.run_train, 4, faults=faults, args={"full_exit": True}).wait()
    checks.died(ranks, dict.fromkeys(range(3), -signal.SIGKILL))
    checks.went_on(ranks, without=range(3), iteration=3)


def test_all_die(launch):
    ranks = launch(targets.run_train, 2, faults=early_and_late(range(2), Kill())).wait()
    checks.died(ranks, dict.fromkeys(range(2), -signal.SIGKILL))


def test_one_raises_and_one_dies_at_the_same_step(launch):
    ranks = launch(targets.run_train, 3, faults={At(0, step=1): Raise()} | early_and_late([1], Kill())).wait()
    checks.died(ranks, {1: -signal.SIGKILL})
    checks.went_on(ranks, without=[1], iteration=ranks[0].entries()[-1][0])


@pytest.mark.parametrize("victim", [0, 2])
def test_death_before_the_call(launch, victim):
    """A rank that never joins: the others get a clear error within barrier_timeout instead of waiting for ever."""
    ranks = launch(
        targets.run_after_point, 3, faults={At(victim, None, "before", -1): Kill()}, wrapper=targets.IMPATIENT
    )
    ranks = ranks.wait()
    checks.died(ranks, {victim: -signal.SIGKILL})
    for rank in ranks:
        if rank.rank != victim:
            assert rank.exception in ("TimeoutError", "StoreLost"), rank.trace
            assert "barrier_timeout" in rank.message or victim == 0
