"""A rank hangs: with the interpreter lock released it restarts with the others, else it and only it is killed."""

from __future__ import annotations

import signal

import pytest

from tests.harness import At, Hang, HoldGIL, Stop
from tests.harness.launch import HASTY, KILLING

from . import checks, targets

KILLED = (-signal.SIGTERM, -signal.SIGKILL)


@pytest.mark.parametrize("kind", Hang.KINDS)
def test_hang_without_the_lock_restarts_all_and_kills_nobody(launch, kind):
    ranks = launch(targets.run_train, 3, faults={At(1, step=1): Hang(kind)}, wrapper=HASTY).wait()
    checks.went_on(ranks)


def test_all_hang(launch):
    ranks = launch(
        targets.run_alone, 2, faults={At(rank, step="enter"): Hang() for rank in range(2)}, wrapper=HASTY
    ).wait()
    checks.went_on(ranks)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("fault", [HoldGIL(), Stop()], ids=["gil", "stop"])
def test_the_rank_that_does_not_answer_is_killed_and_only_it(launch, fault, victim):
    ranks = launch(targets.run_train, 3, faults={At(victim, step=1): fault}, wrapper=KILLING).wait()
    assert ranks[victim].exitcode in KILLED
    checks.went_on(ranks, without=[victim])


def test_a_stopped_rank_that_wakes_up_late_never_runs_again(launch):
    """Stopped, then continued after the others went on: killed by its monitor before it enters the function again."""
    run = launch(targets.run_train, 3, faults={At(1, step=1): Stop()}, wrapper=KILLING)
    run.wait_event("enter", count=2, iteration=1)
    run.kill(1, signal.SIGCONT)
    ranks = run.wait()
    assert ranks[1].exitcode in KILLED
    assert ranks[1].entries() == [(0, 1, 3)]
    checks.went_on(ranks, without=[1])


def test_manual_progress(launch):
    """A function that pings must go on pinging: a Python loop without pings is a hang as well."""
    ranks = launch(targets.run_pinged_loop, 2, wrapper=HASTY).wait()
    checks.went_on(ranks)


def test_hang_protection_can_be_switched_off(launch):
    """Longer than soft_timeout without progress, but inside disable_hang_protection(): nobody restarts."""
    ranks = launch(targets.run_unprotected, 2, wrapper=KILLING).wait()
    checks.went_on(ranks, iteration=0)
