"""Process groups in reference cycles do not outlive a restart, though no collection of the interpreter's own comes; nor
do those of collectives that nobody has waited for."""

from __future__ import annotations

import pytest
import torch

from tests import growth

from . import targets


def test_a_function_that_returns_right_after_its_last_backward_pass(launch):
    """In one of ten such calls torch alone waits for ever, in the destructor of the model's reducer."""
    launch(targets.run_last_backward, 1, args={"times": 150}).wait()


@pytest.mark.parametrize("kind", ["tensor parallel", "sharded", "pending", "other backends", "reconfigured"])
def test_groups_in_cycles_end_with_their_iteration(launch, kind):
    if kind not in growth.KINDS:
        pytest.skip(f"groups that can be reconfigured came with torch 2.14; this is {torch.__version__}")
    found = growth.series(launch, kind, 2, restarts=10, every=1, deadline=60, memory=False, collect=False)
    assert growth.more_than_early(found) == []
