"""Single stops of all lives and a share of the pairs; `python -m tests.sim --crash-points` plays all of them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests import sim
from tests.sim import crashes
from tests.sim.scenario import Act, Kill, Scenario

#: of all pairs of stops, one out of so many is played here
EACH = 97


PLAIN, *OTHERS = crashes.LIVES


@pytest.mark.parametrize(("name", "members"), [(PLAIN, 2), (PLAIN, 3), (PLAIN, 4), *((name, 3) for name in OTHERS)])
def test_single_stops(name: str, members: int) -> None:
    """The others return, or say who is missing; so does the member itself where only its monitor was stopped."""
    calm = crashes.life(name, members)
    worlds = [crashes.play(scenario) for scenario in crashes.singles(calm)]
    struck = sum(any(isinstance(fault, Kill) for fault in world.fired) for world in worlds)
    assert struck > 60 * members


@pytest.mark.parametrize(("name", "members"), [(PLAIN, 2), (PLAIN, 3), ("one that dies is replaced", 2)])
def test_pairs_of_stops(name: str, members: int) -> None:
    calm = crashes.life(name, members)
    firsts = crashes.singles(calm, targets=("training", "host"))
    count = 0
    for number, first in enumerate(itertools.islice(firsts, 0, None, 5)):
        for scenario in itertools.islice(crashes.pairs(calm, first), number % EACH, None, EACH):
            crashes.play(scenario)
            count += 1
    assert count > 50


@pytest.mark.parametrize("target", ["monitor", "host"])
def test_who_speaks_for_a_lost_host_is_stopped_too(target: str) -> None:
    """Member 0 finds member 1 lost, and its monitor is stopped anywhere; a new monitor says the same things again.

    It used to be counted twice for it: with the same words in the same entry a round looked complete too early.
    """
    calm = Scenario(4, 4, (Kill(1, "host", time=0.3), Act(3, "finalize is slow")), longest=9.0)
    for scenario in crashes.singles(calm, [0], [target]):
        sim.run(scenario)


def test_the_monitor_of_one_that_did_not_live_to_say_who_it_is_watches_the_others() -> None:
    """It was let in with the last word of the only member that was left. Its monitor waited for that one for ever."""
    calm = crashes.life("one that dies is replaced", 2)
    lost = Kill(0, "host", 25, after=True)
    crashes.play(dataclasses.replace(calm, faults=(*calm.faults, lost, Kill(2, "training", 13, after=True))))


def test_bound_is_checked() -> None:
    """A job that ends, but late, is a failure."""
    slow = Scenario(1, 2, (Kill(1, "host", time=1.0),), longest=60.0)
    with pytest.raises(sim.Failure, match="bound"):
        crashes.play(slow)
