"""One, several, all ranks raise: everybody restarts in the same process with the same ranks and world size."""

from __future__ import annotations

import pytest

from inprocess.protocol import verbs
from tests import growth
from tests.harness import At, Raise, Uncopyable, Unpicklable

from . import checks, targets


def test_without_a_fault_the_function_runs_once(launch):
    ranks = launch(targets.run_train, 4, args={"full_exit": True}).wait()
    assert ranks.values == [[0, rank, 4] for rank in range(4)]
    assert [len(rank.entries()) for rank in ranks] == [1] * 4


def test_one_rank_alone(launch):
    ranks = launch(targets.run_train, 1, faults={At(0, step=1): Raise()}).wait()
    checks.went_on(ranks)


@pytest.mark.parametrize("kind", [ValueError, Uncopyable, Unpicklable, RuntimeError], ids=lambda kind: kind.__name__)
def test_one_raises(launch, kind):
    ranks = launch(targets.run_train, 2, faults={At(1, step=1): Raise(kind)}).wait()
    checks.went_on(ranks)


@pytest.mark.parametrize("raising", [(0,), (0, 1), (0, 1, 2)], ids=str)
def test_some_raise_at_the_same_step(launch, raising):
    ranks = launch(targets.run_train, 3, faults={At(rank, step=1): Raise() for rank in raising}).wait()
    checks.went_on(ranks)


def test_one_after_the_other(launch):
    faults = {
        At(0, iteration=0, step=2): Raise(),
        At(1, iteration=1, step=0): Raise(Uncopyable),
        At(2, iteration=2, step="enter"): Raise(Unpicklable),
        At(1, iteration=3, step="end"): Raise(),
    }
    ranks = launch(targets.run_train, 3, faults=faults).wait()
    checks.went_on(ranks, iteration=4)
    entered = [[entry[0] for entry in rank.entries()] for rank in ranks]
    # in iteration 2 the fault comes at the entry: who has not entered by then does not any more
    assert [[number for number in numbers if number != 2] for numbers in entered] == [[0, 1, 3, 4]] * 3
    assert entered[2] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["ordinary", "kept"])
def test_many_restarts_leave_nothing(launch, kind):
    """What fifty restarts leave behind, also where the program keeps every exception; `nox -s leaks` is the long form.

    An entry may see a few things more than the one before: the groups of the last iteration end in the background.
    """
    found = growth.series(launch, kind, 2, restarts=50, every=1, deadline=60, memory=False)
    for (rank, name), points in found.items():
        values = [value for _, value in points]
        if name in growth.COUNTED:
            assert min(values[-10:]) <= max(values[5:15]), f"{name} of rank {rank}: {values}"
        if name == "keys":  # those of the last iterations
            assert min(values[-10:]) <= max(values[verbs.KEEP_VERDICTS + 5 : 35]), values
