"""A rank hangs: with the interpreter lock released it restarts with the others, else it and only it is killed."""

from __future__ import annotations

import re
import signal

import pytest

from tests.harness import At, Hang, HoldGIL, Stop, When
from tests.harness.launch import HASTY, KILLING

from . import checks, targets

NO_PROGRESS = (
    r"restarts? [-\d]+: no p\S+ .* \(soft_timeout\), in phase 'run'; (.*); continuing with \d (?:of \d )?ranks"
)

KILLED = (-signal.SIGTERM, -signal.SIGKILL)


def told(ranks):
    """What the line of the restart says of where the ranks were."""
    (found,) = (match for rank in ranks for match in re.findall(NO_PROGRESS, rank.log))
    return re.sub(r":\d+", "", found)


@pytest.mark.parametrize("kind", Hang.KINDS)
def test_hang_without_the_lock_restarts_all_and_kills_nobody(launch, kind):
    """The log names the rank that hangs, not those that wait for it in an all-reduce."""
    ranks = launch(targets.run_train, 3, faults={At(1, step=1): Hang(kind)}, wrapper=HASTY).wait()
    checks.went_on(ranks)
    assert told(ranks) == "rank 1 was at child.py in point; 2 waited for others"


@pytest.mark.parametrize("where", ["ddp", "async"])
def test_others_wait_where_python_sees_no_collective(launch, where):
    """In the backward pass of DistributedDataParallel, or for the work of an all-reduce in their own line."""
    hang = {At(0, step="hang"): Hang(when=When("ready", 2))}
    ranks = launch(targets.run_hang, 3, faults=hang, wrapper=HASTY, args={"where": where}).wait()
    checks.went_on(ranks)
    assert told(ranks) == "rank 0 was at child.py in point; 2 waited for others"


def test_a_rank_that_computes_for_ever(launch):
    ranks = launch(targets.run_hang, 3, wrapper=HASTY, args={"where": "loop"}).wait()
    checks.went_on(ranks)
    assert told(ranks) == "rank 0 was at faults.py in spin; 2 waited for others"


def test_a_rank_that_returns_while_others_wait_for_it(launch):
    """As where a loader has fewer batches on one rank than on the others."""
    ranks = launch(targets.run_hang, 3, wrapper=HASTY, args={"where": "returned"}).wait()
    checks.went_on(ranks)
    assert told(ranks) == "rank 0 had returned from the function; 2 waited for others"


def test_all_wait_for_others(launch):
    """One is in another collective than the others: nobody is named alone."""
    ranks = launch(targets.run_hang, 2, wrapper=HASTY, args={"where": "mismatch"}).wait()
    checks.went_on(ranks)
    assert told(ranks) == (
        "all 2 ranks waited for others: rank 0 was at targets.py in _sends, rank 1 was at targets.py in _receives"
    )


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
    assert told(ranks) == (
        f"rank {victim} could not say where it was (did not answer and was killed); 2 waited for others"
    )


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
