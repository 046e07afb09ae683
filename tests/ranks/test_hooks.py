"""Hooks that raise: who leaves, with what, and that the others go on."""

from __future__ import annotations

import time
from typing import Any

import pytest

from inprocess.exception import HealthCheckError, RestartAbort
from inprocess.finalize import ThreadedFinalize
from tests.harness import At, Raise
from tests.harness.child import Context
from tests.harness.launch import KILLING

from . import checks, targets

FIRST = {At(1, iteration=0, step=1): Raise()}


def test_initialize_raises_an_exception(launch):
    ranks = launch(targets.run_train, 3, faults={At(1, 0, "initialize"): Raise()}).wait()
    checks.went_on(ranks)


@pytest.mark.parametrize("rank", [0, 2])
def test_initialize_raises_a_base_exception(launch, rank):
    """Everybody leaves: that rank with its own exception, the others with one that names it."""
    ranks = launch(targets.run_train, 3, faults={At(rank, 0, "initialize"): Raise(RestartAbort)}).wait()
    checks.failed(ranks, dict.fromkeys(range(3), "RestartAbort"))
    assert ranks[rank].message == "injected"
    assert all(f"initial rank {rank}" in other.message for other in ranks if other.rank != rank)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("hook", "iteration", "kind"),
    [
        ("finalize", 0, ValueError),
        ("finalize", 0, RestartAbort),
        ("health_check", 0, ValueError),
        ("health_check", 0, HealthCheckError),
        ("rank_assignment", 1, ValueError),
        ("rank_assignment", 1, RuntimeError),
        ("rank_assignment", 1, KeyboardInterrupt),
    ],
    ids=str,
)
def test_the_rank_whose_hook_raises_leaves(launch, hook, iteration, kind, rank):
    ranks = launch(targets.run_train, 3, faults=FIRST | {At(rank, iteration, hook): Raise(kind)}).wait()
    assert ranks[rank].exception in (kind.__name__, "HealthCheckError"), ranks[rank].trace
    assert "injected" in ranks[rank].message + ranks[rank].trace
    checks.went_on(ranks, without=[rank], iteration=ranks[1].entries()[-1][0])


@pytest.mark.parametrize("kind", [ValueError, RestartAbort], ids=lambda kind: kind.__name__)
def test_errors_of_abort_hooks_are_logged_and_stop_nothing(launch, kind):
    ranks = launch(targets.run_train, 3, faults=FIRST | {At(rank, 0, "abort"): Raise(kind) for rank in range(3)}).wait()
    checks.went_on(ranks)
    assert all("injected" in rank.log for rank in ranks)


def test_completion_hook_raises(launch):
    ranks = launch(targets.run_train, 2, faults={At(1, 0, "completion"): Raise()}).wait()
    assert ranks[0].value == [0, 0, 2]
    assert ranks[1].exception in ("ValueError", None)


@pytest.mark.parametrize("hooks", ["newer", "older"])
def test_both_generations(launch, hooks):
    """Every hook is called with its generation's arguments and in order."""
    options = {"newer": targets.newer_hooks, "older": targets.older_hooks}[hooks]
    ranks = launch(targets.run_train, 2, faults=FIRST, wrapper=options).wait()
    checks.went_on(ranks)
    for rank in ranks:
        names = [(event["name"], event["iteration"]) for event in rank.of("phase")]
        assert names == targets.ORDER[hooks], names
    raised = [event["error"] for event in ranks[1].of("phase", name="finalize")]
    assert raised == ["ValueError('injected')"]


def with_a_long_finalize(context: Context) -> dict[str, Any]:
    return {**KILLING, "finalize": ThreadedFinalize(30, time.sleep, (KILLING["hard_timeout"] + 1,))}


def test_a_hook_with_a_limit_of_its_own_may_take_longer_than_hard_timeout(launch):
    checks.went_on(launch(targets.run_train, 2, faults=FIRST, wrapper=with_a_long_finalize).wait())
