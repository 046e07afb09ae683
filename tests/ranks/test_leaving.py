"""A rank leaves on purpose: just its own exception comes out of its call, the others go on."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from inprocess.exception import RestartAbort
from tests.harness import At, Raise
from tests.harness.child import Context

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


def exiting(context: Context, call: Any) -> list[int]:
    """As many programs do; only the rank that has failed lets its error pass."""
    try:
        value = targets.train(context, call)
    except Exception:
        if context.rank != 1:
            sys.exit(1)
        raise
    if call.iteration == 1 and context.args.get("leaves") == context.rank:
        sys.exit(1)
    return value


def run_exiting(context: Context) -> Any:
    return context.wrap(exiting)()


def run_in_a_handler(context: Context) -> Any:
    """The program goes on after an earlier exit."""
    try:
        raise context.args["kind"]
    except context.args["kind"]:
        return context.wrap(targets.train)()


def test_nobody_leaves_because_another_rank_has_failed(launch):
    """`except Exception: sys.exit(1)`: a rank sees that its connections end before it hears why."""
    ranks = launch(run_exiting, 4, faults={At(1, step=2): Raise()}, args={"steps": 200}).wait()
    checks.went_on(ranks)


def test_an_exit_in_a_later_iteration_is_the_ranks_own(launch):
    ranks = launch(run_exiting, 3, faults={At(1, step=1): Raise()}, args={"leaves": 0}).wait()
    checks.failed(ranks, {0: "SystemExit"})
    checks.went_on(ranks, without=[0], iteration=2)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, RestartAbort], ids=lambda kind: kind.__name__)
def test_an_exit_that_the_program_has_handled_before(launch, kind):
    ranks = launch(run_in_a_handler, 2, faults={At(1, step=1): Raise()}, args={"kind": kind}).wait()
    checks.went_on(ranks)
