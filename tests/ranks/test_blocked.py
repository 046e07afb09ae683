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
#: where one peer shows as much as two
LOCAL = ("loop", "sleep", "queue", "lock", "recv", "store_wait", "store_get")
DEADLINE = 20.0


def blocked(launch, place, victim, fault, **options):
    """The victim faults once all the others are at the place."""
    ranks = options.pop("ranks", 2 if place in LOCAL else 3)
    faults = {At(victim, step="fault"): fault(when=When("blocked", ranks - 1))}
    args = {"place": place, "victims": [victim]}
    return launch(targets.run_blocked, ranks, args=args, faults=faults, **options).wait(DEADLINE)


@pytest.mark.parametrize("place", PLACES)
def test_released_when_one_raises(launch, place):
    checks.went_on(blocked(launch, place, 1, Raise))


@pytest.mark.parametrize("place", PLACES)
def test_released_when_one_dies(launch, place):
    ranks = blocked(launch, place, 0, Kill)
    checks.died(ranks, {0: -signal.SIGKILL})
    checks.went_on(ranks, without=[0])


@pytest.mark.parametrize("place", ["all_reduce", "init", "new_group", "queue"])
def test_released_when_one_hangs(launch, place):
    """Nobody is killed: all were merely waiting, and answer the interruption."""
    checks.went_on(blocked(launch, place, 1, Hang, wrapper=HASTY))


@pytest.mark.parametrize("place", ["all_reduce", "init", "new_group"])
def test_three_released_when_rank_0_exits(launch, place):
    ranks = blocked(launch, place, 0, Exit, ranks=4)
    checks.died(ranks, {0: 5})
    checks.went_on(ranks, without=[0])
