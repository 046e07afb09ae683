"""A default group that is not the first of its process: torch leaves things out, see `collectives/default_group`."""

from __future__ import annotations

import pytest

from tests.harness import At, Raise

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
