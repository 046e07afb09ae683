"""Hooks that raise: who leaves, with what, and that the others go on."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from inprocess.abort import AbortTorchDistributed
from inprocess.compose import Compose
from inprocess.exception import HealthCheckError, RankShouldRestart, RestartAbort
from inprocess.finalize import ThreadedFinalize
from tests.harness import At, Raise
from tests.harness.child import Context
from tests.harness.launch import KILLING, PATIENT

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
    assert all(f"rank {rank}: initialize raised" in other.message for other in ranks if other.rank != rank)


@pytest.mark.parametrize("hook", ["rank_assignment", "initialize", "health_check", "completion"])
def test_another_wrapped_function_in_a_hook_is_refused(launch, hook):
    """It would end what the call around it works with."""
    (rank,) = launch(targets.run_wrapped_in_hook, 1, args={"hook": hook}).wait()
    (refused,) = rank.of("refused")
    assert "wrap only the outermost function" in refused["text"]
    assert "call 0, iteration 0, rank 0" in refused["position"] and rank.value == [0, 0, 1]


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("hook", "iteration", "kind"),
    [
        ("finalize", 0, ValueError),
        ("finalize", 0, RestartAbort),
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
    says = f"leaves the job: its finalize hook raised {kind.__name__}: injected"
    assert (says in ranks[rank].log) == (hook == "finalize")
    checks.went_on(ranks, without=[rank], iteration=ranks[1].entries()[-1][0])


FAILS: dict[str, Callable[[int], bool]] = {
    "once": lambda call: call == 1,
    "always": lambda call: True,
    "before each run": lambda call: call % 2 == 1,
}


def with_a_check(context: Context) -> dict[str, Any]:
    """It fails on one rank in some of its calls, which are counted from 1."""
    rank, fails, kind = context.args["rank"], FAILS[context.args["fails"]], context.args["kind"]
    calls = itertools.count(1)

    def check(state: Any) -> Any:
        if state.initial_rank == rank and fails(next(calls)):
            if kind is FrozenInstanceError:
                state.rank = 7
            raise kind("bad memory")
        return state

    return {**KILLING, "health_check": check, "max_repeats": 3}


def run_checked(context: Context) -> Any:
    try:
        return targets.run_train(context)
    except BaseException as error:
        context.emit("cause", type=type(error.__cause__).__name__)
        raise


@pytest.mark.parametrize("rank", [0, 2])
def test_a_check_that_fails_once_costs_one_restart(launch, rank):
    args = {"rank": rank, "fails": "once", "kind": ValueError}
    ranks = launch(run_checked, 3, args=args, wrapper=with_a_check).wait()
    checks.went_on(ranks)
    assert "ValueError: bad memory" in ranks[0].log


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("kind", [ValueError, HealthCheckError, FrozenInstanceError])
def test_a_rank_leaves_whose_check_fails_again(launch, kind, rank):
    """The last one writes to the state."""
    args = {"rank": rank, "fails": "always", "kind": kind}
    ranks = launch(run_checked, 3, args=args, wrapper=with_a_check).wait()
    checks.failed(ranks, {rank: "HealthCheckError"})
    assert ranks[rank].message.startswith(f"this rank is not fit to go on: {kind.__name__}: ")
    assert [cause["type"] for cause in ranks[rank].of("cause")] == [kind.__name__]
    checks.went_on(ranks, without=[rank])


def test_a_check_that_fails_before_every_run_is_a_repeat(launch):
    args = {"rank": 1, "fails": "before each run", "kind": ValueError}
    ranks = launch(run_checked, 2, args=args, wrapper=with_a_check).wait()
    checks.failed(ranks, dict.fromkeys(range(2), "RestartAbort"))
    assert "ValueError: bad memory" in ranks[0].message
    assert ranks[1].entries() == []


REQUESTS = 4


def asks(context: Context, call: Any) -> list[int]:
    rank, size = targets.place_in_world()
    if call.iteration < REQUESTS and rank == 1:
        raise RankShouldRestart("the loss is too high")
    if call.iteration < REQUESTS:
        threading.Event().wait()
    return [call.iteration, rank, size]


def run_asks(context: Context) -> Any:
    return context.wrap(asks)()


def test_a_function_that_asks_for_a_restart(launch):
    """As often as it likes: that is no error."""
    ranks = launch(run_asks, 2, wrapper={**KILLING, "max_repeats": 2}).wait()
    checks.went_on(ranks, iteration=REQUESTS)
    assert ranks[0].log.count("rank 1 asked for a restart: the loss is too high [") == REQUESTS
    assert "Traceback" not in ranks[1].log


def initialize_that_asks(state: Any) -> Any:
    if state.iteration == 0 and state.rank == 1:
        raise RankShouldRestart
    return state


def test_a_hook_that_asks_for_a_restart(launch):
    ranks = launch(targets.run_train, 2, wrapper={**KILLING, "initialize": initialize_that_asks}).wait()
    checks.went_on(ranks)
    assert "rank 1 asked for a restart [" in ranks[0].log


@pytest.mark.parametrize("kind", [ValueError, RestartAbort], ids=lambda kind: kind.__name__)
def test_errors_of_abort_hooks_are_logged_and_stop_nothing(launch, kind):
    ranks = launch(targets.run_train, 3, faults=FIRST | {At(rank, 0, "abort"): Raise(kind) for rank in range(3)}).wait()
    checks.went_on(ranks)
    assert all("injected" in rank.log for rank in ranks)


def with_an_abort_that_fails(context: Context) -> dict[str, Any]:
    def fails(state: Any) -> Any:
        raise OSError("disk full")

    return {**PATIENT, "abort": Compose(AbortTorchDistributed(), fails)}


def test_an_abort_whose_first_part_always_raises(launch):
    """The other part frees the groups, also those of a rank that leaves."""
    faults = FIRST | {At(2, iteration=1, step=1): Raise(), At(2, 1, "finalize"): Raise()}
    ranks = launch(targets.run_train, 3, faults=faults, wrapper=with_an_abort_that_fails).wait()
    assert (ranks[2].exception, ranks[2].exitcode) == ("ValueError", 0)
    checks.went_on(ranks, without=[2], iteration=2)
    assert all("disk full" in rank.log for rank in ranks)


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
