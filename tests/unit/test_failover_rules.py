"""Whether a job goes on after its store is lost: the rules of an arbiter."""

from __future__ import annotations

import pytest

from inprocess.failover.rules import Arbiter, hears_enough, standbys
from inprocess.protocol.messages import FIRST_JOINER, FailoverOutcome, Vote

PATIENCE, HEARTBEAT_TIMEOUT = 10.0, 4.0


def vote(slot: int, *members: tuple[int, int], iteration: int = 3) -> Vote:
    return Vote(slot, iteration, members or ((0, 3),))


def arbiter(*voters: int, gone: tuple[int, ...] = (), lost: bool = True) -> Arbiter:
    """Of a job of four members; at time 0 it lost the store, and these voted."""
    made = Arbiter(PATIENCE, HEARTBEAT_TIMEOUT)
    for member in range(4):
        made.meet(member)
    if lost:
        made.lost(0.0)
    for member in gone:
        made.leave(member, 0.0, 0.0)
    for member in voters:
        made.vote(member, vote(member), 0.0)
    return made


def fate(made: Arbiter, now: float) -> FailoverOutcome | None:
    verdict = made.decide(now)
    return None if verdict is None else verdict.outcome


@pytest.mark.parametrize(
    ("founders", "count", "chosen"),
    [
        ((0, 1, 2, 3), 2, (2, 1)),
        (tuple(range(16)), 2, (10, 5)),
        ((0, 1), 2, (1,)),
        ((3, 5, 9), 16, (9, 5)),
        ((0,), 2, ()),
        ((0, 1, 2, 3), 0, ()),
    ],
)
def test_standbys_are_spread(founders: tuple[int, ...], count: int, chosen: tuple[int, ...]) -> None:
    assert standbys(founders, count, founders[0]) == chosen


def test_nobody_stands_by_for_itself() -> None:
    assert standbys((1, 2, 3, 4), 2, 3) == (4, 1)
    assert standbys((1, 2, 3), 2, 0) == (3, 2)
    assert standbys((), 2, 0) == ()


def test_at_once_where_all_are_here_or_certainly_gone() -> None:
    verdict = arbiter(1, 2, 3, gone=(0,)).decide(0.0)
    assert verdict is not None
    assert (verdict.outcome, verdict.members, verdict.iteration) == (FailoverOutcome.GO, (1, 2, 3), 3)


@pytest.mark.parametrize("voters", [(3,), (1,)])
def test_also_the_last_one(voters: tuple[int, ...]) -> None:
    assert fate(arbiter(*voters, gone=tuple({0, 1, 2, 3} - {*voters})), 0.0) is FailoverOutcome.GO


def test_whoever_may_live_is_waited_for() -> None:
    made = arbiter(1, 2, 3)
    assert fate(made, PATIENCE - 0.1) is None
    assert made.wake_at() == PATIENCE
    assert fate(made, PATIENCE) is FailoverOutcome.GO


@pytest.mark.parametrize(("lost", "since"), [(5.0, 5.0), (None, 7.0)])
def test_from_when_patience_counts(lost: float | None, since: float) -> None:
    """From the loss of the store, or from the first vote where nothing is lost here."""
    made = arbiter(lost=False)
    if lost is not None:
        made.lost(lost)
    made.vote(1, vote(1), 7.0)
    assert made.wake_at() == since + PATIENCE


@pytest.mark.parametrize(
    ("voters", "gone", "expected"),
    [
        ((2, 3), (), FailoverOutcome.REFUSED),
        ((1, 2, 3), (), FailoverOutcome.GO),
        ((2, 3), (1,), FailoverOutcome.GO),
        ((2,), (1,), FailoverOutcome.REFUSED),
        ((3,), (1, 2), FailoverOutcome.REFUSED),
    ],
)
def test_more_than_half_of_those_that_may_live(
    voters: tuple[int, ...], gone: tuple[int, ...], expected: FailoverOutcome
) -> None:
    assert fate(arbiter(*voters, gone=gone), PATIENCE) is expected


def test_who_is_refused_learns_who_is_missing() -> None:
    verdict = arbiter(3).decide(PATIENCE)
    assert verdict is not None
    assert "only 1 of 4 ranks met here: initial ranks 0-2 may" in verdict.reason


def test_a_store_that_is_lost_for_one_alone() -> None:
    made = arbiter(3, lost=False)
    assert fate(made, PATIENCE - 0.1) is None
    verdict = made.decide(PATIENCE)
    assert (
        verdict is not None and verdict.outcome is FailoverOutcome.REFUSED and "for this rank alone" in verdict.reason
    )


def test_the_newest_roster_counts() -> None:
    """Some have read the last decision, others not: member 1 was removed by it, and must not come back."""
    made = arbiter(1, gone=(0,))
    made.vote(2, vote(2, (2, 3), iteration=4), 0.0)
    made.vote(3, vote(3, (2, 3), iteration=4), 0.0)
    verdict = made.decide(0.0)
    assert verdict is not None and (verdict.members, verdict.iteration) == ((2, 3), 4)


def test_members_that_joined_go_on_in_their_slots() -> None:
    made = Arbiter(PATIENCE, HEARTBEAT_TIMEOUT)
    made.lost(0.0)
    members = ((2, 3), (FIRST_JOINER + 1, FIRST_JOINER + 1))
    joined = ((FIRST_JOINER + 1, 1),)
    for member, slot in ((2, 2), (3, 3), (FIRST_JOINER + 1, 1)):
        made.vote(member, Vote(slot, 5, members, joined), 0.0)
    verdict = made.decide(0.0)
    assert verdict is not None and verdict.members == (1, 2, 3)


def test_a_voter_that_ends_is_not_counted() -> None:
    made = arbiter(1, 2)
    made.leave(2, 0.0, 0.0)
    made.vote(3, vote(3), 0.0)
    made.leave(0, 0.0, 0.0)
    verdict = made.decide(0.0)
    assert verdict is not None and verdict.members == (1, 3)


def test_the_verdict_never_changes() -> None:
    made = arbiter(1, 2, 3, gone=(0,))
    first = made.decide(0.0)
    made.leave(1, 0.0, 0.0)
    made.leave(2, 0.0, 0.0)
    assert made.decide(100.0) is first
    assert not made.complete(1, 3)


def test_who_has_completed_counts_for_that() -> None:
    """Two of four have read it, and returned; so those that did not may return from the same iteration."""
    made = arbiter()
    for member in (0, 1):
        assert made.complete(member, 3)
        made.leave(member, 0.0, 0.0)
    made.vote(2, vote(2), 0.0)
    verdict = made.decide(0.0)
    assert verdict is not None and (verdict.outcome, verdict.iteration) == (FailoverOutcome.COMPLETED, 3)


@pytest.mark.parametrize(
    ("connected", "elsewhere", "gone", "needed"),
    [
        ((), (), (), False),
        ((1, 2, 3), (), (), True),
        ((2, 3), (), (0,), True),
        ((2, 3), (), (), False),  # half of those that may live
        ((0,), (1, 2, 3), (), False),  # it is cut off
        ((0, 1, 2, 3), (1, 2, 3), (), False),
        ((7, 8, 9), (), (), False),
    ],
)
def test_a_standby_stays_for_those_that_may_go_on_there(
    connected: tuple[int, ...], elsewhere: tuple[int, ...], gone: tuple[int, ...], needed: bool
) -> None:
    made = arbiter(gone=gone)
    for member in elsewhere:
        made.turn_away(member)
    assert made.is_needed(connected, range(4)) is needed


def test_a_standby_stays_for_those_that_went_on_there() -> None:
    made = arbiter(1, 2, 3)
    assert fate(made, PATIENCE) is FailoverOutcome.GO
    assert made.is_needed((0, 1), range(4))
    assert not made.is_needed((0,), range(4))


def test_a_standby_that_refused_goes() -> None:
    made = arbiter(1)
    assert fate(made, PATIENCE) is FailoverOutcome.REFUSED
    assert not made.is_needed((0, 1), range(4))


def test_a_standby_stays_to_say_that_it_is_completed() -> None:
    made = arbiter()
    made.complete(0, 3)
    made.complete(1, 3)
    assert made.is_needed((2,), range(4))
    made.vote(2, vote(2), 0.0)
    assert fate(made, 0.0) is FailoverOutcome.COMPLETED
    assert made.is_needed((2, 3), range(4))
    assert not made.is_needed((0, 1), range(4))


def test_a_broken_connection_is_no_end() -> None:
    """Whoever voted over it does not hear the verdict, and is waited for like any other."""
    made = arbiter(1, 2, 3, gone=(0,))
    made.leave(3, 0.0, 0.0, ended=False)
    assert made.gone == {0}
    assert fate(made, 0.0) is None


def test_who_returned_and_ended_may_live() -> None:
    """It does not make the others fewer, of whom more than half have to know that the iteration is completed."""
    made = arbiter(1)
    made.complete(0, 3)
    made.leave(0, 0.0, 0.0)
    assert made.decide(0.0) is None


def test_nobody_goes_on_where_somebody_completed() -> None:
    """One of four knows of it, and one more is here: others may go on elsewhere, these must not."""
    made = arbiter()
    assert made.complete(0, 3)
    made.vote(2, vote(2), 0.0)
    assert fate(made, PATIENCE - 0.1) is None
    assert fate(made, PATIENCE) is FailoverOutcome.REFUSED


def test_completed_where_the_store_is_not_lost_here() -> None:
    made = arbiter(lost=False)
    for member in (0, 1, 3):
        made.complete(member, 3)
    made.vote(2, vote(2), 0.0)
    assert fate(made, 0.0) is FailoverOutcome.COMPLETED


@pytest.mark.parametrize("lost", [True, False])
def test_who_ended_after_a_long_silence_may_have_gone_on_without_this_standby(lost: bool) -> None:
    """It may have stood still, and the others have completed without it. It may not have noticed the loss yet."""
    made = arbiter(2, lost=lost)
    made.leave(0, HEARTBEAT_TIMEOUT, heard=0.0)
    assert made.gone == {0}
    made.leave(1, HEARTBEAT_TIMEOUT + 0.1, heard=0.0)
    assert made.gone == {0}


def test_before_the_first_heartbeat_nobody_goes_on() -> None:
    made = arbiter(2)
    made.leave(0, 100.0, heard=None)
    assert made.gone == {0}


def test_who_votes_elsewhere_is_not_gone_here() -> None:
    made = arbiter(2)
    made.turn_away(3)
    made.leave(3, 0.0, 0.0)
    assert made.gone == set()


@pytest.mark.parametrize(
    ("roster", "heard", "gone", "enough"),
    [
        (4, (0, 1), (), True),
        (4, (0,), (), False),
        (5, (0, 1), (), False),
        (4, (0,), (1, 2, 3), True),
        (4, (0,), (3,), False),
        (4, (0, 3), (3,), False),
    ],
)
def test_a_store_needs_half_of_those_that_may_live(
    roster: int, heard: tuple[int, ...], gone: tuple[int, ...], enough: bool
) -> None:
    assert hears_enough(range(roster), heard, gone) is enough


@pytest.mark.parametrize("size", range(2, 9))
def test_two_sides_never_both_go_on(size: int) -> None:
    """However the members are split, and whatever each side knows of the dead."""
    for dead in range(size):
        for here in range(size - dead + 1):
            for known in range(dead + 1):
                made = Arbiter(PATIENCE, HEARTBEAT_TIMEOUT)
                made.lost(0.0)
                for member in range(known):
                    made.leave(member, 0.0, 0.0)
                for member in range(size - here, size):
                    made.vote(member, vote(member, (0, size - 1)), 0.0)
                there = range(dead, size - here)
                if fate(made, PATIENCE) is FailoverOutcome.GO:
                    assert not there or not hears_enough(range(size), there, range(dead))
