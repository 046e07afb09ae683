"""The board: what one side writes the other reads, one iteration at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from inprocess.monitor import board as slots
from inprocess.monitor.board import LEASE, Board
from inprocess.protocol.phases import Phase


@pytest.fixture
def pair() -> Iterator[tuple[Board, Board]]:
    writer = Board.create()
    reader = Board.attach(os.dup(writer.fd))
    yield writer, reader
    writer.close()
    reader.close()


def test_a_new_board_shows_a_rank_that_is_joining(pair: tuple[Board, Board]) -> None:
    seen = pair[1].snapshot()
    assert (seen.iteration, seen.phase, seen.answered, seen.left) == (-1, Phase.JOIN, -2, False)
    assert seen.progress > 0 and seen.ping == 0 and seen.hang_protection


@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_arrives(pair: tuple[Board, Board], phase: Phase) -> None:
    pair[0].enter(phase)
    assert pair[1].snapshot().phase is phase


def test_a_new_iteration_forgets_pings_sections_and_blocks(pair: tuple[Board, Board]) -> None:
    writer, reader = pair
    writer.slots[slots.PING] = 1
    writer.section(5.0)
    writer.unprotect()
    writer.slots[slots.ATOMIC] = 1
    seen = reader.snapshot()
    assert seen.ping and seen.soft_timeout == 5_000_000_000 and not seen.hang_protection and seen.atomic
    writer.begin(3)
    seen = reader.snapshot()
    assert (seen.iteration, seen.ping, seen.soft_timeout, seen.hang_protection, seen.atomic) == (3, 0, 0, True, False)


def test_leaving_a_block_without_protection_counts_as_progress(pair: tuple[Board, Board]) -> None:
    writer, reader = pair
    iteration = writer.unprotect()
    writer.slots[slots.PROGRESS] = writer.slots[slots.PING] = 1
    writer.protect(iteration)
    seen = reader.snapshot()
    assert seen.progress > 1 and seen.ping > 1 and seen.hang_protection


def test_a_block_without_pings_does_not_begin_to_count_them(pair: tuple[Board, Board]) -> None:
    pair[0].protect(pair[0].unprotect())
    pair[0].section(None)
    assert pair[1].snapshot().ping == 0


class Overtaken:
    """Slots whose first reader of UNHANG is overtaken by another thread before it writes."""

    def __init__(self, memory: memoryview, overtake: Callable[[], object]) -> None:
        self._memory, self._overtake = memory, threading.Thread(target=overtake)

    def __getitem__(self, slot: int) -> int:
        value: int = self._memory[slot]
        if slot == slots.UNHANG and self._overtake.ident is None:
            self._overtake.start()
            self._overtake.join(0.05)  # it cannot end where it waits for its turn
        return value

    def __setitem__(self, slot: int, value: int) -> None:
        self._memory[slot] = value

    def end(self) -> memoryview:
        self._overtake.join()
        return self._memory


def test_two_threads_leave_blocks_without_protection_at_once(pair: tuple[Board, Board]) -> None:
    """A lost update would leave hang protection off for the rest of the iteration."""
    writer, reader = pair
    first, second = writer.unprotect(), writer.unprotect()
    lying = Overtaken(writer.slots, lambda: writer.protect(second))
    writer.slots = lying  # type: ignore[assignment]
    writer.protect(first)
    writer.slots = lying.end()
    assert reader.snapshot().hang_protection


def test_a_block_that_is_left_in_a_later_iteration_does_not_count(pair: tuple[Board, Board]) -> None:
    """By a thread that the restart did not end: below zero, protection would be off as well."""
    writer, reader = pair
    iteration = writer.unprotect()
    writer.begin(1)
    writer.protect(iteration)
    assert reader.snapshot().hang_protection


def test_place_answer_and_leave_arrive(pair: tuple[Board, Board]) -> None:
    writer, reader = pair
    writer.place(7, reserve=True)
    writer.answer(4)
    writer.leave()
    seen = reader.snapshot()
    assert (seen.rank, seen.reserve, seen.answered, seen.left) == (7, True, 4, True)


def test_a_snapshot_never_mixes_two_iterations(pair: tuple[Board, Board]) -> None:
    writer, reader = pair
    stop = threading.Event()

    def write() -> None:
        iteration = 0
        while not stop.is_set():
            iteration += 1
            writer.begin(iteration)  # a ping of this iteration can only come afterwards
            writer.slots[slots.PING] = iteration

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(2000):
            seen = reader.snapshot()
            assert seen.ping in (0, seen.iteration)
    finally:
        stop.set()
        thread.join()


def test_closing_twice_is_fine_and_writing_afterwards_as_well(pair: tuple[Board, Board]) -> None:
    """Nobody sees it, and no lease ends."""
    board, reader = pair
    board.slots[LEASE] = 7
    before = reader.snapshot()
    board.close()
    board.close()
    board.stamp()
    board.section(5.0)
    assert reader.snapshot() == before and not board.slots[LEASE]


def test_the_memory_has_no_name_and_is_not_inherited(pair: tuple[Board, Board]) -> None:
    assert os.readlink(f"/proc/self/fd/{pair[0].fd}").startswith("/memfd:")
    assert not os.get_inheritable(pair[0].fd)
