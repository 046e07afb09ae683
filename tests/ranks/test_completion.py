"""All return or all restart; after success the ranks leave in any order."""

from __future__ import annotations

import itertools
import signal

import pytest

from tests.harness import At, Exit, Kill, Raise, When

from . import checks, targets


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_ranks_leave_in_any_order(launch, order):
    ranks = launch(targets.run_then_leave_in_order, 3, args={"order": order, "full_exit": order == (0, 1, 2)}).wait()
    checks.went_on(ranks, iteration=0)
    ends = {rank.rank: rank.of("ended")[0]["t"] for rank in ranks}
    assert sorted(ends, key=ends.__getitem__) == list(order)


@pytest.mark.parametrize("victim", [0, 2])
def test_all_restart_when_one_raises_after_the_others_returned(launch, victim):
    faults = {At(victim, step="late"): Raise(when=When("leave", 2))}
    ranks = launch(targets.run_late, 3, faults=faults).wait()
    checks.went_on(ranks)


@pytest.mark.parametrize("victim", [0, 2])
def test_all_restart_when_one_dies_after_the_others_returned(launch, victim):
    faults = {At(victim, step="late"): Kill(when=When("leave", 2))}
    ranks = launch(targets.run_late, 3, faults=faults).wait()
    checks.died(ranks, {victim: -signal.SIGKILL})
    checks.went_on(ranks, without=[victim])


@pytest.mark.parametrize("fault", [Kill(), Exit(0)], ids=["kill", "exit0"])
@pytest.mark.parametrize("victim", [0, 1])
def test_death_after_completion_changes_nothing_for_the_others(launch, fault, victim):
    ranks = launch(targets.run_train, 3, faults={At(victim, 0, "completion"): fault}).wait()
    assert not ranks[victim].done
    assert [rank.value for rank in ranks if rank.rank != victim] == [[0, n, 3] for n in range(3) if n != victim]


@pytest.mark.parametrize("victim", [0, 1])
def test_death_at_the_moment_of_completion(launch, victim):
    """Right after the last statement: both outcomes are allowed, a mixture is not (the harness checks I5)."""
    ranks = launch(targets.run_dying_on_exit, 3, args={"victim": victim}).wait()
    others = [rank for rank in ranks if rank.rank != victim]
    assert len({rank.value[0] for rank in others}) == 1
    assert all(rank.exitcode == 0 for rank in others)


def test_values_are_each_ranks_own(launch):
    ranks = launch(targets.run_odd_values, 3).wait()
    assert ranks.values == [None, {"text": "rank 1"}, [0.5, None]]


@pytest.mark.parametrize(("hook", "whose"), [("completion", [1, 1]), ("terminate", [1, 0])])
def test_the_last_hooks_may_take_their_time(launch, hook, whose):
    """Nobody waits for them: copying a model away in one call of C, or in a program, is no hang."""
    faults = {} if hook == "completion" else {At(0, step=1): Raise(SystemExit, "enough")}
    ranks = launch(targets.run_slow_hook, 2, faults=faults, args={"hook": hook}).wait()
    assert [len(rank.of("slow hook")) for rank in ranks] == whose
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert not any("no progress" in rank.log for rank in ranks)
