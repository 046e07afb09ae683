"""Random jobs: 500 seeds with three faults each, other sizes, and what a failure tells."""

from __future__ import annotations

import pytest

from tests import sim
from tests.mutants import applied
from tests.mutants.catalog import MUTANTS
from tests.sim.scenario import Act, Cut, Kill, Scenario, Spawn


@pytest.mark.parametrize("first", range(0, 500, 100))
def test_seeds(first: int) -> None:
    """Four members, three faults."""
    assert sim.soak(sim.seeds(range(first, first + 100))) == 100


@pytest.mark.parametrize(("members", "faults"), [(1, 2), (2, 3), (3, 5), (6, 6), (9, 4)])
def test_other_sizes(members: int, faults: int) -> None:
    sim.soak(sim.seeds(range(40), members, faults))


def test_no_fault() -> None:
    """Nobody is restarted, everybody returns, and the store's host learns that it may go."""
    for seed in range(20):
        world = sim.run(Scenario(seed, members=4))
        assert [training.result for training in world.training] == ["returned"] * 4
        assert world.store.data["over"] == b"1"


def test_same_seed_same_trace() -> None:
    first, second = (sim.story(sim.run(sim.random_scenario(7))) for _ in range(2))
    assert first == second


def test_failure_tells_its_story() -> None:
    (one_short,) = (mutant for mutant in MUTANTS if mutant.name == "one_short")
    with applied(one_short), pytest.raises(sim.Failure) as failure:
        sim.soak(sim.seeds(range(10)))
    text = str(failure.value)
    assert "seed 0: Scenario(" in text
    assert "enters the function" in text
    assert "Broken: I5" in text
    assert "python -m tests.sim 0 --members 4 --faults 3" in text


def test_late_riser_ends() -> None:
    """A host that was cut off while the others went through many iterations catches up with their verdicts and ends.

    It used to wait for ever in an iteration whose verdicts had been deleted.
    """
    raises = tuple(Act(0, "raise", iteration) for iteration in range(12))
    world = sim.run(Scenario(1, members=4, faults=(Cut(3, 0.3, 60.0), *raises)))
    assert [training.result for training in world.training[:3]] == ["returned"] * 3
    assert not world.overdue


def test_discarded_member_is_not_missed() -> None:
    """The monitor of a discarded member goes away; its neighbour must not interrupt a running iteration for that."""
    world = sim.run(Scenario(3, members=3, assignment="discard odd", longest=60.0))
    assert [training.result for training in world.training] == ["returned", "returned", "discarded"]


@pytest.mark.parametrize(
    ("assignment", "victim", "iterations"),
    [("shift", 1, 3), ("even", 1, 3), ("at most 3", 1, 2), ("at most 2", 1, 2), ("tree", 2, 3)],
)
def test_who_would_only_be_a_reserve_interrupts_nobody(assignment: str, victim: int, iterations: int) -> None:
    """One of four dies and is replaced: what runs ends for that where more ranks would be active, or nobody knows."""
    faults = (Kill(victim, "training", time=3.0), Spawn(victim, 6.0))
    for seed in range(5):
        world = sim.run(Scenario(seed, members=4, faults=faults, assignment=assignment, longest=30.0))
        assert len(world._entered) == iterations
        assert world.training[4].result == ("returned" if iterations == 3 else "late")


def test_founders_start_far_apart() -> None:
    """Longer than the heartbeat timeout: a founder that has not started yet is not missed."""
    world = sim.run(Scenario(5, members=3, delays=(0.0, 20.0, 7.0)))
    assert [training.result for training in world.training] == ["returned"] * 3


def test_founder_that_never_starts() -> None:
    """The others get an error after barrier_timeout, and their monitors end too."""
    world = sim.run(Scenario(5, members=3, faults=(Kill(1, "host", time=0.0),), delays=(0.0, 5.0, 0.0)))
    assert [world.training[member].result for member in (0, 2)] == ["a founder is missing"] * 2


def test_neighbours_that_go_down_together() -> None:
    """A rack: three of six hosts; noticed in one timeout and a few heartbeats, not in three timeouts."""
    faults = tuple(Kill(member, "host", time=1.0) for member in (1, 2, 3))
    world = sim.run(Scenario(2, members=6, faults=faults, longest=30.0))
    entries = [when for when, who, what in world.engine.trace if who == "train0" and "iteration 1" in str(what)]
    assert entries[0] < 1.0 + 6.0 + 2 * 2.0 + 3.0
