"""ThreadedFinalize: runs, passes errors on, and does not wait for ever."""

from __future__ import annotations

import datetime
import threading

import pytest

from inprocess.call.hooks import adapt
from inprocess.exception import OptionError, TimeoutError
from inprocess.finalize import ThreadedFinalize
from inprocess.state import FrozenState, State

STATE = FrozenState(rank=0, world_size=1, initial_rank=0, initial_world_size=1)


def test_runs_in_a_thread_with_its_arguments() -> None:
    seen = []

    def fn(*args: int, **kwargs: int) -> None:
        seen.append((args, kwargs, threading.current_thread() is threading.main_thread()))

    assert ThreadedFinalize(datetime.timedelta(seconds=5), fn, (1, 2), {"a": 3})(STATE) is STATE
    assert ThreadedFinalize(5, fn)(STATE) is STATE
    assert seen == [((1, 2), {"a": 3}, False), ((), {}, False)]


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3)])
def test_errors_are_passed_on(error: BaseException) -> None:
    def fn() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        ThreadedFinalize(5, fn)(STATE)
    assert caught.value is error


def test_gives_up_after_its_timeout() -> None:
    release, left = threading.Event(), threading.Event()

    def fn() -> None:
        release.wait()
        left.set()

    try:
        with pytest.raises(TimeoutError, match=r"timeout=0\.01s"):
            ThreadedFinalize(0.01, fn)(STATE)
    finally:
        release.set()
    assert left.wait(5)


def test_arguments_are_checked() -> None:
    with pytest.raises(OptionError, match="timeout='1'"):
        ThreadedFinalize("1", print)
    with pytest.raises(OptionError, match="fn=3"):
        ThreadedFinalize(1, 3)
    for args in ("abc", 5):
        with pytest.raises(OptionError, match=f"args={args!r}"):
            ThreadedFinalize(1, print, args)
    with pytest.raises(OptionError, match="kwargs="):
        ThreadedFinalize(1, print, kwargs=[1])


def test_in_the_older_form() -> None:
    state, error, called = State(0, 1), ValueError(), []
    finalize = ThreadedFinalize(30, called.append, (1,))
    assert finalize(state, error) == (state, error)
    assert called == [1]
    assert adapt("finalize", finalize)(state.freeze()) == state.freeze()
