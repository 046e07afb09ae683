"""A default group that is not the first of its process: torch leaves things out, see `collectives/default_group`."""

from __future__ import annotations

import pytest
import torch

from tests.harness import At, Kill, Raise
from tests.harness.launch import KILLING

from . import regrouping


def test_it_is_split_after_a_restart(launch):
    """Its ranks are left out: SIGSEGV. One rank: between more a split of Gloo's hangs at times, also without this
    library.
    """
    (rank,) = launch(regrouping.split, 1, faults={At(0, step="fault", iteration=0): Raise()}).wait(20)
    assert rank.value == [1, 1]


@pytest.mark.parametrize("own_store", [False, True])
def test_another_in_the_same_iteration(launch, own_store):
    """The store still has the addresses of the one before, which the ranks that are early would take."""
    faults = {At(1, step="fault", iteration=0): Raise()}
    ranks = launch(regrouping.again, 3, args={"own_store": own_store}, faults=faults).wait(40)
    assert [rank.value for rank in ranks] == [1, 1, 1]


@pytest.mark.parametrize("how", ["store", "file"])
def test_a_store_that_outlives_the_iteration(launch, tmp_path, how):
    """It has the addresses of the iteration before, which the ranks that are early would take."""
    args = {"how": how, "path": str(tmp_path / "meet")}
    faults = {At(1, step="fault", iteration=iteration): Raise() for iteration in range(3)}
    ranks = launch(regrouping.kept_store, 4, args=args, faults=faults).wait(40)
    assert [rank.value for rank in ranks] == [3, 3, 3, 3]


@pytest.mark.parametrize("how", ["env", "tcp"])
def test_an_address_that_the_function_names(launch, how):
    """As torch's tutorials do. Nobody listens there; the ranks meet at the iteration's store."""
    faults = {At(1, step="fault", iteration=0): Kill()}
    ranks = launch(regrouping.elsewhere, 3, args={"how": how}, faults=faults).wait(30)
    assert [ranks[rank].value for rank in (0, 2)] == [[1, 0, 2], [1, 1, 2]]


@pytest.mark.parametrize("is_served", [True, False])
def test_groups_of_the_programs_own_beside_it(launch, is_served):
    """They meet with processes that are not wrapped: where and under the keys that the program says."""
    # as programs: torch keeps a pipe of the first server of a process
    faults = {At(1, step="fault", iteration=0): Raise()}
    ranks = launch(regrouping.beside, 2, args={"is_served": is_served}, faults=faults, as_program=True).wait(30)
    assert [rank.value for rank in ranks] == [[1, 2, 2], [1, 2, 2]]


@pytest.mark.parametrize("only_size", [False, True])
def test_a_rank_or_a_world_size_from_before(launch, only_size):
    """The ranks would wait for one that does not exist."""
    faults = {At(0, step="fault", iteration=0): Kill()}
    ranks = launch(regrouping.stale, 3, args={"only_size": only_size}, faults=faults).wait(30)
    assert [ranks[rank].value for rank in (1, 2)] == [[1, 0, 2], [1, 1, 2]]
    errors = [[event["text"] for event in rank.events if event["event"] == "error"] for rank in ranks]
    assert not errors[0]
    assert [len(each) for each in errors[1:]] == [1, 1]
    was = 0 if only_size else 1
    assert f"rank={was}, world_size=3 were passed" in errors[1][0]
    assert "this iteration has rank 0 of 2" in errors[1][0]


@pytest.mark.parametrize("serves", [False, True])
def test_a_store_whose_other_side_never_comes(launch, serves):
    """torch connects in C++, where nothing reaches a rank: it was killed. As a server it waits for workers likewise."""
    # as programs: torch keeps a pipe of the first server of a process
    args = {"serves": serves}
    ranks = launch(regrouping.unserved, 2, args=args, wrapper=KILLING, as_program=True).wait(30)
    assert [rank.value for rank in ranks] == [[1, True], [1, True]]
    assert [rank.exitcode for rank in ranks] == [0, 0]


NOT_HERE = f"groups that can be reconfigured came with torch 2.14; this is {torch.__version__}"


@pytest.mark.skipif(not regrouping.CAN_RECONFIGURE, reason=NOT_HERE)
@pytest.mark.parametrize("step", ["before 1", "after 1", "before 2", "after 2"])
@pytest.mark.parametrize("fault", [Raise(), Kill()], ids=["raises", "dies"])
def test_a_group_that_is_reconfigured(launch, step, fault):
    """The others wait for the handle of the rank that does not come, or in a collective of what was made."""
    ranks = launch(regrouping.reconfigured, 3, faults={At(1, step=step, iteration=0): fault}).wait(30)
    left = [0, 1, 2] if isinstance(fault, Raise) else [0, 2]
    assert [ranks[each].value for each in left] == [[1, place, len(left)] for place in range(len(left))]


@pytest.mark.skipif(not regrouping.CAN_RECONFIGURE, reason=NOT_HERE)
def test_a_rank_that_waits_in_reconfigure(launch):
    """For one that has told its handle, and raises before it takes part."""
    ranks = launch(regrouping.reconfigured_late, 2).wait(30)
    assert [rank.value for rank in ranks] == [[1, 0, 2], [1, 1, 2]]
