"""A second fault in every phase of a restart is handled as the first."""

from __future__ import annotations

import signal

import pytest

from tests.harness import At, Exit, Kill, Raise

from . import checks, targets

#: the phases after the first fault, with the iteration their hooks see
PHASES = [
    ("abort", 0),
    ("finalize", 0),
    ("health_check", 0),
    ("rank_assignment", 1),
    ("initialize", 1),
    ("enter", 1),
    (0, 1),
    (2, 1),
]
FIRST = {At(1, iteration=0, step=1): Raise()}


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(("phase", "iteration"), PHASES, ids=str)
def test_a_rank_dies_during_the_restart(launch, phase, iteration, victim):
    ranks = launch(targets.run_train, 3, faults=FIRST | {At(victim, iteration, phase): Kill()}).wait()
    checks.died(ranks, {victim: -signal.SIGKILL})
    checks.went_on(ranks, without=[victim], iteration=ranks[1].entries()[-1][0])


@pytest.mark.parametrize(("phase", "iteration"), [("initialize", 1), ("enter", 1), (1, 1)], ids=str)
def test_a_rank_raises_during_the_restart(launch, phase, iteration):
    ranks = launch(targets.run_train, 3, faults=FIRST | {At(0, iteration, phase): Raise()}).wait()
    checks.went_on(ranks, iteration=2)


@pytest.mark.parametrize(("phase", "iteration"), PHASES[:4], ids=str)
def test_the_rank_that_raised_dies_during_the_restart(launch, phase, iteration):
    ranks = launch(targets.run_train, 3, faults=FIRST | {At(1, iteration, phase): Exit()}).wait()
    checks.died(ranks, {1: 5})
    checks.went_on(ranks, without=[1], iteration=ranks[0].entries()[-1][0])


def test_two_ranks_die_in_different_phases_of_one_restart(launch):
    faults = FIRST | {At(0, 0, "finalize"): Kill(), At(3, 1, "rank_assignment"): Kill()}
    ranks = launch(targets.run_train, 4, faults=faults).wait()
    checks.died(ranks, {0: -signal.SIGKILL, 3: -signal.SIGKILL})
    checks.went_on(ranks, without=[0, 3], iteration=ranks[1].entries()[-1][0])


@pytest.mark.parametrize("phase", ["initialize", "rank_assignment"])
def test_a_rank_dies_before_the_first_entry(launch, phase):
    ranks = launch(targets.run_train, 3, faults={At(2, 0, phase): Kill()}).wait()
    checks.died(ranks, {2: -signal.SIGKILL})
    checks.went_on(ranks, without=[2], iteration=ranks[1].entries()[-1][0])
