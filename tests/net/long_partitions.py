"""All partitions: unplugged, cut in one direction, lossy, slow, paused, split. `nox -s partitions` runs them."""

from __future__ import annotations

import signal
import time

import pytest

from inprocess.testing.switch import Wire
from tests.harness import At, Raise, Stop
from tests.ranks import checks

from . import hostwise, targets
from .times import ALONE, SLOW, TOLERANT, WATCHFUL

BODIES = [targets.run_together, targets.run_apart]


# --- unplugged


@pytest.mark.parametrize("target", BODIES)
@pytest.mark.parametrize("victim", [1, 2])
def test_unplugged_for_good(start, shared, target, victim):
    run, switch = start(target, [0, 1, 2])
    cut = switch.unplug(victim)
    run.wait_event("enter", count=2, iteration=1)
    hostwise.judge_the_lost(run, shared, [victim], cut, "unplugged")


@pytest.mark.parametrize("target", BODIES)
def test_plugged_in_again_too_late(start, shared, target):
    """It comes back while the others run without it, and stays out."""
    run, switch = start(target, [0, 1, 2])
    cut = switch.unplug(2)
    run.wait_event("enter", count=2, iteration=1)
    switch.plug_in(2)
    run.wait_event("ended")
    hostwise.judge_the_lost(run, shared, [2], cut, "unplugged, plugged in again")


def test_two_ranks_on_each_host(start, shared):
    """Both ranks of a host go together, in one restart or in two."""
    run, switch = start(targets.run_together, [0, 0, 1, 1])
    cut = switch.unplug(1)
    run.wait_event("enter", count=2, world_size=2)
    hostwise.judge_the_lost(run, shared, [2, 3], cut, "a host with two ranks unplugged", restarts=None)


# --- the side without the store


@pytest.mark.parametrize("target", BODIES)
def test_the_stores_host_unplugged(start, shared, target):
    """The others are more than half, so they go on; it hears less than half, so it ends with a clear error."""
    run, switch = start(target, [0, 1, 2, 3], wrapper=SLOW)
    cut = switch.unplug(0)
    run.wait_event("enter", count=3, iteration=1, world_size=3, deadline=60)
    hostwise.judge_the_lost(run, shared, [0], cut, "the store's host unplugged")


@pytest.mark.parametrize("target", BODIES)
def test_the_stores_host_plugged_in_again_too_late(start, shared, target):
    run, switch = start(target, [0, 1, 2], wrapper=SLOW)
    cut = switch.unplug(0)
    run.wait_event("enter", count=2, iteration=1, world_size=2, deadline=60)
    switch.plug_in(0)
    run.wait_event("ended")
    hostwise.judge_the_lost(run, shared, [0], cut, "the store's host unplugged, plugged in again")


def test_the_stores_host_with_half_of_the_others(start, shared):
    """Three hosts of five are cut off together: they are more than half."""
    run, switch = start(targets.run_together, [0, 1, 2, 3, 4], wrapper=SLOW)
    cut = switch.split([0, 1])
    run.wait_event("enter", count=3, iteration=1, world_size=3, deadline=60)
    hostwise.judge_the_lost(run, shared, [0, 1], cut, "the store's host and another one cut off")


def test_each_host_alone(start, shared):
    """Nobody meets more than half: everybody ends with a clear error."""
    run, switch = start(targets.run_together, [0, 1, 2])
    for host in (0, 1, 2):
        switch.unplug(host)
    ranks = run.wait(60)
    hostwise.stopped(ranks, [0, 1, 2])
    assert all(iteration == 0 for rank in ranks for iteration, _, _ in rank.entries())


@pytest.mark.parametrize("target", BODIES)
def test_the_stores_host_unplugged_without_standbys(start, shared, target):
    """It is the side with the store, so it goes on, alone; all others end with a clear error."""
    run, switch = start(target, [0, 1, 2], wrapper=ALONE)
    cut = switch.unplug(0)
    run.wait_event("enter", iteration=1, world_size=1)
    hostwise.judge_the_lost(run, shared, [1, 2], cut, "the store's host unplugged")


def test_the_stores_host_unplugged_where_one_rank_is_too_few(start, shared):
    """With RetryController(min_world_size=2) everybody ends with a clear error."""
    run, switch = start(targets.run_together, [0, 1, 2], wrapper=targets.at_least_two_without_standbys)
    switch.unplug(0)
    ranks = run.wait()
    hostwise.left_by_itself(ranks, [0], "RestartAbort")
    hostwise.stopped(ranks, [1, 2])
    assert "min_world_size" in ranks[0].message


@pytest.mark.parametrize("target", BODIES)
def test_split_in_the_middle(start, shared, target):
    """Two hosts here, two hosts there: one job goes on, where the store is, and no second one."""
    run, switch = start(target, [0, 1, 2, 3])
    cut = switch.split([2, 3])
    run.wait_event("enter", count=2, world_size=2)
    hostwise.judge_the_lost(run, shared, [2, 3], cut, "split", restarts=None)


# --- one direction


@pytest.mark.parametrize("target", BODIES)
@pytest.mark.parametrize("pair", [(2, 0), (0, 2)], ids=["to the store", "from the store"])
def test_one_direction_is_lost(start, shared, target, pair):
    """The lost one's monitor stands by for the rank whose end it cannot see, so it outlives its own for a while."""
    run, switch = start(target, [0, 1, 2], args={"settle": 4 * (WATCHFUL["heartbeat_timeout"] + 2)})
    switch.set(Wire(cut=True), [pair])
    cut = time.monotonic()
    run.wait_event("enter", count=2, iteration=1)
    hostwise.judge_the_lost(run, shared, [2], cut, "one direction lost")


# --- bad wires


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "wire", [Wire(loss=0.3), Wire(delay=0.05), Wire(loss=0.3, delay=0.05)], ids=["loss", "delay", "loss and delay"]
)
def test_bad_wires(start, shared, wire):
    """Two restarts over wires that lose three packets of ten, or take 50 ms each way: the right end, nobody lost."""
    faults = {At(rank, iteration, step=5): Raise() for iteration, rank in enumerate([1, 0])}
    more = {"faults": faults, "wrapper": TOLERANT, "args": {"leave_together": True}}
    run, switch = start(targets.run_together, [0, 1], seed=7, **more)
    begin = time.monotonic()
    switch.set(wire)
    run.wait_event("enter", count=2, iteration=2, deadline=350)
    shared.finish()
    ranks = run.wait(350)
    checks.went_on(ranks, iteration=2)
    assert wire.loss == 0.0 or sum(switch.dropped.values()) > 0.2 * sum(switch.passed.values())
    print(f"{wire}: {time.monotonic() - begin:.1f} s, {switch.dropped} of {switch.passed} packets lost")


# --- paused


@pytest.mark.parametrize("target", BODIES)
def test_paused_and_woken_after_the_others_went_on(start, shared, target):
    """Training process and monitor wake at once: the function may get as far as its monitor lets it, and writes
    nothing."""
    run, _ = start(target, [0, 1, 2])
    pids = hostwise.processes(run, 1)
    hostwise.send(pids, signal.SIGSTOP)
    paused = time.monotonic()
    run.wait_event("enter", count=2, iteration=1)
    before = shared.writes(1)
    woken = time.monotonic()
    hostwise.send(pids, signal.SIGCONT)
    run.wait_event("ended")
    shared.finish()
    ranks = run.wait(fenced=[1])
    checks.went_on(ranks, without=[1])
    hostwise.killed(ranks, [1])
    assert shared.writes(1) == before
    hostwise.tell("paused", ranks, paused, [1])
    print(f"its function ran {max(0.0, shared.last_ran(1) - woken) * 1e3:.3f} ms after waking")


@pytest.mark.parametrize("target", BODIES)
def test_paused_and_woken_before_its_monitor(start, shared, target):
    run, _ = start(target, [0, 1, 2])
    hostwise.wake_before_its_monitor(run, shared, 2)


def test_paused_before_its_function_began(start, shared):
    """It had agreed to the iteration and stood still just before its function: it never enters it."""
    run, _ = start(targets.run_apart, [0, 1, 2], busy=2, faults={At(1, 0, "initialize"): Stop()})
    run.wait_event("fault")
    pids = hostwise.processes(run, 1)
    # not the training process: it stops itself, and would do so again if it was stopped just before
    hostwise.send(pids[1:], signal.SIGSTOP)
    run.wait_event("enter", count=2, iteration=1)
    hostwise.send(pids[:1], signal.SIGCONT)
    run.wait_event("ended")
    hostwise.send(pids[1:], signal.SIGCONT)
    shared.finish()
    ranks = run.wait()
    checks.went_on(ranks, without=[1])
    hostwise.killed(ranks, [1])
    assert ranks[1].entries() == [] and shared.writes(1) == []


def test_its_monitor_alone_stands_still(start, shared):
    """It is replaced before the others miss its heartbeats."""
    run, _ = start(targets.run_apart, [0, 1, 2], wrapper=SLOW)
    monitor = hostwise.processes(run, 1)[1:]
    hostwise.send(monitor, signal.SIGSTOP)
    time.sleep(1.2 * SLOW["heartbeat_timeout"])  # nothing happens, for longer than it takes to be given up
    shared.finish()
    checks.went_on(run.wait(), iteration=0)


@pytest.mark.parametrize("target", BODIES)
def test_the_monitor_with_the_store_stands_still(start, shared, target):
    """The store counts as lost; all go on with another one, the rank of that monitor too: it kills it and has a new
    one."""
    run, _ = start(target, [0, 1, 2])
    monitor = hostwise.processes(run, 0)[1:]
    hostwise.send(monitor, signal.SIGSTOP)
    run.wait_event("enter", count=3, iteration=1, world_size=3)
    shared.finish()
    checks.went_on(run.wait())


@pytest.mark.parametrize("target", BODIES)
def test_the_monitor_with_the_store_stands_still_without_standbys(start, shared, target):
    """Nobody can agree on anything: every function is stopped by its own lease, that of the store's host too."""
    run, _ = start(target, [0, 1, 2], wrapper=ALONE)
    monitor = hostwise.processes(run, 0)[1:]
    hostwise.send(monitor, signal.SIGSTOP)
    stopped = time.monotonic()
    run.wait_event("ended", count=3)
    hostwise.send(monitor, signal.SIGCONT)
    ranks = run.wait()
    hostwise.killed(ranks, [0, 1, 2])
    assert max(shared.last_ran(rank) for rank in range(3)) < stopped + WATCHFUL["heartbeat_timeout"]


def test_no_function_before_its_first_heartbeat(start, shared):
    """Its monitor stands still from its start: without a heartbeat there is no lease that would stop this rank when
    the others give it up, so its function does not begin."""
    run, _ = start(targets.run_with_a_stopped_monitor, [0, 1, 2], busy=0)
    run.wait_event("enter", count=2, iteration=1)
    hostwise.send(hostwise.processes(run, 1)[1:], signal.SIGCONT)
    run.wait_event("ended")
    shared.finish()
    ranks = run.wait()
    checks.went_on(ranks, without=[1])
    hostwise.left_by_itself(ranks, [1], "Fenced")
    assert [rank.entries()[0][0] for rank in ranks if rank.rank != 1] == [1, 1] and not ranks[1].entries()


def test_cut_off_and_gone_before_it_is_killed(start, shared):
    """With a longer timeout there is time between the loss of the store, noticed by the kernel, and the kill."""
    run, switch = start(targets.run_together, [0, 1, 2], wrapper=SLOW)
    cut = switch.unplug(2)
    run.wait_event("enter", count=2, iteration=1)
    shared.finish()
    ranks = run.wait(60)
    checks.went_on(ranks, without=[2])
    hostwise.left_by_itself(ranks, [2], "StoreLost")
    assert "cannot be reached" in ranks[2].message
    hostwise.gave_up(ranks, shared, [2])
    hostwise.tell("unplugged, heartbeat_timeout=12", ranks, cut, [2])


def test_a_lost_host_is_replaced_by_another_one(start, shared):
    """It is not let in before the lost one has been given up; and that one never runs beside it."""
    run, switch = start(targets.run_apart, [0, 1, 2], later=[0, 1, 3])
    switch.unplug(2)
    run.start_another(2, place=run.later)
    run.wait_event("enter", count=4, world_size=3)  # the lost one's of the beginning among them
    shared.finish()
    ranks = run.wait()
    (iteration,) = {ranks[number].value[0] for number in (0, 1, 3)}
    assert [ranks[number].value for number in (0, 1, 3)] == [[iteration, rank, 3] for rank in range(3)]
    hostwise.stopped(ranks, [2])
    assert shared.last_ran(2) >= hostwise.entered(ranks[3:], iteration)  # it is the new one's
    assert max(entry[0] for entry in ranks[2].entries()) == 0


def test_a_host_that_comes_back_after_it_was_replaced(start, shared):
    """It finds itself given up, and its place taken by another process."""
    run, switch = start(targets.run_apart, [0, 1, 2], later=[0, 1, 3])
    switch.unplug(2)
    run.start_another(2, place=run.later)
    run.wait_event("enter", count=4, world_size=3)
    switch.plug_in(2)
    run.wait_event("ended")
    shared.finish()
    ranks = run.wait()
    assert [ranks[number].value[1:] for number in (0, 1, 3)] == [[rank, 3] for rank in range(3)]
    assert max(entry[0] for entry in ranks[2].entries()) == 0


def test_paused_for_a_moment(start, shared):
    """Half as long as it takes to be given up: nothing happens."""
    run, _ = start(targets.run_together, [0, 1, 2])
    pids = hostwise.processes(run, 1)
    hostwise.send(pids, signal.SIGSTOP)
    time.sleep(WATCHFUL["heartbeat_timeout"] / 2)  # the pause itself is the fault
    hostwise.send(pids, signal.SIGCONT)
    shared.finish()
    checks.went_on(run.wait(), iteration=0)
