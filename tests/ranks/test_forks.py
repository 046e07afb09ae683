"""A rank forks a process that comes back out of the function, or of a hook: it ends there, and nobody hears of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from inprocess import CallWrapper, Wrapper
from inprocess.exception import RestartError
from inprocess.monitor.board import ATOMIC, PING, SOFT, UNHANG
from tests.harness import When
from tests.harness.child import STATE_HOOKS, Context

from . import targets

#: what a forked process does -> its exit status, and what it writes to standard error
ENDS: dict[str, tuple[int, str]] = {
    "return": (0, ""),
    "raise": (1, "ValueError: of the child"),
    "exit": (0, ""),
    "exit 3": (3, ""),
    "exit 256": (0, ""),
    "exit text": (1, "this is the end\n"),
    "interrupt": (1, "KeyboardInterrupt"),
}
HOOKS = ("rank_assignment", *STATE_HOOKS)
#: slots of the board that a program writes
WRITTEN = (PING, ATOMIC, UNHANG, SOFT)


def end(how: str) -> None:
    if how == "raise":
        raise ValueError("of the child")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how.startswith("exit"):
        sys.exit({"exit": None, "exit 3": 3, "exit 256": 256, "exit text": "this is the end"}[how])


def fork() -> int:
    """As `os.fork`; the child's own events would be taken for the rank's."""
    sys.stdout.flush()
    return os.fork()


def status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_without_events(context: Context, fn: Callable[[Context, CallWrapper], Any], **options: Any) -> Any:
    """What unwinds in a child must not report to the test."""

    @Wrapper(**context.options(**options))
    def entry(call: CallWrapper) -> Any:
        return fn(context, call)

    return entry()


# --- out of the function --------------------------------------------------------------------------------------------


def run_forking(context: Context) -> Any:
    return run_without_events(context, _forking)


def _forking(context: Context, call: CallWrapper) -> Any:
    result = [call.iteration, *targets.place_in_world()]
    if call.iteration or context.rank == 0:
        context.emit("leaves")
        return result
    context.wait_for(When("leaves", 1))
    pid = fork()
    if not pid:
        end(context.args["how"])
        return result
    context.emit("child", status=status(pid))
    raise ValueError("of the rank")


@pytest.mark.parametrize("how", ENDS)
def test_a_child_that_leaves_the_function_ends(launch, how):
    """Rank 0 has returned, and rank 1 has not: its child's return must not stand for its own, nor its fault for one."""
    ranks = launch(run_forking, 2, args={"how": how}).wait()
    assert ranks.values == [[1, 0, 2], [1, 1, 2]]
    expected, text = ENDS[how]
    assert [event["status"] for event in ranks[1].of("child")] == [expected]
    assert text in ranks[1].log
    child = how in ("raise", "interrupt")
    assert ranks[1].log.count("Traceback") == 1 + child, "the rank's own is in the log as well"


# --- what it does before that ---------------------------------------------------------------------------------------


def run_busy(context: Context) -> Any:
    return run_without_events(context, _busy)


def _busy(context: Context, call: CallWrapper) -> Any:
    slots = call._board.slots
    call.ping()
    with call.section("save", 10), call.atomic():
        before = [slots[slot] for slot in WRITTEN]
        pid = fork()
        if not pid:
            _use(call)
            return "the child's"
        context.emit("child", status=status(pid))
        assert [slots[slot] for slot in WRITTEN] == before
        assert slots[ATOMIC] == 1
    assert slots[ATOMIC] == 0
    with call.atomic():
        pass
    return call.store is not None


def _use(call: CallWrapper) -> None:
    """In the child, inside the parent's sections, all that a rank's program may do with a call."""
    call.ping()
    with call.atomic(), call.disable_hang_protection(), call.section("of the child", 20):
        call.ping()
    with pytest.raises(RestartError, match="connect a torch TCPStore"):
        _ = call.store


def test_a_child_does_not_touch_the_board(launch):
    ranks = launch(run_busy, 2).wait()
    assert ranks.values == [True, True]
    assert [event["status"] for rank in ranks for event in rank.of("child")] == [0, 0]


def run_outlived(context: Context) -> Any:
    context.args["pipe"] = os.pipe()
    return run_without_events(context, _outlived)


def _outlived(context: Context, call: CallWrapper) -> Any:
    result = [call.iteration, *targets.place_in_world()]
    reading, writing = context.args["pipe"]
    if call.iteration == 0 and context.rank == 1:
        context.wait_for(When("forked", 1))
        raise ValueError("interrupts the others")
    if call.iteration == 0:
        _fork_one_that_waits(context, call)
    os.close(writing)
    os.close(reading)
    if context.rank == 0:
        context.emit("child", status=status(context.args["pid"]))
    return result


def _fork_one_that_waits(context: Context, call: CallWrapper) -> None:
    reading, writing = context.args["pipe"]
    with call.atomic():  # the abort waits until it is forked
        context.args["pid"] = fork()
        if not context.args["pid"]:
            os.close(writing)
            os.read(reading, 1)  # to the next iteration of its parent
            with call.atomic():
                call.ping()
            end(context.args["how"])
    context.emit("forked")
    targets.faults.spin()


@pytest.mark.parametrize("how", ["exit", "raise"])
def test_a_child_outlives_an_interruption(launch, how):
    """It leaves the function of iteration 0 while the rank is in iteration 1."""
    ranks = launch(run_outlived, 2, args={"how": how}).wait()
    assert ranks.values == [[1, 0, 2], [1, 1, 2]]
    assert [event["status"] for event in ranks[0].of("child")] == [ENDS[how][0]]
    assert ENDS[how][1] in ranks[0].log


# --- out of a hook --------------------------------------------------------------------------------------------------


def run_in_hooks(context: Context) -> Any:
    def forking(name: str) -> Callable[[Any], Any]:
        def hook(state: Any) -> Any:
            pid = fork()
            if pid:
                context.emit("child", hook=name, status=status(pid))
            elif context.rank:
                raise ValueError(f"of the child of {name}")
            return state

        return hook

    options = {name: forking(name) for name in HOOKS}
    try:
        return run_without_events(context, _restart_once, **options)
    except KeyboardInterrupt:
        return "left"


def _restart_once(context: Context, call: CallWrapper) -> Any:
    """Nobody is interrupted in a hook, where it would leave a child that nobody waits for."""
    entered = f"enters {call.iteration}"
    context.emit(entered)
    ends = {0: 0, 1: 2}.get(call.iteration)
    if context.rank == ends:
        context.wait_for(When(entered, 2))
        raise KeyboardInterrupt if ends else ValueError("of the rank")
    if ends is not None:
        targets.faults.spin()
    return call.iteration


def test_a_child_that_leaves_a_hook_ends(launch):
    """Rank 0's children return, the others' raise; rank 2 leaves in the end."""
    ranks = launch(run_in_hooks, 3).wait()
    assert ranks[2].value == "left"
    assert ranks[0].value == ranks[1].value != 0
    for rank in ranks:
        assert {event["status"] for event in rank.of("child")} == {int(rank.rank > 0)}
        last = "terminate" if rank.rank == 2 else "completion"
        assert {event["hook"] for event in rank.of("child")} == {*HOOKS} - {"completion", "terminate"} | {last}
        assert ("of the child of finalize" in rank.log) == (rank.rank > 0)
