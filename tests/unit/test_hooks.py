"""Hooks of both generations behave alike once adapted; a wrong one is refused by name."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from inprocess.call.hooks import adapt, adapt_rank_assignment
from inprocess.compose import Compose
from inprocess.exception import OptionError
from inprocess.health_check import FaultCounter
from inprocess.state import FrozenState, State

ERROR = ValueError("boom")
STATE = State(rank=0, world_size=2, initial_rank=0, initial_world_size=2, fn_exception=ERROR).freeze()


class _NoTruth:
    """As a tensor with several elements."""

    def __bool__(self):
        raise RuntimeError("ambiguous")


NO_TRUTH = _NoTruth()


class Method:
    def newer(self, state):
        return dataclasses.replace(state, iteration=1)

    def older(self, state, exception):
        assert exception is ERROR
        return dataclasses.replace(state, iteration=2)

    def __call__(self, state):
        return dataclasses.replace(state, iteration=3)


def older_by_name(state, exception=None):
    assert exception is ERROR
    return dataclasses.replace(state, iteration=4)


def older_by_its_own_name(state, train_ex=None):
    assert train_ex is ERROR
    return dataclasses.replace(state, iteration=4), train_ex


def newer_with_option(state, extra=False):
    assert extra is False
    return dataclasses.replace(state, iteration=5)


def newer_with_a_number(state, max_errors=3, error_limit=2):
    assert (max_errors, error_limit) == (3, 2)
    return dataclasses.replace(state, iteration=5)


def newer_with_a_flag(state, override=False):
    assert override is False
    return dataclasses.replace(state, iteration=5)


def newer_with_a_word(state, error="none"):
    assert error == "none"
    return dataclasses.replace(state, iteration=5)


def newer_with_falsy_words(state, raise_on_error=False, stderr=None):
    assert (raise_on_error, stderr) == (False, None)
    return dataclasses.replace(state, iteration=5)


def newer_with_a_tensor(state, weights=NO_TRUTH):
    assert weights is NO_TRUTH
    return dataclasses.replace(state, iteration=5)


def with_bound_argument(kind, state):
    return dataclasses.replace(state, iteration=kind)


def with_thawed_state(state):
    state = state.thaw()
    state.iteration = 7
    return state


@pytest.mark.parametrize(
    ("hook", "iteration"),
    [
        (Method().newer, 1),
        (Method().older, 2),
        (Method(), 3),
        (older_by_name, 4),
        (older_by_its_own_name, 4),
        (newer_with_option, 5),
        (newer_with_a_number, 5),
        (newer_with_a_flag, 5),
        (newer_with_a_word, 5),
        (newer_with_falsy_words, 5),
        (newer_with_a_tensor, 5),
        (functools.partial(with_bound_argument, 6), 6),
        (with_thawed_state, 7),
        (lambda *args: dataclasses.replace(*args, iteration=8), 8),
        (lambda state, exc: (dataclasses.replace(state, iteration=9), exc), 9),
        (lambda state: None, 0),
        (lambda state, exception: None, 0),
        (print, 0),
        (Compose(lambda state: dataclasses.replace(state, iteration=state.iteration + 10), Method().older), 12),
        (Compose(Compose(Method().newer, lambda state, exception: None), lambda state: None), 1),
    ],
)
def test_both_generations(hook: object, iteration: int, capsys: pytest.CaptureFixture[str]) -> None:
    result = adapt("finalize", hook)(STATE)
    assert isinstance(result, FrozenState)
    assert result.iteration == iteration
    assert result.fn_exception is ERROR


def test_an_older_hook_may_change_the_exception() -> None:
    assert adapt("health_check", lambda state, exception: (state, None))(STATE).fn_exception is None
    assert adapt("health_check", lambda state, exception: (None, None))(STATE).fn_exception is None


def test_no_hook_stays_none() -> None:
    assert adapt("abort", None) is None


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (3, "abort=3 cannot be called"),
        (FaultCounter, r"abort=FaultCounter is a class: pass an instance"),
        (lambda: None, r"abort=.*must take \(state\), or \(state, exception\).*it takes \(\)"),
        (lambda a, b, c: None, r"it takes \(a, b, c\)"),
        (lambda state, *, needed: None, "needed"),
        (Compose(lambda state: None, lambda: None), r"it takes \(\)"),
    ],
)
def test_hooks_that_fit_neither_generation(hook: object, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        adapt("abort", hook)


@pytest.mark.parametrize("result", [3, "state", (), (STATE,), True])
@pytest.mark.parametrize("generation", [1, 2])
def test_wrong_results_name_the_option(result: object, generation: int) -> None:
    hook = (lambda state: result) if generation == 1 else (lambda state, exception: result)
    with pytest.raises(TypeError, match=r"completion=.*returned an object of type"):
        adapt("completion", hook)(STATE)


@pytest.mark.parametrize(
    ("assignment", "rank_filter", "words"),
    [
        (3, None, "rank_assignment=3 cannot be called"),
        (lambda: None, None, r"rank_assignment=.*must take \(ctx\)"),
        (lambda ctx: ctx, 3, "rank_filter=3 cannot be called"),
        (lambda ctx: ctx, lambda a, b: a, r"rank_filter=.*must take \(state\)"),
    ],
)
def test_wrong_rank_assignments(assignment: object, rank_filter: object, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        adapt_rank_assignment(assignment, rank_filter)


def test_a_hook_whose_own_words_raise() -> None:
    class Hostile:
        def __call__(self, state: object) -> int:
            return 3

        def __repr__(self) -> str:
            raise SystemExit

    with pytest.raises(TypeError, match="an object of type Hostile"):
        adapt("completion", Hostile())(STATE)


@pytest.mark.parametrize("name", ["abort", "finalize"])
def test_all_parts_of_an_abort_run(name):
    """Whatever one of them raises: another one aborts the groups."""
    ran: list[str] = []

    def part(ends: BaseException | None, mark: str, state: FrozenState) -> FrozenState:
        ran.append(f"{mark} {state.iteration}")
        if ends is not None:
            raise ends
        return dataclasses.replace(state, iteration=state.iteration + 1)

    errors = [SystemExit(), OSError("disk full")]
    given = [(errors[1], "d"), (None, "c"), (errors[0], "b"), (None, "a")]
    hook = adapt(name, Compose(*[functools.partial(part, *each) for each in given]))
    with pytest.raises((OSError, SystemExit)) as found:
        hook(STATE)
    first = STATE.iteration
    if name == "abort":
        assert ran == [f"a {first}", f"b {first + 1}", f"c {first + 1}", f"d {first + 2}"]
        assert (found.value, found.value.__context__) == (errors[1], errors[0])
    else:
        assert ran == [f"a {first}", f"b {first + 1}"]
