"""The last checkpoint, where all ranks leave."""

from __future__ import annotations

import contextlib

from inprocess.call_wrapper import CallWrapper, Controls, Leaving
from inprocess.live.last import LastCheckpoint
from inprocess.monitor.board import Board
from inprocess.system import clock


class Alone:
    """All that the others say is what this rank says."""

    def say(self, what: str) -> None:
        pass

    def agree(self, what: str) -> int | None:
        return 1


def test_it_is_written_once_also_where_the_call_moves_to_another_store() -> None:
    """There the call gets another CallWrapper, and the signal that asked the rank to leave is the same."""
    board, written = Board.create(), list[float]()
    leaving = Leaving(15, clock.monotonic() + 60)
    leaving.everybody = True
    for _ in range(2):
        call = CallWrapper(board, object)
        Controls(call).leave_by(lambda: leaving, Alone())
        LastCheckpoint().committed(call, lambda seconds: not written.append(seconds), contextlib.nullcontext)
    board.close()
    assert len(written) == 1
