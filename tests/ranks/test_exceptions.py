"""One, several, all ranks raise: everybody restarts in the same process with the same ranks and world size."""

from __future__ import annotations

import pytest

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


def test_many_restarts_leave_nothing(launch):
    """Threads and descriptors are where they were after fifty restarts; the harness compares.

    An entry may see a few more than the one before: the groups of the last iteration end in the background.
    """
    faults = {At(number % 2, iteration=number, step=1): Raise(ValueError, f"{number}") for number in range(50)}
    ranks = launch(targets.run_train, 2, faults=faults, args={"count": True}).wait(60)
    checks.went_on(ranks, iteration=50)
    counts = [[event["count"] for event in rank.of("descriptors")] for rank in ranks]
    assert all(min(count[-10:]) <= max(count[:10]) for count in counts), counts
