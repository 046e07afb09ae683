"""``enabled=False``: who gets the CallWrapper that does nothing, what that does, what ``current_call()`` answers."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

from inprocess import call_wrapper
from inprocess.call.disabled import DisabledCall, disabled
from inprocess.call_wrapper import CallWrapper, current_call, restarting_call
from inprocess.exception import OptionError, RestartError
from inprocess.state import Mode


@pytest.fixture(autouse=True)
def nothing_current() -> Any:
    """Before and after."""
    assert current_call() is None
    yield
    assert current_call() is None and not call_wrapper._disabled


def filled(x: int = 0, call: CallWrapper = None) -> Any:
    return call, current_call()


def no_parameter(x: int) -> int:
    return x


def optional(call: Optional[CallWrapper] = None) -> Any:  # noqa: UP045 - the form under test
    return call


def union(call: CallWrapper | None = None) -> Any:
    return call


def by_name(inprocess_call_wrapper: Any = None) -> Any:
    return inprocess_call_wrapper


class Trainer:
    def method(self, call: CallWrapper = None) -> Any:
        return self, call, current_call()

    method = disabled(method)

    def __call__(self, call: CallWrapper) -> Any:
        return call, current_call()


@pytest.mark.parametrize("fn", [no_parameter, optional, union, by_name, len, functools.partial(filled, call=None)])
def test_a_function_that_does_not_ask_is_returned_itself(fn: Callable[..., Any]) -> None:
    assert disabled(fn) is fn


def test_optional_parameters_stay_as_they_are_beside_a_plain_one() -> None:
    def fn(call: CallWrapper, other: CallWrapper | None = None, inprocess_call_wrapper: Any = "default") -> Any:
        return type(call), other, inprocess_call_wrapper

    assert disabled(fn)() == (DisabledCall, None, "default")


def test_the_name_with_a_plain_annotation() -> None:
    def fn(inprocess_call_wrapper: CallWrapper) -> Any:
        return inprocess_call_wrapper, current_call()

    given, current = disabled(fn)()
    assert given is current and type(given) is DisabledCall


@pytest.mark.parametrize("fn", [filled, functools.partial(filled, 1), functools.lru_cache(filled), Trainer()])
def test_a_plain_annotation_is_filled_in_and_current(fn: Callable[..., Any]) -> None:
    given, current = disabled(fn)()
    assert given is current and isinstance(given, CallWrapper)


def test_it_looks_like_the_function() -> None:
    fn = disabled(filled)
    assert fn.__name__ == "filled" and fn.__wrapped__ is filled  # type: ignore[attr-defined]
    assert inspect.signature(fn) == inspect.signature(filled)


def test_a_method() -> None:
    trainer = Trainer()
    who, given, current = trainer.method()
    assert who is trainer and given is current is not None


@pytest.mark.parametrize("own", [None, "own", DisabledCall()], ids=["None", "other", "call"])
def test_what_the_caller_passes_wins(own: Any) -> None:
    assert disabled(filled)(1, own) == disabled(filled)(call=own) == (own, None)


def test_arguments_that_do_not_fit_are_refused_by_the_function() -> None:
    with pytest.raises(TypeError, match=r"filled\(\)"):
        disabled(filled)(1, y=2)


# --- what it does -------------------------------------------------------------------------------------------------


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> DisabledCall:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return DisabledCall()


def test_it_has_everything_that_the_other_one_has(call: DisabledCall) -> None:
    """Each public name either does nothing or says why it cannot."""
    names = {name for name in dir(CallWrapper) if not name.startswith("_")}
    assert names == {
        *("iteration", "leaving", "state", "store", "timeouts"),
        *("ping", "atomic", "section", "disable_hang_protection", "save"),
    }
    inherited = {name for name in names if name not in vars(DisabledCall)}
    assert inherited == {"timeouts", "save"}


def test_it_does_nothing(call: DisabledCall) -> None:
    for _ in range(4):
        call.ping()
        with (
            call.atomic(),
            call.atomic(),
            call.section("save"),
            call.section("save", 3),
            call.disable_hang_protection(),
        ):
            pass
    with pytest.raises(ValueError), call.atomic(), call.section("save"), call.disable_hang_protection():
        raise ValueError
    assert call.iteration == 0
    assert call.timeouts.observed.sections == {}, "a debugger may have stopped in them"


@pytest.mark.parametrize("timeout", [0, -1, timedelta(0), "soon"])
def test_it_refuses_what_the_other_one_refuses(call: DisabledCall, timeout: Any) -> None:
    with pytest.raises(OptionError, match="timeout"), call.section("save", timeout):
        pass


def test_timeouts_of_a_checkpoint_are_kept(call: DisabledCall) -> None:
    state = {**call.timeouts.state_dict(), "sections": {"save": [3, 4.0]}}
    call.timeouts.load_state_dict(state)
    assert call.timeouts.state_dict() == state
    assert call.timeouts.calculate()["sections"] == {"save": 20.0}


def test_the_store_says_what_to_do(call: DisabledCall) -> None:
    with pytest.raises(RestartError, match=r"enabled=False.*leave out store="):
        _ = call.store


@pytest.mark.parametrize(("env", "place"), [({}, (0, 1)), ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4))])
def test_state(call: DisabledCall, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], place: tuple) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    state = call.state
    assert (state.rank, state.world_size) == (state.initial_rank, state.initial_world_size) == place
    assert (state.active_rank, state.active_world_size) == place
    assert (state.mode, state.iteration, state.fn_exception) == (Mode.ACTIVE, 0, None)


def test_state_with_a_rank_that_is_no_number(call: DisabledCall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(OptionError, match="RANK='first' must be an integer"):
        _ = call.state


# --- which one is current ----------------------------------------------------------------------------------------


def test_calls_inside_one_another() -> None:
    @disabled
    def down(depth: int, call: CallWrapper = None) -> list[Any]:
        below = down(depth - 1) if depth else []
        assert current_call() is call
        return [call, *below]

    assert len(set(map(id, down(3)))) == 4


def test_after_an_error_the_outer_one_is_current_again() -> None:
    @disabled
    def inner(call: CallWrapper) -> None:
        assert current_call() is call
        raise ValueError

    @disabled
    def outer(call: CallWrapper) -> None:
        with pytest.raises(ValueError):
            inner()
        assert current_call() is call
        inner()

    with pytest.raises(ValueError):
        outer()


def test_one_that_was_given_a_call_leaves_the_current_one() -> None:
    @disabled
    def outer(call: CallWrapper) -> Any:
        return disabled(filled)(call=call) == (call, call)

    assert outer()


def test_two_wrappers_around_one_function() -> None:
    given, current = disabled(disabled(filled))()
    assert given is current is not None


def in_thread(fn: Callable[[], object]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(fn()))
    thread.start()
    thread.join()
    return found[0]


def test_in_another_thread() -> None:
    given, current = in_thread(disabled(filled))
    assert given is current is not None


def test_threads_that_the_function_starts_see_it() -> None:
    @disabled
    def fn(call: CallWrapper) -> bool:
        return in_thread(current_call) is call

    assert fn()


def test_two_threads_at_once() -> None:
    """They leave in the order in which they came; whose call is current does not matter, as long as one is."""
    here, there = threading.Event(), threading.Event()
    found: list[Any] = []

    @disabled
    def first(call: CallWrapper) -> None:
        here.set()
        there.wait()
        found.append(current_call())

    @disabled
    def second(call: CallWrapper) -> None:
        there.set()
        thread.join()
        found.append(current_call() is call)

    thread = threading.Thread(target=first)
    thread.start()
    here.wait()
    second()
    assert isinstance(found[0], DisabledCall) and found[1] is True


def test_beside_a_call_that_restarts() -> None:
    """Which is the current one, around the function as inside it."""
    real = DisabledCall()

    @disabled
    def outer(call: CallWrapper) -> Any:
        assert current_call() is call and restarting_call() is None
        call_wrapper.set_current(real)
        try:
            assert disabled(filled)() != (real, real)
            return [current_call(), restarting_call(), disabled(filled)()[1], in_thread(current_call)]
        finally:
            call_wrapper.set_current(None)
            assert current_call() is call

    assert outer() == [real] * 4


def test_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    call = DisabledCall()
    assert not call.save({"step": 3}, tmp_path / "a.pt")
    assert call.save({"step": 3}, tmp_path / "a.pt", rank=1)
    assert torch.load(tmp_path / "a.pt") == {"step": 3}
    with pytest.raises(OptionError, match="2 active ranks"):
        call.save({}, tmp_path / "a.pt", rank=2)
