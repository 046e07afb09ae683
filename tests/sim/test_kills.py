"""Exhaustive: one process is killed before, or just after the effect of, every single store operation of its life.

The life has a restart in it: member 0's function raises in the first iteration, unless said otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import pytest

from tests import sim
from tests.sim.scenario import Act, Kill, Scenario

RAISE = Act(0, "raise")


def moments(calm: Scenario, target: str, members: Iterable[int]) -> Iterator[Scenario]:
    """The calm scenario again with a kill at each operation of each member's process, before and after."""
    world = sim.run(calm)
    for member in members:
        process = (world.monitors if target == "monitor" else world.training)[member]
        assert process.operations >= 10
        for op in range(1, process.operations + 1):
            for after in (False, True):
                yield dataclasses.replace(calm, faults=(*calm.faults, Kill(member, target, op, after)))


@pytest.mark.parametrize("target", ["training", "monitor", "host"])
@pytest.mark.parametrize("members", [2, 3])
def test_kill_at_every_operation(members: int, target: str) -> None:
    """The others return; so does the member itself where only its monitor died."""
    count = 0
    for scenario in moments(Scenario(1, members, (RAISE,)), target, range(members)):
        world = sim.run(scenario)
        count += any(isinstance(fault, Kill) for fault in world.fired)
    assert count > 20 * members


@pytest.mark.parametrize("target", ["training", "host"])
def test_kill_at_every_operation_with_a_reserve(target: str) -> None:
    for scenario in moments(Scenario(2, 3, (RAISE,), assignment="at most 2"), target, range(3)):
        sim.run(scenario)


def test_store_host_lives_on_the_smallest_member() -> None:
    """The rendezvous comes from a member's monitor, which dies at every operation."""
    for scenario in moments(Scenario(3, 3, (RAISE,), shared_host=True), "host", range(3)):
        sim.run(scenario)


@pytest.mark.parametrize("target", ["monitor", "host"])
def test_who_speaks_for_a_lost_host_is_killed_too(target: str) -> None:
    """Member 0 finds member 1 lost, and its monitor dies at every operation; a new monitor says the same things again.

    It used to be counted twice for it: with the same words in the same entry a round looked complete too early.
    """
    calm = Scenario(4, 4, (Kill(1, "host", time=0.3), Act(3, "finalize is slow")), longest=9.0)
    for scenario in moments(calm, target, [0]):
        sim.run(scenario)
