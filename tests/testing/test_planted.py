"""Three bugs of a training that was written without a thought of restarts, each found by five lines of test.

Rank 0 raises, since it writes the checkpoint: a fault of the other one may come in the middle of that, the third bug.
"""

from __future__ import annotations

import re

import pytest

from inprocess.testing import At, Kill, Raise

from . import planted


def test_without_a_fault_it_works(ranks, tmp_path):
    result = ranks(2, env={"CHECKPOINTS": str(tmp_path)}).run(planted.train, 4)
    assert result.exit_codes == [0, 0] and len(result.values[0]) == 4


def test_a_registry_that_grows(ranks, tmp_path):
    faults = {At(rank=0, step=2, iteration=i): Raise(OSError) for i in (0, 1)}
    result = ranks(2, env={"CHECKPOINTS": str(tmp_path)}).run(planted.train, 6, faults=faults, check=False)
    with pytest.raises(AssertionError) as failure:
        result.assert_nothing_grows()
    assert "the list tests.testing.planted.HOOKS: 0, 1, 2" in str(failure.value)
    assert "planted.py:17 in on_step: `HOOKS.append(hook)`" in str(failure.value)


def test_a_group_that_is_kept(ranks, tmp_path):
    faults = {At(rank=0, step=2): Raise(OSError)}
    with pytest.raises(AssertionError) as failure:
        ranks(2, env={"CHECKPOINTS": str(tmp_path)}).run(planted.train, 6, faults=faults)
    # the one of the two that raises first may interrupt the other one before it does
    assert re.match("(rank 0|rank 1|ranks 0, 1) ended with ValueError", str(failure.value))
    assert "METRICS_GROUP, in" in str(failure.value)
    assert "planted.py:23 in metrics_group: `METRICS_GROUP = dist.new_group(" in str(failure.value)
    assert "planted.py:58 in train" in str(failure.value), "and where the function fails"


def test_a_checkpoint_that_is_cut_in_half(ranks, tmp_path):
    faults = {At(rank=0, file="*.pt", step=2): Kill()}
    job = ranks(2, env={"CHECKPOINTS": str(tmp_path)})
    with pytest.raises(AssertionError) as failure:
        job.run(planted.train, 6, faults=faults)
    assert "planted.py:35 in load" in str(failure.value)
    assert f"Kill() in iteration 0, half of {tmp_path}/last.pt written, step 2" in job.stories[0]
    assert "planted.py:29 in save]" in job.stories[0]
