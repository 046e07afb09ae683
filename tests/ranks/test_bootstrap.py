"""A rank fails while the others make a communicator with it: they are released, not killed.

No NCCL here: ranks that exchange sockets in the same way, see `bootstrapping`. Nothing but the library ends their wait:
the deadline is the proof, and the test without it shows that.
"""

from __future__ import annotations

import signal

import pytest

from inprocess.abort import AbortTorchDistributed
from tests.harness.launch import KILLING

from . import bootstrapping, checks

DEADLINE = 20.0


@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("seed", [1, 2])
def test_released(launch, how, victim, seed):
    """At a moment of chance; also rank 0, where the others learn of each other."""
    args = {"how": how, "victim": victim, "seed": seed}
    ranks = launch(bootstrapping.run, 3, args=args).wait(DEADLINE)
    if how == "kill":
        checks.died(ranks, {victim: -signal.SIGKILL})
        checks.went_on(ranks, without=[victim])
    else:
        checks.went_on(ranks)


def test_without_it_healthy_ranks_are_killed(launch):
    """So they would be if nobody released them; this is what ``nccl_bootstrap=False`` means."""
    args = {"how": "raise", "victim": 2, "seed": 1}
    options = KILLING | {"abort": AbortTorchDistributed(nccl_bootstrap=False)}
    ranks = launch(bootstrapping.run, 3, args=args, wrapper=options).wait(60)
    checks.died(ranks, {0: -signal.SIGKILL, 1: -signal.SIGKILL})
    assert ranks[2].value == [1, 0, 1]
