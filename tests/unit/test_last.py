"""The last checkpoint, where all ranks leave."""

from __future__ import annotations

import contextlib

import pytest

from inprocess.call_wrapper import CallWrapper, Controls, Leaving
from inprocess.live.last import LastCheckpoint
from inprocess.monitor.board import Board
from inprocess.protocol.verbs.leaving import SAVED
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


@pytest.mark.parametrize("commits", ["ABAB", "ABBA", "AA"])
def test_each_of_several_states_writes_one(commits: str) -> None:
    """One that makes no commit meanwhile is not waited for."""
    board, written, said = Board.create(), list[str](), list[str]()
    leaving, call = Leaving(15, clock.monotonic() + 60), CallWrapper(board, object)
    leaving.everybody = True
    deputy = Alone()
    deputy.say = said.append  # type: ignore[method-assign]
    Controls(call).leave_by(lambda: leaving, deputy)
    states = {name: LastCheckpoint().again(call, saves=True) for name in "AB"}
    for name in commits:
        states[name].committed(call, lambda seconds, name=name: not written.append(name), contextlib.nullcontext)
        assert leaving.is_saved == bool(said)
    board.close()
    assert written == sorted(set(commits)) and said == [SAVED]


def test_a_state_that_writes_none_takes_no_part() -> None:
    board = Board.create()
    wanted = Controls(call := CallWrapper(board, object)).last.wanted
    saves = LastCheckpoint().again(call, saves=True)
    assert wanted == {saves} and LastCheckpoint().again(call, saves=False) not in wanted
    assert saves.again(call, saves=False) not in wanted and not wanted  # the next `recover` of the same state
    board.close()
