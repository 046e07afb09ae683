"""The membership: changed by decisions and by a start round that said go, by nothing else."""

from __future__ import annotations

import pytest

from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import FIRST_JOINER as J
from inprocess.protocol.messages import Decision, Roster, dump
from inprocess.protocol.parsing import load_roster


def test_founder() -> None:
    membership = Membership.founder(2, (3, 0, 2, 1), 4)
    assert (membership.roster, membership.rank, membership.world_size, membership.iteration) == ((0, 1, 2, 3), 2, 4, -1)
    assert membership.included


def test_decision_moves_on_by_one_iteration() -> None:
    membership = Membership.founder(2, range(4), 4)
    membership.apply(Decision())
    membership.apply(Decision(removed=(0, 3), terminated=(0, 3)))
    assert (membership.iteration, membership.roster, membership.terminated) == (1, (1, 2), frozenset({0, 3}))
    assert (membership.rank, membership.world_size) == (2, 4), "the frame stays until an iteration starts"
    assert membership.last.removed == (0, 3)


def test_start_makes_a_new_frame() -> None:
    membership = Membership.founder(2, range(4), 4)
    membership.apply(Decision(removed=(0,), terminated=(0,)))
    membership.started(1, 3)
    assert (membership.rank, membership.world_size, membership.terminated, membership.roster) == (
        1,
        3,
        frozenset(),
        (1, 2, 3),
    )


def test_two_restarts_without_a_start_keep_the_frame() -> None:
    """The second decision names everybody who has gone since the frame began."""
    membership = Membership.founder(3, range(4), 4)
    membership.apply(Decision(removed=(0,), terminated=(0,)))
    membership.apply(Decision(removed=(1,), terminated=(0, 1)))
    assert (membership.terminated, membership.roster) == (frozenset({0, 1}), (2, 3))


def test_jump_to_a_later_iteration() -> None:
    """For a monitor that was out of reach; the members that had gone before its call are none."""
    membership = Membership(1, (1, 2, 5), iteration=3, known=frozenset((0, 1, 2, 5)))
    membership.jump(Roster(40, ((1, 1), (5, 5), (J, J)), ((J, 2),)))
    assert (membership.iteration, membership.roster, membership.included) == (40, (1, 5, J), True)
    assert (membership.taken, membership.last.removed, J in membership.known) == ({1, 5, 2}, (2,), True)
    membership.jump(Roster(50, ((5, 5),)))
    assert (membership.iteration, membership.roster, membership.included) == (50, (5,), False)


@pytest.mark.parametrize("roster", [(), (0,), (0, 1, 2), (1, 3, 4, 5, 9), (0, J, J + 1, J + 3)])
def test_a_roster_that_is_noted_comes_back(roster: tuple[int, ...]) -> None:
    slots = {member: 100 + member - J for member in roster if member >= J}
    note = Membership(0, roster, slots=slots).note(7)
    found = Membership.joiner(J + 9, load_roster(dump(note), "roster"))
    assert (found.roster, found.iteration, found.slots, found.included) == (roster, 7, slots, False)


def test_who_joins_puts_everybody_back_in_its_slot() -> None:
    """0 1 2 3 without 1 are 0 1 2; then one joins in its slot."""
    membership = Membership.founder(3, range(4), 4)
    membership.apply(Decision(removed=(1,), terminated=(1,)))
    membership.started(2, 3)
    membership.apply(Decision(joined=((J, 1),), slots=4, fresh=(1,)))
    assert (membership.rank, membership.world_size, membership.terminated, membership.fresh) == (3, 4, frozenset(), {1})
    assert (membership.roster, membership.slot_of(J), membership.taken) == ((0, 2, 3, J), 1, {0, 1, 2, 3})
    membership.started(3, 4)
    assert not membership.fresh


def test_the_same_decision_twice_is_the_same() -> None:
    """A new monitor may begin with a roster that is newer than its iteration."""
    decision = Decision(removed=(1,), joined=((J, 1),), slots=2, fresh=(1,))
    once, twice = Membership.founder(0, range(2), 2), Membership.founder(0, range(2), 2)
    for membership in (once, twice, twice):
        membership.apply(decision)
    assert (once.roster, once.slots, once.known) == (twice.roster, twice.slots, twice.known)
    assert not once.strangers(decision)
    assert "members" in Membership(0, (0,), world_size=2).strangers(Decision(removed=(5,)))
    assert "taken" in Membership.founder(0, range(2), 2).strangers(Decision(joined=((J, 1),), slots=2, fresh=(1,)))


def test_removed_member_is_not_included() -> None:
    membership = Membership.founder(1, range(2), 2)
    membership.apply(Decision(removed=(1,), terminated=(1,)))
    assert not membership.included
