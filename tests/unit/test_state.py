"""State: the two generations' words agree, copies are shallow, the frozen form is read-only."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from inprocess.state import FrozenState, Mode, State, Status


def make() -> State:
    return State(rank=1, world_size=4, initial_rank=2, initial_world_size=5)


@pytest.mark.parametrize("mode", Mode)
def test_status_and_mode_agree(mode: Mode) -> None:
    state = make()
    state.mode = mode
    assert state.status is state.freeze().status is Status(mode.value)
    other = make()
    other.status = state.status
    assert other.mode is mode


def test_both_words_for_the_beginning() -> None:
    assert Status.INITIALIZED is Status.UNINITIALIZED is make().status


def test_freeze_and_thaw_keep_every_field() -> None:
    class Locked(Exception):
        def __init__(self) -> None:
            self.lock = threading.Lock()  # cannot be copied

    state = make()
    state.active_rank, state.active_world_size, state.mode, state.iteration = 1, 3, Mode.ACTIVE, 7
    state.fn_exception = Locked()
    frozen = state.freeze()
    assert isinstance(frozen, FrozenState)
    assert frozen.freeze() is frozen
    assert frozen.fn_exception is state.fn_exception
    assert frozen.thaw() == state
    assert [f.name for f in dataclasses.fields(State)] == [f.name for f in dataclasses.fields(FrozenState)]


def test_frozen_is_read_only_and_replaceable() -> None:
    frozen = make().freeze()
    for name in ("rank", "status"):
        with pytest.raises(AttributeError):
            setattr(frozen, name, 0)
    assert dataclasses.replace(frozen, rank=3).rank == 3
    assert frozen.rank == 1
    assert hash(frozen) == hash(make().freeze())


def test_repr_does_not_call_the_exceptions_own() -> None:
    class Broken(Exception):
        def __repr__(self) -> str:
            raise RuntimeError

    state = make()
    state.fn_exception = Broken()
    assert "rank=1" in repr(state) + repr(state.freeze())
