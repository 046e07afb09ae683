"""Hosts that are cut off or paused, the sharpest cases: a host that was given up never runs on, never writes again.

The others are in `long_partitions.py` (`nox -s partitions`).
"""

from __future__ import annotations

from tests.ranks import checks

from . import hostwise, targets


def test_unplugged_for_good(start, shared):
    """A function that computes in Python is stopped on the lost host before it starts again on the others."""
    run, switch = start(targets.run_apart, [0, 1, 2])
    cut = switch.unplug(2)
    run.wait_event("enter", count=2, iteration=1)
    hostwise.judge_the_lost(run, shared, [2], cut, "unplugged")


def test_plugged_in_again_in_time(start, shared):
    """Nothing is lost: what was sent meanwhile arrives late, and the job is as if nothing had been."""
    run, switch = start(targets.run_together, [0, 1])
    switch.unplug(1)
    switch.wait_dropped(1, 5)
    switch.plug_in(1)
    shared.finish()
    ranks = run.wait()
    checks.went_on(ranks, iteration=0)
    assert shared.writes(0)[-1].step == shared.writes(1)[-1].step


def test_a_paused_host_that_wakes_up_before_its_monitor_writes_nothing(start, shared):
    """The function goes on where it stood, nobody kills it, and yet no checkpoint is begun."""
    run, _ = start(targets.run_apart, [0, 1, 2])
    hostwise.wake_before_its_monitor(run, shared, 1)
