"""Processes that are started while the job runs take the slots of those that died."""

from __future__ import annotations

import functools
import os
import re
import signal

import pytest

from inprocess import Compose
from inprocess.initialize import RetryController
from inprocess.rank_assignment import ActiveWorldSizeDivisibleBy, ShiftRanks
from inprocess.testing import leaks
from inprocess.testing.coordinates import When
from inprocess.testing.faults import SlowDown
from tests.harness import At, Exit, Kill, Raise
from tests.harness.launch import PATIENT

from . import checks, targets

RESTART = re.compile(r"restarts? (\d+)(?:-(\d+))?: (.*)")

GROW = {"INPROCESS_GROW": "1", "INPROCESS_RESTART": "0"}
LATER = PATIENT | {"join": "next_restart"}


def everybody_is_back(ranks, size, without=()):
    """All processes but those finished in one iteration, each with the rank that it was started with."""
    stayed = [result for number, result in enumerate(ranks) if number not in without]
    (iteration,) = {result.value[0] for result in stayed}
    assert sorted(result.value for result in stayed) == [[iteration, slot, size] for slot in range(size)]
    assert all(result.value[1] == result.rank for result in stayed)
    assert [result.exitcode for result in stayed] == [0] * size


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_one_dies_and_is_replaced(launch, victim):
    """Also rank 0, whose monitor serves the store."""
    ranks = launch(targets.run_full, 3, faults={At(victim, step=1): Kill()}, respawn=1).wait()
    checks.died(ranks, {victim: -signal.SIGKILL})
    everybody_is_back(ranks, 3, without=[victim])


@pytest.mark.parametrize("fault", [Exit(5), Exit(0), Kill(signal.SIGSEGV)], ids=["exit5", "exit0", "segv"])
def test_however_it_ended(launch, fault):
    run = launch(targets.run_full, 3, faults={At(1, step=1): fault})
    run.wait_event("ended")
    run.start_another(1)
    everybody_is_back(run.wait(), 3, without=[1])


def test_two_die_and_are_replaced(launch):
    faults = {At(victim, iteration, step=1): Kill() for victim in (0, 2) for iteration in (0, 1)}
    everybody_is_back(launch(targets.run_full, 4, faults=faults, respawn=2).wait(), 4, without=[0, 2])


@pytest.mark.parametrize("where", ["rank_assignment", "initialize", "enter", "finalize"])
def test_the_one_that_joins_dies(launch, where):
    """In whatever it does first, or when it is interrupted for the first time; the next one takes the slot."""
    first = (1, 2)  # its first iteration: on a slow machine it comes before the others have gone on
    raises = {At(0, iteration, 1): Raise(when=When("enter", 3)) for iteration in first} if where == "finalize" else {}
    run = launch(targets.run_full, 3, faults={At(1, step=1): Kill()} | raises, args={"restarts": 2})
    run.wait_event("ended")
    run.start_another(1, faults={At(1, iteration, where): Kill() for iteration in first})
    run.wait_event("ended", count=2)
    run.start_another(1)
    everybody_is_back(run.wait(), 3, without=[1, 3])


def test_a_spare_takes_the_slot_of_the_next_that_dies(launch):
    """It waits, whatever slot it was started for; the death and its taking part are one restart."""
    run = launch(targets.run_full, 3, faults={At(2, step=50): Kill(when=When("waits", 1))}, args={"restarts": 1})
    run.wait_event("enter", count=3)
    run.start_another(0)
    ranks = run.wait()
    assert sorted(ranks[number].value for number in (0, 1, 3)) == [[1, 0, 3], [1, 1, 3], [1, 2, 3]]
    assert ranks[3].value == [1, 2, 3]


def test_two_for_one_slot(launch):
    """The first takes it, the second waits, and returns None when all is over."""
    both = SlowDown(0.0, when=When("waits", 2))
    run = launch(targets.run_full, 3, faults={At(1, step=1): Kill(), At(0, 1, 0): both, At(0, 2, 0): both})
    run.wait_event("ended")
    run.start_another(1)
    run.start_another(1)
    ranks = run.wait()
    late, joined = sorted([ranks[3].value, ranks[4].value], key=str)
    assert (late, joined[1:]) == (None, [1, 3])
    assert ranks.exitcodes == [0, -signal.SIGKILL, 0, 0, 0]


def test_join_at_the_next_restart(launch):
    """It does not interrupt what runs."""
    faults = {At(1, step=1): Kill(), At(0, 1, 50): Raise(when=When("waits", 1))}
    run = launch(targets.run_full, 3, faults=faults, wrapper=LATER)
    run.wait_event("enter", count=2, iteration=1)
    run.start_another(1)
    ranks = run.wait()
    everybody_is_back(ranks, 3, without=[1])
    assert "ValueError" in ranks[0].log


def test_who_would_only_be_a_reserve_waits_for_the_next_restart(launch):
    """A spare has taken the place of the one that died: to let its replacement in gains nothing."""
    faults = {At(1, step=1): Kill(), At(0, 1, 50): Raise(when=When("waits", 1))}
    run = launch(targets.run_full, 3, faults=faults, wrapper=targets.two_active, args={"world_size": 2, "restarts": 2})
    run.wait_event("enter", count=2, iteration=1)
    run.start_another(1)
    ranks = run.wait()
    assert [ranks[number].value for number in (0, 2, 3)] == [[2, 0, 2], None, [2, 1, 2]]
    assert "ValueError" in restarts(ranks)[2] and "takes part" not in ranks[0].log
    assert "no more ranks would be active with this process; it joins at the next restart" in ranks[3].log


def test_the_job_grows(launch):
    """RANK beyond the job's world size, on the word of the launcher."""
    run = launch(targets.run_full, 2, args={"world_size": 3, "restarts": 1})
    run.wait_event("enter", count=2)
    run.start_another(2, env={**GROW, "WORLD_SIZE": "3"})
    everybody_is_back(run.wait(), 3)


def test_it_takes_part_in_the_next_call(launch):
    run = launch(targets.run_full_twice, 3, faults={At(0, step=1): Kill()}, respawn=1)
    ranks = run.wait()
    assert [ranks[number].value[1] for number in (3, 1, 2)] == [[0, 0, 3], [0, 1, 3], [0, 2, 3]]


def test_its_monitor_dies_before_it_has_joined(launch):
    """A new one is started, as for any rank."""
    run = launch(targets.run_full, 3, faults={At(1, step=1): Kill()})
    run.wait_event("ended")
    run.start_another(1)
    joiner = run.ranks[3].process.pid
    targets.wait_until(lambda: bool(leaks.children_of(joiner)))
    os.kill(leaks.children_of(joiner)[0], signal.SIGKILL)
    everybody_is_back(run.wait(), 3, without=[1])


@pytest.mark.parametrize("victim", [0, 1])
def test_pid_files_of_two_monitors_of_one_rank(launch, tmp_path, victim):
    """That of the dead rank 0 serves the store, and has the file."""
    file = str(tmp_path / "monitor_{rank}.pid")
    wrapper = PATIENT | {"monitor_process_pidfile": file, "termination_grace_time": 20}  # each ends by itself
    run = launch(targets.run_full, 3, faults={At(victim, step=1): Kill()}, wrapper=wrapper, respawn=1)
    everybody_is_back(run.wait(), 3, without=[victim])
    assert not list(tmp_path.iterdir())


def test_too_few_ranks_wait_for_a_replacement(launch):
    """It is let in although it would not interrupt a function that runs; nobody runs one meanwhile."""
    enough = RetryController(min_world_size=3, wait_for_replacement=40)
    faults = {At(1, step=1): Kill()}
    run = launch(targets.run_full, 3, faults=faults, wrapper=LATER | {"initialize": enough})
    run.wait_event("short")  # of the first rank; the other says so at DEBUG
    run.start_another(1)
    ranks = run.wait()
    everybody_is_back(ranks, 3, without=[1])
    assert [entry[0] for entry in ranks[0].entries()] == [0, 2]
    assert "2 ranks are too few: waiting 40 s for processes that replace initial ranks 1" in ranks[0].log


def test_nobody_replaces_them(launch):
    """Whose time is over first takes the other one along, which may say so itself by then."""
    enough = RetryController(min_world_size=3, wait_for_replacement=0.5)
    run = launch(targets.run_full, 3, faults={At(1, step=1): Kill()}, wrapper=PATIENT | {"initialize": enough})
    ranks = run.wait()
    assert "TooFewRanks" in {ranks[0].exception, ranks[2].exception} <= {"TooFewRanks", "RestartAbort"}
    for rank in (ranks[0], ranks[2]):
        assert "world_size=2 is less than min_world_size=3; nobody came within" in rank.message


def restarts(ranks):
    """What all processes together say of restarts, by number; each number is told once."""
    told = {}
    for rank in ranks:
        for first, last, text in RESTART.findall(rank.log):
            for number in range(int(first), int(last or first) + 1):
                assert number not in told, f"restart {number} is told twice: {told[number]!r} and {text!r}"
                told[number] = text
    return told


@pytest.mark.parametrize("victim", [0, 1])
def test_each_restart_is_told_once(launch, victim):
    """Also where the first rank is one that has just joined: it says what it knows."""
    run = launch(targets.run_full, 3, faults={At(victim, step=1): Kill()})
    run.wait_event("enter", count=2, iteration=1)
    run.start_another(victim)
    told = restarts(run.wait())
    assert sorted(told) == [1, 2]
    assert "process died" in told[1] and "continuing with 2 of 3 ranks" in told[1]
    assert f"rank {victim} joins" in told[2] and "continuing with 3 ranks" in told[2]


@pytest.mark.parametrize(("victim", "first"), [(0, 1), (1, 0)])
def test_a_restart_whose_function_was_not_called_is_told_once(launch, victim, first):
    """A process joins before the first rank has got there. Where it becomes the first rank, the one that was tells."""
    held = SlowDown(when=When("never", 1))
    run = launch(targets.run_full, 3, faults={At(victim, step=1): Kill(), At(first, 1, "initialize"): held})
    run.wait_event("wait_for")
    run.start_another(victim)
    told = restarts(run.wait())
    assert sorted(told) == [1, 2]
    assert "process died" in told[1] and f"rank {victim} joins" in told[2]
    assert "continuing with 3" in told[2]


def test_no_active_rank_is_left(launch):
    """Four ranks are active in fours: three wait, though all of them are reserves now, and go on with a replacement."""
    options = PATIENT | {"initialize": RetryController(wait_for_replacement=40)}
    run = launch(targets.run_full, 4, faults={At(0, step=1): Kill()}, wrapper=functools.partial(in_fours, options))
    run.wait_event("short")
    run.start_another(0)
    ranks = run.wait()
    everybody_is_back(ranks, 4, without=[0])
    assert [entry[0] for entry in ranks[1].entries()] == [0, 2]
    told = restarts(ranks)
    assert sorted(told) == [1, 2]
    assert "process died" in told[1]
    assert "3 ranks are too few: waiting 40 s for processes that replace initial ranks 0" in told[1]
    assert "rank 0 joins" in told[2]


@pytest.mark.parametrize("patience", [None, 0.0, 0.5])
def test_no_active_rank_is_left_and_nobody_comes(launch, patience):
    """A clear error, on all of them."""
    hook = {} if patience is None else {"initialize": RetryController(wait_for_replacement=patience)}
    options = functools.partial(in_fours, PATIENT | hook)
    ranks = launch(targets.run_full, 4, faults={At(3, step=1): Kill()}, wrapper=options).wait()
    said = "leaves none of 3 ranks active" if patience is None else "active_world_size=0 is less than"
    for rank in ranks[:3]:
        assert rank.exception in ("RestartError", "TooFewRanks", "RestartAbort")
        assert said in rank.message


def in_fours(options, context):
    return {**options, "rank_assignment": Compose(ActiveWorldSizeDivisibleBy(4), ShiftRanks())}
