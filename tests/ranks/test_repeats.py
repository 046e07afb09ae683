"""The same error again and again: the restart waits, and the job ends, or continues where it made progress once."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from inprocess import FrozenState, RestartAbort
from inprocess.initialize import RetryController
from tests.harness import At, Raise
from tests.harness.child import Context
from tests.harness.launch import HASTY, KILLING, PATIENT

from . import checks, targets
from .test_joining import GROW

#: seconds; far longer than a test runs
FOR_EVER = 1000.0


# --- in the ranks -----------------------------------------------------------------------------------------------


def again(context: Context, call: Any) -> list[int]:
    """Up to iteration ``until`` the ranks in ``raising`` raise at the same line. Returns [iteration, rank, size]."""
    rank, size = targets.place_in_world()
    args = context.args
    for _ in range(call.iteration if args.get("moves on") else 2):
        call.ping()
    if call.iteration == args.get("commits"):
        with call.atomic():
            pass
    if call.iteration < args["until"] and args.get("leaves") != "atomic":
        if context.rank in args["raising"]:
            not_defined  # type: ignore[name-defined]  # noqa: F821
        threading.Event().wait()
    elif call.iteration < args["until"]:
        with call.atomic():
            not_defined  # type: ignore[name-defined]  # noqa: F821
    return [call.iteration, rank, size]


def run_again(context: Context) -> Any:
    try:
        return context.wrap(again)()
    except RestartAbort as error:
        context.emit("cause", type=type(error.__cause__).__name__, words=str(error.__cause__))
        raise


def rank_0_ends(state: FrozenState) -> None:
    if state.iteration == 2:
        if state.rank == 0:
            raise RestartAbort("no more")
        threading.Event().wait()


class Pauses(logging.Handler):
    """Reports that the restart waits."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    def emit(self, record: logging.LogRecord) -> None:
        if "the restart waits" in record.getMessage():
            self._context.emit("pause")


def run_long_pauses(context: Context) -> Any:
    """A pause lasts until something ends it."""
    from inprocess.call.start import Starting

    paused = Starting._paused
    Starting._paused = lambda start, seconds: paused(start, FOR_EVER)  # type: ignore[method-assign]
    logger = logging.getLogger("inprocess")
    handler = Pauses(context)
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        return run_again(context)
    finally:
        Starting._paused = paused  # type: ignore[method-assign]
        logger.removeHandler(handler)
        logger.setLevel(level)


def initialize(state: Any) -> None:
    if state.rank == 1 and state.iteration < 8:
        raise OSError("no file")


class Thing:
    """What an error or a frame holds."""


class Holding(Exception):
    def __init__(self, thing: Thing) -> None:
        super().__init__(thing)
        self.thing = thing


_alive: list[weakref.ref[Thing]] = []


def holding(context: Context, call: Any) -> int:
    """What the last iteration held is gone when this one begins, without any garbage collection."""
    context.emit("alive", count=sum(ref() is not None for ref in _alive))
    if call.iteration < 3:
        local, thing = Thing(), Thing()
        _alive[:] = [weakref.ref(local), weakref.ref(thing)]
        try:
            raise Holding(Thing())
        except Holding as error:
            _alive.append(weakref.ref(error.thing))
            raise ValueError(thing) from error
    return int(call.iteration)


def run_holding(context: Context) -> Any:
    import gc

    gc.disable()
    try:
        return context.wrap(holding)()
    finally:
        gc.enable()


class Hostile(Exception):
    """Its words raise."""

    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__(kind)

    def __str__(self) -> str:
        raise self.args[0]


def hostile(context: Context, call: Any) -> list[int]:
    rank, size = targets.place_in_world()
    if call.iteration == 0:
        if rank == 1:
            raise Hostile(context.args["kind"])
        threading.Event().wait()
    return [call.iteration, rank, size]


def run_hostile(context: Context) -> Any:
    return context.wrap(hostile)()


def hanging(context: Context, call: Any) -> list[int]:
    """Up to iteration ``until`` rank 1 waits at one line for what never comes, and the others wait for it; where
    ``all`` is set, all of them wait in a collective that a rank is missing in."""
    rank, size = targets.place_in_world()
    if context.args.get("pings"):
        call.ping()
    dist.init_process_group("gloo", timeout=targets.LONG)
    if call.iteration < context.args["until"]:
        if rank == 1 and not context.args.get("all"):
            threading.Event().wait()
        if rank != 0:
            dist.barrier()
        dist.recv(torch.ones(1), src=1)
    dist.destroy_process_group()
    return [call.iteration, rank, size]


def run_hanging(context: Context) -> Any:
    """Where a soft timeout is longer than what counts as progress, as with the default options."""
    from inprocess.call import user_code

    long_inside, user_code.LONG_INSIDE = user_code.LONG_INSIDE, 1.0
    try:
        return context.wrap(hanging)()
    finally:
        user_code.LONG_INSIDE = long_inside


# --- the tests --------------------------------------------------------------------------------------------------


def iterations(ranks: Any) -> set[int]:
    """Those that any of them entered; on a busy machine a rank may be interrupted before it does."""
    return {iteration for rank in ranks for iteration, _, _ in rank.entries()}


def test_the_job_ends_on_every_rank(launch):
    wrapper = PATIENT | {"max_repeats": 5}
    ranks = launch(run_again, 3, wrapper=wrapper, args={"until": 99, "raising": [1]}).wait()
    checks.failed(ranks, dict.fromkeys(range(3), "RestartAbort"))
    assert iterations(ranks) == set(range(5))
    causes = [rank.of("cause")[0]["type"] for rank in ranks]
    assert causes == ["NoneType", "NameError", "NoneType"]
    for rank in ranks:
        for part in (
            "5 times in a row",
            "max_repeats=5",
            "rank 1",
            "NameError: name 'not_defined'",
            "test_repeats.py:",
        ):
            assert part in rank.message
    cause = "NameError: name 'not_defined' is not defined\n\nThe above exception was the direct cause"
    assert cause in ranks[1].log, "the error's own traceback is printed before that of the RestartAbort"


def test_the_log_has_the_traceback_twice(launch):
    """Of a new error, and of the first repeat; both on the rank that raised it. The pauses are said on the first."""
    wrapper = PATIENT | {"max_repeats": 5}
    ranks = launch(run_again, 2, wrapper=wrapper, args={"until": 99, "raising": [1]}).wait()
    assert ranks[1].log.count("an error that is new in this call") == 1
    assert ranks[1].log.count("the same error again, 2 times in a row") == 1
    assert ranks[1].log.count("in again\n    not_defined") == 3, "and once at the end"
    assert "not_defined  # type" not in ranks[0].log
    waits = [line for line in ranks[0].log.splitlines() if "the restart waits" in line]
    assert [line.partition("waits ")[2].rstrip() for line in waits] == ["0.05 s", "0.1 s"]
    assert "the restart waits" not in ranks[1].log


def test_all_ranks_raise_it(launch):
    """Some are interrupted before they raise, others the next time."""
    wrapper = PATIENT | {"max_repeats": 6}
    ranks = launch(run_again, 4, wrapper=wrapper, args={"until": 99, "raising": [0, 1, 2, 3]}).wait()
    checks.failed(ranks, dict.fromkeys(range(4), "RestartAbort"))
    assert iterations(ranks) == set(range(6))
    assert "NameError" in [rank.of("cause")[0]["type"] for rank in ranks]


def test_initialize_raises_it(launch):
    wrapper = PATIENT | {"max_repeats": 4, "initialize": initialize}
    ranks = launch(run_again, 2, wrapper=wrapper, args={"until": 0, "raising": []}).wait()
    checks.failed(ranks, dict.fromkeys(range(2), "RestartAbort"))
    assert [rank.of("cause")[0]["type"] for rank in ranks] == ["NoneType", "OSError"]


@pytest.mark.parametrize(
    "args",
    [{"moves on": True}, {"leaves": "atomic", "commits": 99}],
    ids=["at another step each time", "max_repeats=None"],
)
def test_what_is_no_repeat(launch, args):
    limit = None if "leaves" in args else 3
    args = {"until": 6, "raising": [1], **args}
    ranks = launch(run_again, 2, wrapper=PATIENT | {"max_repeats": limit}, args=args).wait()
    checks.went_on(ranks, iteration=6)
    assert not any("the same error" in rank.log for rank in ranks)


def test_an_atomic_that_an_error_left_is_no_progress(launch):
    wrapper = PATIENT | {"max_repeats": 3}
    ranks = launch(run_again, 1, wrapper=wrapper, args={"until": 99, "raising": [0], "leaves": "atomic"}).wait()
    checks.failed(ranks, {0: "RestartAbort"})


def test_a_job_that_made_progress_continues(launch):
    """With the longest pause, which is longer than soft_timeout and hard_timeout, and no hang."""
    wrapper = KILLING | {"soft_timeout": 1, "hard_timeout": 3, "max_repeats": 2}
    args = {"until": 3, "raising": [1], "commits": 0}
    ranks = launch(run_again, 3, wrapper=wrapper, args=args).wait()
    checks.went_on(ranks, iteration=3)
    assert "the restart waits 5 s (max_repeats=2 is reached; the job continues, since it made progress" in ranks[0].log


@pytest.mark.parametrize("event", ["a death", "a process that joins", "Ctrl-C"])
def test_any_event_ends_a_pause(launch, event):
    """It would last for longer than the test."""
    args = {"until": 3, "raising": [0], "commits": 0}
    run = launch(run_long_pauses, 3, wrapper=PATIENT | {"max_repeats": 2}, args=args)
    run.wait_event("pause", count=3)
    victim = run.ranks[2].process.pid
    if event == "a process that joins":
        run.start_another(3, env={**GROW, "WORLD_SIZE": "4"})
        ranks = run.wait()
        assert sorted(rank.value for rank in ranks) == [[4, place, 4] for place in range(4)]
        return
    os.kill(victim, signal.SIGKILL if event == "a death" else signal.SIGINT)
    ranks = run.wait()
    checks.went_on(ranks, without=[2], iteration=4)
    assert ranks[2].exception == (None if event == "a death" else "KeyboardInterrupt")


def test_max_iterations_names_the_error(launch):
    wrapper = PATIENT | {"initialize": RetryController(max_iterations=2)}
    ranks = launch(run_again, 2, wrapper=wrapper, args={"until": 99, "raising": [1]}).wait()
    checks.failed(ranks, dict.fromkeys(range(2), "RestartAbort"))
    assert "max_iterations=2" in ranks[1].message
    assert [rank.of("cause")[0]["type"] for rank in ranks] == ["NoneType", "NameError"]


def test_another_rank_ends_the_job_and_the_error_is_named(launch):
    wrapper = PATIENT | {"initialize": rank_0_ends}
    ranks = launch(run_again, 2, wrapper=wrapper, args={"until": 99, "raising": [1]}).wait()
    checks.failed(ranks, dict.fromkeys(range(2), "RestartAbort"))
    assert "rank 0: initialize raised RestartAbort: no more" in ranks[1].message
    assert [rank.of("cause")[0]["type"] for rank in ranks] == ["NoneType", "NameError"]


def test_no_error_is_kept_while_the_function_runs(launch):
    (rank,) = launch(run_holding, 1).wait()
    assert rank.value == 3
    assert [event["count"] for event in rank.of("alive")] == [0] * 4


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit], ids=lambda kind: kind.__name__)
def test_words_that_raise(launch, kind):
    """The error restarts everybody, as any other."""
    ranks = launch(run_hostile, 2, args={"kind": kind}).wait()
    checks.went_on(ranks)
    assert f"Hostile: (its __str__ raises {kind.__name__})" in ranks[0].log


def test_ctrl_c_in_words_takes_its_rank_out(launch):
    """What `__str__` raises then comes from outside."""
    ranks = launch(run_hostile, 2, args={"kind": KeyboardInterrupt}).wait()
    checks.failed(ranks, {1: "KeyboardInterrupt"})
    checks.went_on(ranks, without=[1])


def test_an_error_is_new_once(launch):
    """Two errors, each twice, with others between them."""
    faults = {At(0, iteration, step=step): Raise() for iteration, step in enumerate((1, 2, 1, 2))}
    ranks = launch(targets.run_train, 2, faults=faults).wait()
    checks.went_on(ranks, iteration=4)
    assert ranks[0].log.count("an error that is new in this call") == 1  # one line of the harness raises them all
    assert "the same error" not in ranks[0].log


@pytest.mark.parametrize("everybody", [False, True], ids=["one hangs", "all wait"])
def test_the_third_hang_before_the_first_ping_ends_the_job(launch, everybody):
    ranks = launch(run_hanging, 3, wrapper=HASTY, args={"until": 99, "all": everybody}).wait()
    checks.failed(ranks, dict.fromkeys(range(3), "RestartAbort"))
    assert iterations(ranks) >= set(range(3))
    where = (
        r"all 3 ranks waited for others: .*" if everybody else r"rank 1 was at test_repeats\.py:\d+ in hanging; 2 .*"
    )
    for rank in ranks:
        said = (
            rf"the same hang 3 times in a row before the first ping\(\), .*: no progress for 2 s .*; {where}raise soft"
        )
        assert re.search(said, rank.message), rank.message
    assert ranks[0].log.count("the same hang again, 2 times in a row") == 1


def test_hangs_after_a_ping_do_not_count(launch):
    ranks = launch(run_hanging, 2, wrapper=HASTY, args={"until": 3, "pings": True}).wait()
    checks.went_on(ranks, iteration=3)
    assert not any("the same hang" in rank.log for rank in ranks)
