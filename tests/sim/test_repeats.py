"""The same error again and again, in virtual time: when the job waits, when it ends, and what is no repeat."""

from __future__ import annotations

from typing import Any

import pytest

from tests import sim
from tests.sim.scenario import Act, Again, HangsAgain, Kill, Scenario, Spawn, StoreGone
from tests.sim.world import World

PAUSES = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2]


def pauses(world: World, member: int = 0) -> list[float]:
    return [seconds for number, seconds in world.pauses if number == member]


def results(world: World) -> set[str | None]:
    return {training.result for training in world.training}


@pytest.mark.parametrize("seed", range(5))
def test_ten_times_and_it_ends(seed: int) -> None:
    """On all members, after 6.35 s of waiting, which all spend alike."""
    world = sim.run(Scenario(seed, 4, (Again(2, 99),), commits=0))
    assert results(world) == {"aborted"}
    assert max(iteration for _, iteration in world._entered) == 9
    for member in range(4):
        assert pauses(world, member) == pytest.approx(PAUSES, abs=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_on_one_member_after_the_other(seed: int) -> None:
    """Several fail for the same reason, and which of them is first differs from time to time."""
    world = sim.run(Scenario(seed, 4, tuple(Again(member, 99) for member in range(4)), commits=0))
    assert results(world) == {"aborted"}
    assert max(iteration for _, iteration in world._entered) == 9


@pytest.mark.parametrize(
    "faults",
    [
        (*[Act(0, "raise at entry", iteration) for iteration in range(20)],),
        (*[Act(iteration % 4, "raise", iteration) for iteration in range(20)],),
        (*[Act(0, "initialize raises", iteration) for iteration in range(20)],),
        (*[Act(1, "hang", iteration) for iteration in range(12)],),
    ],
    ids=["at entry", "on another member each time", "initialize", "others have returned"],
)
def test_other_errors_are_no_repeats(faults: tuple[Act, ...]) -> None:
    """Each has as many pings as no other, and while one hangs the others do something."""
    world = sim.run(Scenario(1, 4, faults, longest=0.1, commits=0))
    assert results(world) == {"returned"}
    assert not world.pauses


def test_without_a_limit_nothing_waits() -> None:
    world = sim.run(Scenario(1, 3, (Again(1, 40),), commits=0, max_repeats=None))
    assert results(world) == {"returned"}
    assert not world.pauses


def test_a_job_that_once_made_progress_continues() -> None:
    """With the longest pause from the tenth time on."""
    faults = (Act(0, "raise"), Again(1, 80, iteration=1))
    for seed in range(200):
        world = sim.run(Scenario(seed, 2, faults, longest=0.05, commits=4))
        if max(pauses(world)) < 4.9:
            continue  # a member that was quicker committed in between: ten in a row are one world of ten
        assert results(world) == {"returned"}
        assert max(pauses(world)) == pytest.approx(5.0, abs=0.1)
        return
    raise AssertionError("no seed came that far")


def test_progress_sets_the_count_back() -> None:
    """Nine times, then an iteration that commits and fails in another way, and after that the same error anew."""
    faults = (Again(0, 9), Act(0, "raise", iteration=9), Again(0, 12, iteration=10))
    world = sim.run(Scenario(1, 1, faults, longest=1.0, commits=1))
    assert results(world) == {"returned"}
    assert pauses(world) == pytest.approx([*PAUSES, 0.05], abs=0.1)


@pytest.mark.parametrize(
    "fault", [Kill(3, "training", time=1.0), Kill(3, "host", time=1.0)], ids=["a process", "a host"]
)
def test_a_death_neither_counts_nor_sets_back(fault: Kill) -> None:
    world = sim.run(Scenario(2, 4, (Again(1, 99), fault), commits=0))
    assert results(world) == {"aborted", None}


def test_a_process_that_joins_ends_a_pause() -> None:
    """It neither counts nor sets back, and whoever joins learns the count with the next error."""
    short = []
    for time in (6.0, 7.0, 8.0, 9.0, 10.0):
        faults = (Again(1, 99), Kill(2, "training", time=0.2), Spawn(2, time))
        world = sim.run(Scenario(3, 3, faults, commits=0))
        assert [training.result for training in world.training] == ["aborted", "aborted", None, "aborted"]
        waited = zip(pauses(world), PAUSES, strict=True)
        short += [seconds for seconds, full in waited if seconds < full - 0.02]
    assert len(short) > 1


def test_over_another_store_the_count_goes_on() -> None:
    """What each member knows of the errors goes with it."""
    for seed in range(6):
        faults = (Again(1, 99), StoreGone(1.5, host=False))
        world = sim.run(Scenario(seed, 3, faults, commits=0, standbys=2))
        entered = list(world._entered)
        assert results(world) == {"aborted"}
        assert len(world.views) == 2
        assert len(entered) <= 10 + 1


# --- the same hang again and again


def last(world: World) -> int:
    """The last iteration in which a function was entered, over the newest store."""
    return max(world._entered)[1]


HANGS_AFTER_EACH_OTHER = tuple(HangsAgain(member, 1, iteration=member) for member in range(4))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("assignment", ["shift", "at most 2"])
@pytest.mark.parametrize("faults", [(HangsAgain(1, 9),), HANGS_AFTER_EACH_OTHER], ids=["one", "one after the other"])
def test_the_third_hang_ends_the_job(faults: tuple[HangsAgain, ...], assignment: str, seed: int) -> None:
    """Whichever member it is, and with reserves, which wait."""
    if assignment != "shift":
        faults = tuple(HangsAgain(fault.member % 2, fault.times, fault.iteration) for fault in faults)
    world = sim.run(Scenario(seed, 4, faults, commits=0, assignment=assignment))
    assert (results(world), last(world)) == ({"aborted"}, 2)
    assert not world.pauses


@pytest.mark.parametrize(
    ("faults", "more"),
    [
        ((HangsAgain(1, 9),), {"max_repeats": None}),
        ((HangsAgain(1, 2), HangsAgain(1, 2, iteration=3), Act(0, "raise at entry", 2)), {}),
        ((HangsAgain(1, 5), Kill(3, "training", time=11.0)), {}),
        ((HangsAgain(1, 5), Spawn(4, 11.0)), {}),
        ((HangsAgain(1, 5), Spawn(4, 11.0)), {"join": "next_restart"}),
    ],
    ids=["max_repeats=None", "an error", "a death", "a process that joins", "one that joins with the third"],
)
def test_what_ends_a_row_of_hangs(faults: tuple[Act, ...], more: dict[str, Any]) -> None:
    world = sim.run(Scenario(1, 4, faults, commits=0, **more))
    assert results(world) <= {"returned", None}
    assert last(world) >= 5


def test_hangs_do_not_end_a_job_that_once_made_progress() -> None:
    faults = (Act(0, "raise"), HangsAgain(1, 9, iteration=1))
    world = sim.run(Scenario(5, 2, faults, longest=0.05, commits=4))
    assert world._progressed[0][1] == (0, 0), "no member committed before the error"
    assert (results(world), last(world)) == ({"returned"}, 10)


def test_over_another_store_hangs_are_counted_anew() -> None:
    for seed in range(6):
        world = sim.run(Scenario(seed, 3, (HangsAgain(1, 9), StoreGone(6.0, host=False)), commits=0, standbys=2))
        assert (results(world), max(world._entered)) == ({"aborted"}, (1, 2))
