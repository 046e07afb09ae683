"""A function that does not let the interruption out is interrupted again, and the log says where it was swallowed."""

from __future__ import annotations

import pytest

from tests.harness import At, Raise, Swallow, When

from . import checks, targets


@pytest.mark.parametrize("times", [1, 2])
def test_swallowed_interruptions_are_raised_again(launch, times):
    faults = {At(0, step=1): Swallow(times), At(1, step=1): Raise(when=When("blocked", 1))}
    ranks = launch(targets.run_alone, 2, faults=faults).wait()
    checks.went_on(ranks)
    assert len(ranks[0].of("swallowed", type="RankShouldRestart")) == times + 1
    (line,) = (line for line in ranks[0].log.splitlines() if "was swallowed" in line)
    assert "rank 0: the interruption raised at " in line and "faults.py" in line


@pytest.mark.parametrize("style", ["except_exception", "bare_except", "finally_blocks", "in_del", "raises_own"])
def test_awkward_functions(launch, style):
    faults = {At(1, step="fault"): Raise(when=When("blocked", 2))}
    ranks = launch(targets.run_awkward, 3, args={"style": style}, faults=faults).wait()
    checks.went_on(ranks)
