"""The book: changed by decisions and by a start round that said go, by nothing else."""

from __future__ import annotations

import pytest

from inprocess.protocol.book import Book
from inprocess.protocol.messages import FIRST_JOINER as J
from inprocess.protocol.messages import Decision, Roster, dump, load_roster


def test_founder() -> None:
    book = Book.founder(2, (3, 0, 2, 1), 4)
    assert (book.roster, book.rank, book.world_size, book.iteration) == ((0, 1, 2, 3), 2, 4, -1)
    assert book.included


def test_decision_moves_on_by_one_iteration() -> None:
    book = Book.founder(2, range(4), 4)
    book.apply(Decision())
    book.apply(Decision(removed=(0, 3), terminated=(0, 3)))
    assert (book.iteration, book.roster, book.terminated) == (1, (1, 2), frozenset({0, 3}))
    assert (book.rank, book.world_size) == (2, 4), "the frame stays until an iteration starts"
    assert book.last.removed == (0, 3)


def test_start_makes_a_new_frame() -> None:
    book = Book.founder(2, range(4), 4)
    book.apply(Decision(removed=(0,), terminated=(0,)))
    book.started(1, 3)
    assert (book.rank, book.world_size, book.terminated, book.roster) == (1, 3, frozenset(), (1, 2, 3))


def test_two_restarts_without_a_start_keep_the_frame() -> None:
    """The second decision names everybody who has gone since the frame began."""
    book = Book.founder(3, range(4), 4)
    book.apply(Decision(removed=(0,), terminated=(0,)))
    book.apply(Decision(removed=(1,), terminated=(0, 1)))
    assert (book.terminated, book.roster) == (frozenset({0, 1}), (2, 3))


def test_jump_to_a_later_iteration() -> None:
    """For a monitor that was out of reach; the members that had gone before its call are none."""
    book = Book(1, (1, 2, 5), iteration=3, known=frozenset((0, 1, 2, 5)))
    book.jump(Roster(40, ((1, 1), (5, 5), (J, J)), ((J, 2),)))
    assert (book.iteration, book.roster, book.included) == (40, (1, 5, J), True)
    assert (book.taken, book.last.removed, J in book.known) == ({1, 5, 2}, (2,), True)
    book.jump(Roster(50, ((5, 5),)))
    assert (book.iteration, book.roster, book.included) == (50, (5,), False)


@pytest.mark.parametrize("roster", [(), (0,), (0, 1, 2), (1, 3, 4, 5, 9), (0, J, J + 1, J + 3)])
def test_a_roster_that_is_noted_comes_back(roster: tuple[int, ...]) -> None:
    places = {member: 100 + member - J for member in roster if member >= J}
    note = Book(0, roster, places=places).note(7)
    found = Book.joiner(J + 9, load_roster(dump(note), "roster"))
    assert (found.roster, found.iteration, found.places, found.included) == (roster, 7, places, False)


def test_who_joins_puts_everybody_back_in_its_place() -> None:
    """0 1 2 3 without 1 are 0 1 2; then one joins in its place."""
    book = Book.founder(3, range(4), 4)
    book.apply(Decision(removed=(1,), terminated=(1,)))
    book.started(2, 3)
    book.apply(Decision(joined=((J, 1),), places=4, fresh=(1,)))
    assert (book.rank, book.world_size, book.terminated, book.fresh) == (3, 4, frozenset(), {1})
    assert (book.roster, book.place_of(J), book.taken) == ((0, 2, 3, J), 1, {0, 1, 2, 3})
    book.started(3, 4)
    assert not book.fresh


def test_the_same_decision_twice_is_the_same() -> None:
    """A new monitor may begin with a roster that is newer than its iteration."""
    decision = Decision(removed=(1,), joined=((J, 1),), places=2, fresh=(1,))
    once, twice = Book.founder(0, range(2), 2), Book.founder(0, range(2), 2)
    for book in (once, twice, twice):
        book.apply(decision)
    assert (once.roster, once.places, once.known) == (twice.roster, twice.places, twice.known)
    assert not once.strangers(decision)
    assert "members" in Book(0, (0,), world_size=2).strangers(Decision(removed=(5,)))
    assert "taken" in Book.founder(0, range(2), 2).strangers(Decision(joined=((J, 1),), places=2, fresh=(1,)))


def test_removed_member_is_not_included() -> None:
    book = Book.founder(1, range(2), 2)
    book.apply(Decision(removed=(1,), terminated=(1,)))
    assert not book.included
