"""RetryController: each limit ends the job, with the numbers in the message."""

from __future__ import annotations

from datetime import timedelta

import pytest

from inprocess.exception import OptionError, RestartAbort, TooFewRanks
from inprocess.initialize import RetryController
from inprocess.state import FrozenState
from inprocess.system import clock


def state(iteration: int = 0, world_size: int = 4, active: int = 4) -> FrozenState:
    return FrozenState(
        rank=0,
        world_size=world_size,
        active_rank=0,
        active_world_size=active,
        initial_rank=0,
        initial_world_size=4,
        iteration=iteration,
    )


def test_within_the_limits() -> None:
    for controller in (RetryController(), RetryController(3, 2, 2), RetryController(max_iterations=None)):
        assert controller(state(2, 2, 2)) == state(2, 2, 2)


@pytest.mark.parametrize(
    ("at", "words"),
    [
        (state(3), "iteration=3 reached max_iterations=3"),
        (state(4), "iteration=4 reached max_iterations=3"),
        (state(0, 1, 2), "world_size=1 is less than min_world_size=3"),
        (state(0, 3, 1), "active_world_size=1 is less than min_active_world_size=2"),
        (state(3, 1, 1), "max_iterations=3; world_size=1 .*; active_world_size=1"),
    ],
)
def test_beyond_them(at: FrozenState, words: str) -> None:
    with pytest.raises(RestartAbort, match=words):
        RetryController(3, 3, 2)(at)


def test_it_waits_from_the_first_iteration_with_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    controller = RetryController(min_world_size=3, wait_for_replacement=timedelta(seconds=10))
    for then, left in ((0, 10), (4, 6)):
        now[0] = 100.0 + then
        with pytest.raises(TooFewRanks, match="nobody came within wait_for_replacement=10s") as found:
            controller(state(1, 2))
        assert found.value.patience == left
    assert controller(state(2, 3)) == state(2, 3)
    with pytest.raises(TooFewRanks) as found:
        controller(state(3, 2))
    assert found.value.patience == 10
    now[0] += 10
    with pytest.raises(RestartAbort, match=r"world_size=2 is less than min_world_size=3$"):
        controller(state(4, 2))


@pytest.mark.parametrize(("ends", "iteration"), [(10, 0), (4, 0), (4, 1)])
def test_another_call_waits_anew(monkeypatch: pytest.MonkeyPatch, ends: float, iteration: int) -> None:
    """Whether the call before ended because nobody came, or for another reason."""
    now = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    controller = RetryController(min_world_size=3, wait_for_replacement=10)
    for then, number in ((0, 2), (ends, 3)):
        now[0] = 100.0 + then
        with pytest.raises(RestartAbort):
            controller(state(number, 2))
    now[0] += 20
    with pytest.raises(TooFewRanks) as found:
        controller(state(iteration, 2))
    assert found.value.patience == 10


def test_with_too_many_iterations_it_does_not_wait() -> None:
    with pytest.raises(RestartAbort, match="max_iterations=1; world_size=2") as found:
        RetryController(1, 3, wait_for_replacement=10)(state(1, 2))
    assert not isinstance(found.value, TooFewRanks)


@pytest.mark.parametrize("name", ["max_iterations", "min_world_size", "min_active_world_size"])
@pytest.mark.parametrize("value", [0, "3", 2.5, True])
def test_limits_are_checked(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"{name}={value!r}"):
        RetryController(**{name: value})
