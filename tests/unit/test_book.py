"""The book: changed by decisions and by a start round that said go, by nothing else."""

from __future__ import annotations

from inprocess.protocol.book import Book
from inprocess.protocol.messages import Decision, Roster


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
    book = Book(1, (1, 2, 5), iteration=3, founders=frozenset((0, 1, 2, 5)))
    book.jump(Roster(40, (0, 2)))
    assert (book.iteration, book.roster, book.included) == (40, (1, 5), True)
    book.jump(Roster(50, (0, 1, 2)))
    assert (book.iteration, book.roster, book.included) == (50, (5,), False)


def test_removed_member_is_not_included() -> None:
    book = Book.founder(1, range(2), 2)
    book.apply(Decision(removed=(1,), terminated=(1,)))
    assert not book.included
