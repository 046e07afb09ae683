"""More ranks than slots: reserve ranks wait, take a freed slot, and return None if they are never needed."""

from __future__ import annotations

import re
import signal

import pytest

from tests.harness import At, Hang, Kill, Raise
from tests.harness.launch import HASTY

from . import checks, targets


def test_spares_return_none(launch):
    ranks = launch(targets.run_train, 4, wrapper=targets.two_active).wait()
    assert ranks.values == [[0, 0, 2], [0, 1, 2], None, None]
    assert [len(rank.entries()) for rank in ranks] == [1, 1, 0, 0]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_spare_takes_the_freed_slot(launch, victim):
    ranks = launch(targets.run_train, 4, faults={At(victim, step=1): Kill()}, wrapper=targets.two_active).wait()
    checks.died(ranks, {victim: -signal.SIGKILL})
    left = [rank.value for rank in ranks if rank.rank != victim]
    assert left == [[1, 0, 2], [1, 1, 2], None]


def test_spares_stay_spares_when_an_active_rank_raises(launch):
    ranks = launch(targets.run_train, 3, faults={At(1, step=1): Raise()}, wrapper=targets.two_active).wait()
    assert ranks.values == [[1, 0, 2], [1, 1, 2], None]


def test_all_active_ranks_die(launch):
    faults = {At(rank, iteration, step=1): Kill() for rank in range(2) for iteration in (0, 1)}
    ranks = launch(targets.run_train, 4, faults=faults, wrapper=targets.two_active).wait()
    assert [rank.value[1:] for rank in ranks[2:]] == [[0, 2], [1, 2]]


def test_the_death_of_a_spare_does_not_interrupt(launch):
    run = launch(targets.run_until_spare_died, 3, wrapper=targets.two_active)
    run.wait_event("enter", count=2)
    run.kill(2)
    ranks = run.wait()
    assert [rank.value for rank in ranks[:2]] == [[0, 0, 2], [0, 1, 2]]
    assert ranks[2].exitcode == -signal.SIGKILL


def test_gaps_are_filled_in_place(launch):
    """FillGaps: 0 X 2 3 -> 0 3 2, written as new ranks of the old ones."""
    ranks = launch(targets.run_train, 4, faults={At(1, step=1): Kill()}, wrapper=targets.fill_gaps).wait()
    assert [ranks[rank].value for rank in (0, 2, 3)] == [[1, 0, 3], [1, 2, 3], [1, 1, 3]]


def test_older_generations_rank_filter(launch):
    ranks = launch(targets.run_train, 3, faults={At(0, step=1): Kill()}, wrapper=targets.divisible_by_two).wait()
    assert [rank.value for rank in ranks[1:]] == [[1, 0, 2], [1, 1, 2]]
    assert ranks[0].entries() == [(0, 0, 2)]


def test_a_group_below_its_minimum_is_discarded(launch):
    """Two hosts of two ranks; one rank of host b dies, so the other leaves with RankDiscarded."""
    ranks = launch(targets.run_train, 4, faults={At(3, step=1): Kill()}, wrapper=targets.whole_hosts).wait()
    checks.failed(ranks, {2: "RankDiscarded"})
    assert [rank.value[1:] for rank in ranks[:2]] == [[0, 2], [1, 2]]


def test_a_spare_waits_longer_than_the_soft_timeout(launch):
    """Waiting is not hanging: only the rank that hangs is reported, and the spare is neither restarted nor killed."""
    options = targets.two_active_hasty
    ranks = launch(targets.run_train, 3, faults={At(1, step=1): Hang()}, wrapper=options).wait()
    assert ranks.values == [[1, 0, 2], [1, 1, 2], None]
    assert HASTY["soft_timeout"] < HASTY["hard_timeout"]


def test_a_spare_that_becomes_the_first_rank_says_how_long_that_restart_took(launch):
    """Not how long ago the first restart was that it saw as a spare."""
    faults = {At(0, 0, step=1): Raise(), At(0, 1, step=1): Kill()}
    ranks = launch(targets.run_train, 3, faults=faults, wrapper=targets.one_active).wait()
    (took,) = re.findall(r"restart 2: .* after (\d+) ms", ranks[1].log)
    (struck,) = (event["t"] for event in ranks[0].of("fault") if event["iteration"] == 1)
    (entered,) = (event["t"] for event in ranks[1].of("enter") if event["iteration"] == 2)
    assert int(took) <= (entered - struck) * 1e3 + 1
