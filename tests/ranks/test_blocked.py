"""The others wait somewhere when a rank faults: they are released at once, not when that wait would end.

Every wait here lasts 60 s or for ever; the deadline of 20 s is the proof.
"""

from __future__ import annotations

import signal

import pytest

from tests.harness import At, Exit, Hang, Kill, Raise, When
from tests.harness.launch import HASTY

from . import checks, targets

PLACES = [
    "loop",
    "sleep",
    "queue",
    "lock",
    "recv",
    "all_reduce",
    "barrier",
    "recv_tensor",
    "init",
    "new_group",
    "store_wait",
    "store_get",
]
DEADLINE = 20.0


def blocked(launch, place, fault, victim, ranks=3, wrapper=None):
    args = {"place": place, "victims": [victim]}
    return launch(targets.run_blocked, ranks, args=args, faults={At(victim, step="fault"): fault}, wrapper=wrapper)


@pytest.mark.parametrize("place", PLACES)
def test_released_when_one_raises(launch, place):
    ranks = blocked(launch, place, Raise(when=When("blocked", 2)), victim=1).wait(DEADLINE)
    checks.went_on(ranks)


@pytest.mark.parametrize("place", PLACES)
def test_released_when_one_dies(launch, place):
    ranks = blocked(launch, place, Kill(when=When("blocked", 2)), victim=0).wait(DEADLINE)
    checks.died(ranks, {0: -signal.SIGKILL})
    checks.went_on(ranks, without=[0])


@pytest.mark.parametrize("place", ["all_reduce", "init", "new_group", "queue"])
def test_released_when_one_hangs(launch, place):
    """Nobody is killed: all were merely waiting, and answer the interruption."""
    ranks = blocked(launch, place, Hang(when=When("blocked", 2)), victim=2, wrapper=HASTY).wait(DEADLINE)
    checks.went_on(ranks)


@pytest.mark.parametrize("place", ["all_reduce", "init", "new_group", "store_wait"])
def test_three_released_when_rank_0_exits(launch, place):
    ranks = blocked(launch, place, Exit(5, when=When("blocked", 3)), victim=0, ranks=4).wait(DEADLINE)
    checks.died(ranks, {0: 5})
    checks.went_on(ranks, without=[0])
