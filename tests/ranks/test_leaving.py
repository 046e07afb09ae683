"""A rank leaves on purpose: just its own exception comes out of its call, the others go on."""

from __future__ import annotations

import pytest

from inprocess.exception import RestartAbort
from tests.harness import At, Raise

from . import checks, targets


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    "kind", [SystemExit, KeyboardInterrupt, RestartAbort, GeneratorExit], ids=lambda kind: kind.__name__
)
def test_one_leaves(launch, kind, victim):
    ranks = launch(targets.run_train, 3, faults={At(victim, step=1): Raise(kind)}).wait()
    checks.failed(ranks, {victim: kind.__name__})
    assert ranks[victim].message == ("3" if kind is SystemExit else "injected")
    checks.went_on(ranks, without=[victim])


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RestartAbort], ids=lambda kind: kind.__name__)
def test_all_leave(launch, kind):
    faults = {At(rank, iteration, "enter"): Raise(kind) for rank in range(3) for iteration in range(3)}
    ranks = launch(targets.run_train, 3, faults=faults).wait()
    checks.failed(ranks, dict.fromkeys(range(3), kind.__name__))


@pytest.mark.parametrize(
    "letter",
    [("outcome", 0), ("aborted", 0), ("next", 1), ("rendezvous", 1), ("start", 1)],
    ids=lambda letter: f"{letter[0]} {letter[1]}",
)
def test_ctrl_c_while_the_library_waits(launch, letter):
    args = {"letter": letter, "victim": 2}
    ranks = launch(targets.run_interrupted_wait, 3, faults={At(1, step=1): Raise()}, args=args).wait()
    checks.failed(ranks, {2: "KeyboardInterrupt"})
    checks.went_on(ranks, without=[2], iteration=ranks[0].entries()[-1][0])


def test_the_last_one_finishes_alone(launch):
    faults = {At(0, iteration=0, step=1): Raise(SystemExit), At(2, iteration=1, step=1): Raise(KeyboardInterrupt)}
    ranks = launch(targets.run_train, 3, faults=faults).wait()
    checks.failed(ranks, {0: "SystemExit", 2: "KeyboardInterrupt"})
    checks.went_on(ranks, without=[0, 2], iteration=2)
