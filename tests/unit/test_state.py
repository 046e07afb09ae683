"""State: the two generations' words agree, copies are shallow, the frozen form is read-only."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from typing import Any

import pytest

from inprocess.exception import OptionError
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
    assert make().status.name == "INITIALIZED"


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


@pytest.mark.parametrize(("variables", "place"), [({}, (0, 1)), ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8))])
def test_a_state_without_arguments_reads_the_environment(
    variables: dict[str, str], place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    state = State()
    assert place == (state.rank, state.world_size) == (state.initial_rank, state.initial_world_size)
    assert (state.active_rank, state.active_world_size) == place
    assert state.status is Status.INITIALIZED
    assert (state.iteration, state.fn_exception, state.store) == (0, None, None)
    newer = State.from_env()
    assert newer == State(*place)
    assert (newer.active_rank, newer.active_world_size) == (None, 0)


def test_a_variable_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(OptionError, match="RANK='first' must be an integer"):
        State()


@pytest.mark.parametrize("make", [State, FrozenState])
def test_a_state_by_position(make: Any) -> None:
    state = make(1, 4)
    assert (state.initial_rank, state.initial_world_size, state.mode) == (1, 4, Mode.INITIALIZED)
    assert make(1, 4, 0, 2, 2, 5, 7, Mode.ACTIVE) == make(
        rank=1,
        world_size=4,
        active_rank=0,
        active_world_size=2,
        initial_rank=2,
        initial_world_size=5,
        iteration=7,
        mode=Mode.ACTIVE,
    )
    assert dataclasses.replace(state, rank=0).initial_rank == 1
    assert pickle.loads(pickle.dumps(state)) == state
    with pytest.raises(TypeError, match="world_size"):
        make(1)


def test_a_terminated_rank_has_none() -> None:
    assert State(None, 4, initial_rank=2).rank is None  # type: ignore[arg-type]


def test_every_attribute_can_be_set() -> None:
    state = State(0, 1)
    for field in dataclasses.fields(State):
        setattr(state, field.name, value := object())
        assert getattr(state, field.name) is value


@pytest.mark.parametrize(
    ("status", "mode", "active_rank"),
    [
        (Status.INITIALIZED, Mode.INITIALIZED, None),
        (Status.ACTIVE, Mode.ACTIVE, 1),
        (Status.INACTIVE, Mode.INACTIVE, None),
        (Status.TERMINATED, Mode.TERMINATED, None),
        (Status.ABORTING, Mode.ACTIVE, 1),
        (Status.ABORTED, Mode.ACTIVE, 1),
    ],
)
def test_every_status_can_be_set(status: Status, mode: Mode, active_rank: int | None) -> None:
    state = make()
    state.status = status
    assert (state.mode, state.active_rank) == (mode, active_rank)
    assert state.status is Status(mode.value)


def test_the_store_stays_with_copies_and_is_no_part_of_the_value() -> None:
    state = make()
    state.store = object()
    assert state == make() and hash(state.freeze()) == hash(make().freeze())
    assert state.freeze().thaw().store is dataclasses.replace(state, rank=0).store is state.store
