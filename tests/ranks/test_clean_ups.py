"""An error whose clean-up waits for the other ranks: they restart soon, and everybody learns of the error."""

from __future__ import annotations

import contextlib
import datetime
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from inprocess import RankShouldRestart, RestartAbort
from inprocess.collectives.gloo import shutdown_gloo_connections
from inprocess.testing.coordinates import When
from tests.harness.child import Context
from tests.harness.launch import HASTY, PATIENT

from . import checks, targets
from .test_reports import report

#: seconds: the others come so late, while a handler waits for them; longer than anything waits before it tells
LATE_S = 3.0
#: seconds: an error is known everywhere within this, long before `soft_timeout`
SOON_S = 10.0


# --- in the ranks -------------------------------------------------------------------------------------------------


def step(context: Context, call: Any, number: int) -> None:
    call.ping()
    if context.rank == 1 and call.iteration < context.args.get("until", 1) and number == 2:
        raise context.args.get("kind", ZeroDivisionError)("the loss scale became 0")
    targets.check_sum(targets.place_in_world()[1])


def steps(context: Context, call: Any) -> list[int]:
    dist.init_process_group("gloo", timeout=targets.LONG)
    for number in range(4):
        step(context, call, number)
    return [call.iteration, *targets.place_in_world()]


def close() -> None:
    dist.barrier()
    dist.destroy_process_group()


def in_finally(context: Context, call: Any) -> list[int]:
    try:
        return steps(context, call)
    finally:
        close()


def in_a_context(context: Context, call: Any) -> list[int]:
    """What that answers nobody knows before it has ended."""
    with contextlib.nullcontext():
        return in_finally(context, call)


def swallowing(context: Context, call: Any) -> list[int]:
    """The handler waits for the others, which have taken it for a step."""
    try:
        value = steps(context, call)
    except ZeroDivisionError:
        dist.barrier()
        return []
    close()
    return value


def retrying(context: Context, call: Any) -> list[int]:
    """A step that failed is tried again, and the others come late to what they do together."""
    dist.init_process_group("gloo", timeout=targets.LONG)
    for number in range(4):
        tensor = torch.ones(1)
        try:
            try:
                if context.rank == 1 and number == 2:
                    raise MemoryError("a large batch")
            finally:
                late(context, number)
                dist.all_reduce(tensor)
        except MemoryError:
            late(context, number)
            dist.all_reduce(tensor)
            continue
        if number == 2:
            late(context, number)
            dist.all_reduce(tensor)
    close()
    return [call.iteration, *targets.place_in_world()]


def late(context: Context, number: int) -> None:
    if context.rank != 1 and number == 2:
        time.sleep(LATE_S)  # computes


def hanging(context: Context, call: Any) -> list[int]:
    """One rank handles an error and waits; another one hangs."""
    dist.init_process_group("gloo", timeout=targets.LONG)
    if call.iteration == 0:
        if context.rank == 0:
            threading.Event().wait()
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            dist.barrier()
    close()
    return [call.iteration, *targets.place_in_world()]


def cleaning_up_late(context: Context, call: Any) -> list[int]:
    """The interruption itself is on its way out, and its clean-up waits; nothing ends that, as nothing is aborted."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=LATE_S))
    if call.iteration == 0:
        if context.rank == 1:
            context.wait_for(When("ready", 1))  # its group is made: nothing is aborted, so its number is that of all
            raise ZeroDivisionError("the loss scale became 0")
        try:
            context.emit("ready")
            threading.Event().wait()
        finally:
            dist.barrier()
    close()
    return [call.iteration, *targets.place_in_world()]


def closed_first(context: Context, call: Any) -> list[int]:
    """A rank sees that its connections are closed, and handles that when it hears that another one failed."""
    dist.init_process_group("gloo", timeout=targets.LONG)
    if call.iteration == 0:
        if context.rank == 1:
            context.wait_for(When("in flight", 1))
            raise ZeroDivisionError("the loss scale became 0")
        try:
            shutdown_gloo_connections(2)
            targets.check_sum(2)
        finally:
            context.emit("in flight")
            threading.Event().wait()
    close()
    return [call.iteration, *targets.place_in_world()]


BODIES: dict[str, Callable[[Context, Any], list[int]]] = {
    function.__name__: function
    for function in (in_finally, in_a_context, swallowing, retrying, hanging, cleaning_up_late, closed_first)
}


def run(context: Context) -> Any:
    def finalize(state: Any) -> Any:
        context.emit("finalized", error=repr(state.fn_exception))
        return state

    try:
        return context.wrap(BODIES[context.args["body"]], finalize=finalize)()
    except RestartAbort as error:
        context.emit("cause", words=repr(error.__cause__))
        raise


# --- the tests ----------------------------------------------------------------------------------------------------


ERROR = "ZeroDivisionError('the loss scale became 0')"


@pytest.mark.parametrize(
    ("body", "options"), [("in_finally", PATIENT), ("in_a_context", HASTY)], ids=["sure", "unsure"]
)
def test_the_error_is_known_and_counted(launch, tmp_path: Path, body, options):
    """Each time: so the job ends. Where it is not sure that the error leaves, after `soft_timeout`."""
    options = {**options, "max_repeats": 2, "run_dir": str(tmp_path)}
    ranks = launch(run, 3, wrapper=options, args={"body": body, "until": 99}).wait()
    checks.failed(ranks, dict.fromkeys(range(3), "RestartAbort"))
    assert [rank.of("cause")[0]["words"] for rank in ranks] == ["None", ERROR, "None"]
    assert [len(rank.entries()) for rank in ranks] == [2, 2, 2]
    assert [event["error"] for event in ranks[1].of("finalized")] == [ERROR] * 2
    assert "raise context.args.get" in ranks[1].log, "its traceback"
    assert "the same error again, 2 times in a row" in ranks[1].log
    for rank in ranks:
        for part in ("the same error 2 times in a row", "rank 1", "the loss scale became 0", "test_clean_ups.py:"):
            assert part in rank.message
        assert "made no progress" not in rank.message
    restarts = [line for line in ranks[0].log.splitlines() if "restart 1: " in line]
    assert "restart 1: rank 1 raised an exception: ZeroDivisionError: the loss scale became 0" in restarts[0]
    for incident in report(tmp_path):
        told = incident.verdict
        assert (told.initial_rank, told.kind, told.also) == (1, "exception", ()), incident
        assert told.where.startswith("test_clean_ups.py:") and told.where.endswith(" step")


def test_nobody_waits_for_soft_timeout(launch):
    ranks = launch(run, 2, wrapper=PATIENT, args={"body": "in_finally"}).wait()
    checks.went_on(ranks)
    entered = [event["t"] for event in ranks[0].of("enter")]
    assert 1.0 <= entered[1] - entered[0] < SOON_S
    assert "its clean-up waits for ranks that wait for this one" in ranks[1].log
    assert ranks[1].log.count("an error that is new in this call") == 1
    (line,) = [line for line in ranks[0].log.splitlines() if "restart 1: " in line]
    seconds = re.search(r"continuing with 2 of 2 ranks; noticed after ([0-9.]+) s, restarted in", line)
    assert seconds and 1.0 <= float(seconds[1]) < SOON_S


@pytest.mark.parametrize("kind", [SystemExit, RestartAbort], ids=lambda kind: kind.__name__)
def test_a_rank_that_leaves_meets_the_others_first(launch, kind):
    ranks = launch(run, 3, wrapper=PATIENT, args={"body": "in_finally", "kind": kind}).wait()
    checks.went_on(ranks, without=[1])
    assert ranks[1].exception == kind.__name__
    entered = [event["t"] for event in ranks[0].of("enter")]
    assert entered[1] - entered[0] < SOON_S


def test_a_restart_that_is_asked_for_is_no_failure(launch):
    ranks = launch(run, 2, wrapper=PATIENT, args={"body": "in_finally", "kind": RankShouldRestart}).wait()
    checks.went_on(ranks)
    (line,) = [line for line in ranks[0].log.splitlines() if "restart 1: " in line]
    assert "restart 1: rank 1 asked for a restart: the loss scale became 0 [test_clean_ups.py:" in line
    assert "also reported" not in line


def test_a_handler_that_waits_for_late_ranks_is_left_alone(launch):
    """Twice: in `finally` below an `except` block that swallows the error, and in that."""
    ranks = launch(run, 2, wrapper=PATIENT, args={"body": "retrying"}).wait()
    checks.went_on(ranks, iteration=0)
    assert "its clean-up waits" not in ranks[1].log


def test_a_handler_for_which_nobody_comes(launch, tmp_path: Path):
    """After `soft_timeout`, with the error."""
    ranks = launch(run, 2, wrapper={**HASTY, "run_dir": str(tmp_path)}, args={"body": "swallowing"}).wait()
    checks.went_on(ranks)
    assert ranks[1].of("finalized")[0]["error"] == ERROR
    (incident,) = report(tmp_path)
    assert (incident.verdict.initial_rank, incident.verdict.kind) == (1, "exception")


def test_a_rank_that_hangs_is_named_beside_a_handler_that_waits(launch, tmp_path: Path):
    ranks = launch(run, 2, wrapper={**HASTY, "run_dir": str(tmp_path)}, args={"body": "hanging"}).wait()
    checks.went_on(ranks)
    (incident,) = report(tmp_path)
    assert (incident.verdict.initial_rank, incident.verdict.kind) == (0, "hang")
    assert "rank 0 was at test_clean_ups.py:" in ranks[0].log


def test_the_interruption_is_no_error_of_its_own(launch):
    ranks = launch(run, 2, wrapper={**PATIENT, "abort": None}, args={"body": "cleaning_up_late"}).wait()
    checks.went_on(ranks)
    (line,) = [line for line in ranks[0].log.splitlines() if "restart 1: " in line]
    assert "rank 1 raised an exception: ZeroDivisionError" in line and "also reported" not in line
    assert "its clean-up waits" not in ranks[0].log


def test_what_a_rank_saw_of_another_ones_failure_is_no_error_of_its_own(launch):
    """`FaultCounter` would count it, and take a healthy rank out."""
    ranks = launch(run, 2, wrapper=PATIENT, args={"body": "closed_first"}).wait()
    checks.went_on(ranks)
    assert [rank.of("finalized")[0]["error"] for rank in ranks] == ["None", ERROR]
