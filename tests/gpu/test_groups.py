"""All kinds of process groups that are in use, or still being made, when a rank fails."""

from __future__ import annotations

import signal

import pytest

from inprocess.testing.coordinates import When
from tests.harness import At, Kill, Raise
from tests.ranks import checks

from . import machine, targets

pytestmark = machine.pytestmark
sizes = pytest.mark.parametrize("size", [2, 4])


def others_wait(size):
    """The others are in the collective, or on their way."""
    return When("waits", size - 1)


@sizes
@pytest.mark.parametrize("kind", list(targets.GROUPS))
@pytest.mark.parametrize("fault", [Raise, Kill], ids=["raises", "dies"])
def test_pending_collectives(job, size, kind, fault):
    ranks = job(
        targets.run_groups, size, faults={At(1, step="fault"): fault(when=others_wait(size))}, args={"kind": kind}
    )
    if fault is Kill:
        checks.died(ranks, {1: -signal.SIGKILL})
    checks.went_on(ranks, without=[1] if fault is Kill else [])


#: whoever waits in NCCL's bootstrap for a rank that never comes is killed at hard_timeout: docs/design/nccl.md
in_bootstrap = pytest.mark.xfail(machine.ON == "cuda", reason="nothing ends the wait in NCCL's bootstrap")


@sizes
@pytest.mark.parametrize(
    ("step", "victim"), [("enter", 0), ("enter", 1), ("made", 0), pytest.param("made", 1, marks=in_bootstrap)]
)
def test_a_rank_dies_while_the_others_make_the_group(job, size, step, victim):
    """NCCL's communicator is made by the first collective, in which the others wait for the one that died."""
    ranks = job(targets.run_train, size, faults={At(victim, step=step): Kill()}, wrapper=targets.HASTY)
    checks.died(ranks, {victim: -signal.SIGKILL})
    checks.went_on(ranks, without=[victim])


@sizes
@machine.cuda_only
@pytest.mark.parametrize("kept", [False, True], ids=["of the function", "kept by the program"])
def test_a_graph_that_captured_a_collective(job, size, kept):
    """NCCL's abort waits until no graph refers to the communicator; both kinds are alive while it runs."""
    faults = {At(1, step=1): Raise(when=others_wait(size))}
    checks.went_on(job(targets.run_graph, size, faults=faults, args={"kept": kept}))
