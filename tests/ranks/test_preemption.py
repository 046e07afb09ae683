"""A signal asks ranks to leave, as a scheduler does: they do after their step, in one restart, and the others go on."""

from __future__ import annotations

import os
import signal
import time
import types

import pytest

from inprocess.call.leaving import LeaveSignals
from inprocess.monitor.board import ENDING, Board
from inprocess.options import Options
from inprocess.testing import Terminate
from tests.harness import At, Kill

from . import checks, preempting

TERM = signal.SIGTERM


def steady(launch, size, wrapper=preempting.options, active=None, **more):
    """Ranks that are at work, in the first iteration."""
    run = launch(preempting.run_steady, size, wrapper=wrapper, **more)
    run.wait_event("steady", count=size if active is None else active)
    return run


def left(run, *asked):
    """All ranks, once these have left as asked, and the others have gone on without them."""
    ranks = run.wait()
    checks.failed(ranks, dict.fromkeys(asked, "Preempted"))
    checks.went_on(ranks, without=asked)
    return ranks


def hooked(rank):
    return [event["rank"] for event in rank.of("hook")]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_one_leaves(launch, victim):
    run = steady(launch, 3)
    run.kill(victim, TERM)
    ranks = left(run, victim)
    assert [hooked(rank) for rank in ranks] == [[victim] if rank.rank == victim else [] for rank in ranks]
    assert [rank.of("after")[0]["kept"] for rank in ranks] == [True, True, True]


def test_two_within_a_second_leave_in_one_restart(launch):
    run = steady(launch, 4)
    run.kill(1, TERM)
    run.wait_event("steady", count=4)
    time.sleep(0.5)  # a scheduler that walks from host to host
    run.kill(3, TERM)
    left(run, 1, 3)


def test_all_leave(launch):
    run = steady(launch, 3)
    for rank in range(3):
        run.kill(rank, TERM)
    ranks = run.wait()
    checks.failed(ranks, dict.fromkeys(range(3), "Preempted"))
    assert [hooked(rank) for rank in ranks] == [[0], [1], [2]]
    assert [len(rank.entries()) for rank in ranks] == [1, 1, 1]


def test_who_never_says_where_a_step_ends(launch):
    begin = time.monotonic()
    run = steady(launch, 2, args={"style": "silent", "options": {"leave_grace": 1000}})
    run.kill(1, TERM)
    left(run, 1)
    assert time.monotonic() - begin < 30


def test_the_grace_is_over(launch):
    """The rank waits for a lock that is never free, in a step that does not end."""
    run = steady(launch, 2, args={"style": "stuck", "odd": 1, "options": {"leave_grace": 2}})
    run.kill(1, TERM)
    left(run, 1)


def test_a_second_signal_ends_the_wait(launch):
    run = steady(launch, 2, args={"style": "stuck", "odd": 1, "handler": True, "options": {"leave_grace": 1000}})
    run.kill(1, TERM)
    run.wait_event("asked")
    run.kill(1, TERM)
    ranks = left(run, 1)
    (after,) = ranks[1].of("after")
    assert (after["got"], after["kept"]) == (2, True), "the program's own handler is called, and is back then"


def test_not_inside_atomic(launch):
    run = steady(launch, 2, args={"style": "atomic", "odd": 1, "options": {"leave_grace": 1}})
    run.wait_event("atomic_begin")
    run.kill(1, TERM)
    ranks = left(run, 1)
    assert ranks[1].of("atomic_end")


def test_the_function_raises_it_itself(launch):
    run = steady(launch, 2, args={"style": "raises", "odd": 0, "options": {"leave_grace": 30}})
    run.kill(0, TERM)
    ranks = left(run, 0)
    (event,) = [event for event in ranks[0].of("left") if "seconds" in event]
    assert 25 < event["seconds"] < 30


def test_a_forked_child_is_no_rank(launch):
    args = {"style": "fork", "odd": 1, "options": {}}
    ranks = left(launch(preempting.run_steady, 2, wrapper=preempting.options, args=args), 1)
    (event,) = ranks[1].of("child")
    assert (event["signal"], event["asked"]) == (TERM, False)


def test_a_reserve_leaves_quietly(launch):
    run = steady(launch, 3, wrapper=preempting.spare_options, active=2)
    run.kill(2, TERM)
    run.wait_event("hook", rank=2)
    run.kill(1, TERM)
    ranks = run.wait()
    checks.failed(ranks, dict.fromkeys((1, 2), "Preempted"))
    assert ranks[0].value == [1, 0, 1]


@pytest.mark.parametrize("hook", ["initialize", "rank_assignment", "finalize", "health_check"])
def test_during_a_restart(launch, hook):
    """Another rank has died; this one is asked to leave while it restarts for that."""
    faults = {At(2, step=3): Kill(), At(0, 0 if hook == "finalize" else 1, hook): Terminate()}
    args = {"interruptions": 1 if hook == "finalize" else 2}
    ranks = launch(preempting.run_steady, 3, faults=faults, wrapper=preempting.options, args=args).wait()
    checks.failed(ranks, {0: "Preempted"})
    checks.died(ranks, {2: -signal.SIGKILL})
    checks.went_on(ranks, without=[0, 2], iteration=args["interruptions"])


def test_another_rank_dies_meanwhile(launch):
    run = steady(launch, 4)
    run.kill(1, TERM)
    run.kill(2)
    ranks = run.wait()
    checks.failed(ranks, {1: "Preempted"})
    checks.died(ranks, {2: -signal.SIGKILL})
    checks.went_on(ranks, without=[1, 2])


def test_a_reserve_leaves_its_warm_up(launch):
    """At once, although it waits for nothing but its own hook."""
    args = {"options": {"warm_up": "slow"}}
    run = steady(launch, 3, wrapper=preempting.spare_options, active=2, args=args)
    run.wait_event("warming")
    run.kill(2, TERM)
    run.wait_event("hook", rank=2)
    run.kill(1, TERM)
    ranks = run.wait()
    checks.failed(ranks, dict.fromkeys((1, 2), "Preempted"))
    assert not ranks[2].of("warm") and ranks[0].value == [1, 0, 1]


def test_a_signal_without_a_name(launch):
    signum = signal.SIGRTMIN + 3
    run = steady(launch, 2, args={"options": {"leave_signals": (signum,)}})
    run.kill(1, signum)
    ranks = left(run, 1)
    assert f"signal {signum} asks this rank to leave" in ranks[1].log


def test_terminate_follows_a_preemption_hook_that_raises(launch):
    run = steady(launch, 2, args={"options": {"on_preemption": "raises"}})
    run.kill(1, TERM)
    ranks = left(run, 1)
    assert [len(rank.of("terminated")) for rank in ranks] == [0, 1]
    assert "raised ValueError: no time" in ranks[1].log


def test_none_is_asked_where_the_option_is_empty(launch):
    run = steady(launch, 2, args={"options": {"leave_signals": ()}})
    run.kill(1, TERM)
    ranks = run.wait()
    checks.died(ranks, {1: -TERM})
    checks.went_on(ranks, without=[1])


def test_no_step_is_lost_where_all_leave(launch, tmp_path):
    """A last checkpoint is written though none is due, and the next start goes on with the step behind it."""
    args = {"folder": str(tmp_path), "steps": 100_000, "report": 5, "pause": 0.01}
    run = launch(preempting.run_learning, 3, wrapper=preempting.options, args=args)
    run.wait_event("steady", count=3)
    for rank in range(3):
        run.kill(rank, TERM)
        time.sleep(0.1)  # not all at the same step
    ranks = run.wait()
    checks.failed(ranks, dict.fromkeys(range(3), "Preempted"))
    left = max(event["step"] for rank in ranks for event in rank.of("at"))
    (name,) = os.listdir(tmp_path)
    saved = int(name.removeprefix("step_"))
    assert 5 < saved <= left <= saved + 1
    again = {"folder": str(tmp_path), "steps": saved + 10, "report": 0, "pause": 0}
    ranks = launch(preempting.run_learning, 3, wrapper=preempting.options, args=again).wait()
    assert [event["step"] for rank in ranks for event in rank.of("recovered")] == [saved] * 3
    straight = {"folder": str(tmp_path / "other"), "steps": saved + 10, "report": 0, "pause": 0}
    undisturbed = launch(preempting.run_learning, 3, wrapper=preempting.options, args=straight).wait()
    assert ranks.values == undisturbed.values


def test_the_others_keep_the_step_where_one_leaves(launch, tmp_path):
    args = {"folder": str(tmp_path), "steps": 300, "report": 5, "pause": 0.01}
    run = launch(preempting.run_learning, 3, wrapper=preempting.options, args=args)
    run.wait_event("steady", count=3)
    run.kill(0, TERM)
    ranks = run.wait()
    checks.failed(ranks, {0: "Preempted"})
    (left,) = [event["step"] for event in ranks[0].of("at")]
    recovered = [rank.of("recovered") for rank in ranks[1:]]
    for first, second in recovered:
        assert first["step"] == 0 and left <= second["step"] <= left + 1, (first, second, left)
    sources = [second["source"] for _, second in recovered]
    # one was perhaps interrupted right before its commit of the step that the other one has
    assert "own memory" in sources and set(sources) <= {"own memory", "rank 0", "rank 1"}, sources


@pytest.mark.parametrize("raises", [False, True])
def test_before_the_function_nobody_else_leaves(launch, raises):
    """Its time is over while it is in ``initialize``, where other exceptions end the job for all; or it ends it."""
    args = {"slow": 1, "raises": raises, "options": {"leave_grace": 1}}
    run = launch(preempting.run_slow_start, 3, wrapper=preempting.options, args=args)
    run.wait_event("initializing")
    if not raises:
        run.kill(1, TERM)
    ranks = run.wait()
    checks.failed(ranks, {1: "Preempted"})
    assert [rank.value[1:] for rank in ranks if rank.rank != 1] == [[0, 2], [1, 2]]


@pytest.mark.parametrize("asked", [(0, 1), (1,)], ids=["all", "one"])
def test_a_signal_at_the_end_of_a_call_is_for_the_next(launch, asked):
    """The first call is over before the rank has left: the program would go on until it is killed."""
    run = launch(preempting.run_calls, 2, wrapper=preempting.options, args={"calls": 3, "asked": asked})
    ranks = run.wait()
    checks.failed(ranks, dict.fromkeys(asked, "Preempted"))
    assert [len(rank.of("completed")) for rank in ranks] == [1 if rank in asked else 3 for rank in range(2)]
    assert all("the next one leaves as it begins" in ranks[rank].log for rank in asked)


def test_a_long_hook_of_one_that_leaves_as_it_joins_does_not_hold_the_others_up(launch, tmp_path):
    """They do not know yet that it leaves, so its monitor ends it."""
    options = {"on_preemption": "long", "soft_timeout": 1, "hard_timeout": 2, "barrier_timeout": 40}
    args = {"go": str(tmp_path / "go"), "options": options}
    run = launch(preempting.run_late, 3, wrapper=preempting.options, args=args)
    run.wait_event("joins", count=2)
    run.kill(1, TERM)
    run.wait_event("long hook")
    (tmp_path / "go").touch()
    ranks = run.wait()
    checks.died(ranks, {1: -signal.SIGKILL})
    assert [len(rank.of("completed")) for rank in ranks] == [1, 0, 1]


def test_nobody_is_asked_by_the_rank_s_own_monitor():
    """Which sends SIGTERM where the program has a handler for it, and the rank does not answer."""
    signals, board = LeaveSignals(Options.build()), Board.create()
    signals._participant = types.SimpleNamespace(agents=types.SimpleNamespace(board=board))
    board.slots[ENDING] = 1
    signals._note(TERM)
    assert signals.asked is None
    board.slots[ENDING] = 0
    signals._note(TERM)
    assert signals.asked.signum == TERM
    board.close()
