"""The fault table once more, under a launcher that replaces what dies: in the end everybody is there, as at first."""

from __future__ import annotations

import pytest

from tests.harness import At, Exit, Hang, HoldGIL, HostLoss, Kill, KillMonitor, KillTogether, Raise, Stop
from tests.harness.launch import BEATING, HASTY, KILLING, PATIENT

from . import targets
from .test_joining import everybody_is_back

#: what happens to rank 1 of 3 at its second step, with which timeouts, and whether it costs the process
FAULTS = {
    "raises": (Raise(), PATIENT, False),
    "dies": (Kill(), PATIENT, True),
    "exits": (Exit(5), PATIENT, True),
    "leaves": (Raise(SystemExit, 3), PATIENT, True),
    "hangs": (Hang(), HASTY, False),
    "holds the interpreter": (HoldGIL(), KILLING, True),
    "is stopped": (Stop(), KILLING, True),
    "its monitor dies": (KillMonitor(), PATIENT, False),
    "its host is lost": (HostLoss(), BEATING, True),
}
PHASES = [("abort", 0), ("finalize", 0), ("health_check", 0), ("rank_assignment", 1), ("initialize", 1), ("enter", 1)]


def in_the_end(ranks, size):
    """Those that returned a value are everybody."""
    lost = [number for number, result in enumerate(ranks) if result.value is None]
    everybody_is_back(ranks, size, without=lost)
    return lost


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault(launch, name):
    fault, options, deadly = FAULTS[name]
    args = {"restarts": 0 if name == "its monitor dies" else 1}
    run = launch(targets.run_full, 3, faults={At(1, step=1): fault}, wrapper=options, args=args, respawn=1)
    assert in_the_end(run.wait(), 3) == [1] * deadly


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(("phase", "iteration"), PHASES, ids=str)
def test_a_rank_dies_during_a_restart(launch, phase, iteration, victim):
    faults = {At(1, iteration=0, step=1): Raise(), At(victim, iteration, phase): Kill()}
    run = launch(targets.run_full, 3, faults=faults, respawn=1)
    assert in_the_end(run.wait(), 3) == [victim]


def test_all_but_one_die_one_after_the_other(launch):
    """Some before the one before them has been replaced."""
    faults = {At(rank, iteration, step=1): Kill() for rank in range(3) for iteration in range(rank, 2 * rank + 1)}
    run = launch(targets.run_full, 4, faults=faults, args={"restarts": 3}, respawn=3)
    assert in_the_end(run.wait(), 4) == [0, 1, 2]


def test_all_die(launch):
    """At the same step: the job is over, and its store with it. Those that replace them begin anew."""
    faults = {At(rank, step=1): KillTogether(2) for rank in range(2)}
    run = launch(targets.run_full, 2, faults=faults, args={"restarts": 0}, respawn=2)
    ranks = run.wait(check=False)
    assert in_the_end(ranks, 2) == [0, 1]
    assert not [line for line in ranks.problems if not line.startswith("I4: call 0")]  # two jobs
