"""An interruption or an exception in a coalescing context: the next iteration begins outside NCCL's group calls."""

from __future__ import annotations

import pytest

from tests.harness import At, Raise, When

from . import batching


@pytest.mark.parametrize("replaced", [True, False])
def test_no_group_call_outlives_its_iteration(launch, replaced):
    """Also where the context manager is one that the program has from before the call."""
    faults = {At(0, step="fault"): Raise(when=When("entered", 1))}
    ranks = launch(batching.run, 2, args={"replaced": replaced}, faults=faults).wait(20)
    assert [rank.value for rank in ranks] == [[1, 0, 0], [1, 0, 0]]
