"""The store is lost, and the job goes on with another one, or ends: the rules of `inprocess.failover.rules`."""

from __future__ import annotations

import pytest

from tests import sim
from tests.sim.scenario import Act, Cut, Freeze, Kill, Scenario, Spawn, Split, StoreGone
from tests.sim.world import World


def results(world: World) -> list[str | None]:
    return [training.result for training in world.training]


def play(*faults: object, members: int = 4, longest: float = 5.0, standbys: int = 2) -> World:
    return sim.run(Scenario(1, members, faults, longest=longest, standbys=standbys))  # type: ignore[arg-type]


def test_no_loss() -> None:
    world = play()
    assert results(world) == ["returned"] * 4
    assert len(world.views) == 1


def test_store_is_gone() -> None:
    """All go on, and their iterations are counted on."""
    world = play(Act(0, "raise at entry"), StoreGone(3.0), longest=8.0)
    assert results(world) == ["returned"] * 4
    assert [view.offset for view in world.views] == [0, 2]


def test_nobody_stands_by() -> None:
    world = play(StoreGone(1.0), standbys=0)
    assert results(world) == ["cut off: StoreLost"] * 4


def test_host_of_the_store_is_lost() -> None:
    world = play(StoreGone(1.0, host=True))
    assert results(world) == [None, "returned", "returned", "returned"]
    assert world.views[1].members == (1, 2, 3)


def test_the_last_of_two() -> None:
    world = play(StoreGone(1.0, host=True), members=2)
    assert results(world) == [None, "returned"]


def test_two_losses_in_a_row() -> None:
    """The host of the second store is that of member 2."""
    world = play(StoreGone(1.0, host=True), StoreGone(4.0, host=True), longest=15.0)
    assert results(world) == [None, "returned", None, "returned"]
    assert [view.members for view in world.views] == [(0, 1, 2, 3), (1, 2, 3), (1, 3)]


def test_the_side_of_the_store_is_the_smaller_one() -> None:
    """It closes the store; the others go on without it."""
    world = play(Split((1, 2, 3), 1.0, 30.0), longest=30.0)
    assert [view.number for view in world.closed] == [0]
    assert results(world)[1:] == ["returned"] * 3
    assert results(world)[0] != "returned"
    assert world.views[1].members == (1, 2, 3)


@pytest.mark.parametrize("away", [(3,), (2, 3)], ids=["less than half", "half"])
def test_who_is_not_more_than_half_does_not_go_on(away: tuple[int, ...]) -> None:
    world = play(Split(away, 1.0, 30.0), longest=30.0)
    assert not world.closed
    assert len(world.views) == 1
    here = [number for number in range(4) if number not in away]
    assert [results(world)[number] for number in here] == ["returned"] * len(here)


def test_store_is_lost_for_one_alone() -> None:
    """The standbys have it still: it is refused, and the others go on where they are."""
    world = play(Cut(3, 1.0, 5.0), longest=20.0)
    assert results(world) == ["returned"] * 3 + ["cut off: refused"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("op", range(1, 6))
def test_lost_when_the_last_one_has_finished(op: int, after: bool) -> None:
    """Whether anybody has read that the job is completed or nobody, all return, from one iteration."""
    for member in range(3):
        world = play(Kill(member, "store", op, after, phase="wait for the outcome"), members=3, longest=0.5)
        assert results(world) == ["returned"] * 3


@pytest.mark.parametrize("target", ["store", "store host"])
def test_lost_at_any_operation(target: str) -> None:
    """Of one member, of which the others make theirs meanwhile. Whoever has somebody to ask goes on."""
    calm = Scenario(2, 3, (Act(0, "raise"),), standbys=2)
    went_on = 0
    for op in range(1, sim.run(calm).training[1].operations + 1):
        faults = (*calm.faults, Kill(1, target, op))
        world = sim.run(Scenario(2, 3, faults, standbys=2))
        went_on += len(world.views) > 1
    assert went_on > 10


def test_standby_is_lost_while_they_vote() -> None:
    """The process is seen to end, so the next one is asked."""
    faults = (StoreGone(1.0, host=True), Act(4, "finalize is slow"), Kill(3, "monitor", time=3.0))
    world = play(*faults, members=5)
    assert results(world) == [None, "returned", "returned", "returned", None]
    assert world.views[1].members == (1, 2, 3)


def test_voter_is_lost_before_it_begins_anew() -> None:
    """The standby speaks for it."""
    world = play(StoreGone(1.0), Kill(3, "training", 1, phase="join", iteration=0))
    assert results(world) == ["returned"] * 3 + [None]


def test_voter_is_lost_when_it_has_arrived_and_is_not_counted() -> None:
    """The others used to wait for it until barrier_timeout."""
    counted = 0
    for op in range(10, 20):
        for after in (False, True):
            world = sim.run(Scenario(3, 4, (StoreGone(1.0), Kill(3, "host", op, after)), longest=2.0, standbys=2))
            if len(world.views) > 1:
                counted += 1
                assert results(world)[:3] == ["returned"] * 3
                assert world.engine.now < 30.0
    assert counted > 5


def test_who_serves_the_second_store_is_lost_too() -> None:
    """There is another one that stands by, though only two are left: not the one who serves it."""
    faults = (StoreGone(1.0, host=True), Kill(2, "host", 40))
    world = sim.run(Scenario(3, 3, faults, longest=2.0, standbys=2))
    assert results(world) == [None, "returned", None]


@pytest.mark.parametrize("seed", range(40))
def test_a_host_that_stands_still_while_the_others_complete(seed: int) -> None:
    """When it goes on in its end round, the store has ended, and so have the others: it must not go on alone."""
    for phase in ("finalize", "end round"):
        faults = (Act(0, "raise"), Freeze(2, "host", 0.0, 11.6, phase))
        world = sim.run(Scenario(seed, 3, faults, longest=0.3, standbys=2))
        assert results(world)[:2] == ["returned"] * 2
        assert results(world)[2] != "returned"
        assert len(world.views) == 1


@pytest.mark.parametrize("seed", range(40))
def test_who_is_cut_off_from_the_store_alone_has_voted_at_a_former_standby(seed: int) -> None:
    """The others complete without it, and end: also the standby where it has voted is to know."""
    moment = 6.3 + seed / 20
    faults = (
        Cut(4, 1.0, 60.0, "store"),
        Freeze(3, "monitor", moment, 2.0 + seed % 7 / 2),
        StoreGone(moment + seed % 8 / 2),
    )
    world = sim.run(Scenario(seed, 5, faults, longest=3.0, standbys=2))
    assert results(world)[4] != "returned" or len(world.views) > 1


FOUND = {
    # it had returned from an iteration that the others did not complete
    "completed is told without its iteration": Scenario(
        341, 4, (Split((0, 2), 3.0, 9.0),), longest=10.0, commits=0, standbys=2
    ),
    # who had gone on elsewhere, and ended there, was taken for one that does not go on
    "the others have completed elsewhere when they can be heard again": Scenario(
        276, 4, (Act(0, "hang for ever"), Split((1, 2), 0.5, 9.0)), longest=1.0, standbys=3
    ),
    # the same, where the others have the old store
    "one of the others ends when it can be heard again": Scenario(
        2004, 4, (Split((0, 2), 0.5, 9.0), Spawn(3, 0.1)), "discard odd", longest=40.0, standbys=2
    ),
    # the same, where the old store took them for ended, and let in somebody who had waited there
    "who is lost to the store for a moment goes on elsewhere": Scenario(
        986, 3, (Split((0, 1), 0.75, 3.62),), "discard odd", commits=0, respawn=0.0, standbys=3
    ),
    # two returned while four reserves, which could not know, went on
    "completed by those that are cut off from more than half": Scenario(
        4451, 6, (Split((2, 3, 4, 5), 1.0, 20.6),), "at most 2", standbys=2
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    sim.run(FOUND[name])  # raises Failure


def test_seeds() -> None:
    """Random jobs with standbys."""
    jobs = [scenario for scenario in sim.seeds(range(1000, 1250)) if scenario.standbys]
    assert sim.soak(jobs) == len(jobs) > 80
