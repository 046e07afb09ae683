"""Trainers that keep their state in memory, under faults: they go on from the last step, with the same weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from inprocess.testing import At, Job, Kill, Raise

from .kept import PATIENT, check_beliefs, replaced
from .live_programs import lightning_live, refused, transformers_live
from .programs import same

STEPS = 16
NAMES = ("transformers", "lightning", "lightning, steps")
FRAMEWORKS = NAMES[:2]
#: where a fault strikes; an epoch has 8 steps in transformers, and 4 in Lightning
PLACES: dict[str, dict[str, Any]] = {
    "between steps": {"label": "step", "step": 7},
    "in a forward pass": {"label": "forward", "step": 7},
    "while parameters change": {"label": "commit", "step": 7},
    "in an evaluation": {"label": "evaluation"},
    "at a checkpoint": {"label": "saving"},
    "at the end of an epoch": {"label": "epoch"},
    "at the end": {"label": "end"},
}


def program(name: str) -> tuple[Any, dict[str, int]]:
    if name == "transformers":
        return transformers_live, {}
    return lightning_live, {} if "steps" in name else {"epochs": 4}


def run(job: Job, name: str, folder: Any, **more: Any) -> Any:
    function, arguments = program(name)
    return job.run(function, STEPS, str(folder), **arguments, **more)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A run of two ranks, by name; made when it is first asked for."""
    return functools.cache(lambda name: run(Job(2, **PATIENT), name, tmp_path_factory.mktemp("run")))


def check_resumed(result: Any, times: int = 1, lost: int = 0) -> None:
    """All ranks of an iteration go on from the same step: the newest that any rank had said was done, or one that was
    done before the rank could say so. ``lost``: steps that only a rank may have done which was killed."""
    told = [event for rank in result.ranks for event in rank.of("here")]
    resumed = {event["iteration"]: set() for event in told if event["label"] == "resume" and event["iteration"]}
    assert len(resumed) == times
    for event in told:
        if event["label"] == "resume" and event["iteration"]:
            resumed[event["iteration"]].add(event["step"])
    for iteration, steps in resumed.items():
        numbers = [event["number"] for event in told if event["label"] == "step" and event["iteration"] < iteration]
        (step,) = steps
        assert -lost <= step - max(numbers, default=0) <= 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_one_raises(ranks: Any, tmp_path: Any, undisturbed: Any, name: str, place: str) -> None:
    if place in ("at a checkpoint", "at the end of an epoch") and name == "transformers":
        pytest.skip("it writes one in test_no_rank_has_a_state; its epochs have no program of the user's at their end")
    rank, saves = (0, {"save_steps": 8}) if place == "at a checkpoint" else (1, {})
    result = run(ranks(2, **PATIENT), name, tmp_path, faults={At(rank=rank, **PLACES[place]): Raise(OSError)}, **saves)
    assert result.world_sizes == [2, 2] and result.same_pids
    result.assert_same_result(undisturbed(name))
    if (name, place) != ("lightning, steps", "at the end"):  # where Lightning has no training to begin
        check_resumed(result)
    check_beliefs(result, 4)
    if "evaluation" in place:  # it is done again, and not left out
        assert len(result.ranks[0].of("here", label="evaluated")) == len(
            undisturbed(name).ranks[0].of("here", label="evaluated")
        )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_one_dies(ranks: Any, tmp_path: Any, name: str, rank: int) -> None:
    result = run(ranks(3, **PATIENT), name, tmp_path, faults={At(rank=rank, label="forward", step=4): Kill()})
    assert result.world_sizes == [3, 2]
    left = [value for value in result.values if value is not None]
    assert len(left) == 2 and same(*left)
    check_resumed(result, lost=1)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_one_dies_and_is_replaced(ranks: Any, tmp_path: Any, undisturbed: Any, name: str, rank: int) -> None:
    """The new process gets the state from the other one."""
    faults = {At(rank=rank, label="step", step=7): Kill()}
    result = run(ranks(2, **replaced(2)), name, tmp_path, faults=faults)
    check_same(result, undisturbed(name))
    check_resumed(result, lost=1)


def check_same(result: Any, expected: Any) -> None:
    assert result.world_sizes[0] == result.world_sizes[-1] == 2
    found = [value for value in result.values if value is not None]
    assert len(found) == 2
    assert all(same(value, expected.values[0]) for value in found)


@pytest.mark.parametrize("fault", [Raise(OSError), Kill()], ids=["raise", "kill"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_fault_while_it_recovers(ranks: Any, tmp_path: Any, undisturbed: Any, name: str, fault: Any) -> None:
    """Also the folder that tells a Trainer its step is gone in the end, which `Job.run` checks."""
    faults = {At(rank=1, label="step", step=7): Raise(OSError), At(rank=0, label="recovering", iteration=1): fault}
    result = run(ranks(2, **replaced(2)), name, tmp_path, faults=faults)
    check_same(result, undisturbed(name))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_no_rank_has_a_state(ranks: Any, tmp_path: Any, name: str) -> None:
    """It is torn on the only rank, so the checkpoint on the disk counts."""
    expected = run(ranks(1, **PATIENT), name, tmp_path / "undisturbed", save_steps=8)
    faults = {At(rank=0, label="commit", step=13 if name == "transformers" else 28): Raise(OSError)}
    result = run(ranks(1, **PATIENT), name, tmp_path / "run", save_steps=8, faults=faults)
    assert [event["step"] for event in result.ranks[0].of("here", label="resume")] == [0, 8]
    assert same(result.values[0], expected.values[0])


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_twenty_restarts_leave_nothing(ranks: Any, tmp_path: Any, undisturbed: Any, name: str) -> None:
    pings = [i % 2 if name == "transformers" else 2 * (i % 2) for i in range(20)]  # every other time after a step
    pings[0] = 5  # Lightning validates a little, at its first beginning
    faults = {At(rank=i % 2, label="forward", step=pings[i], iteration=i): Raise(OSError) for i in range(20)}
    result = run(ranks(2, **PATIENT), name, tmp_path, faults=faults)
    assert result.restarts == 20 and result.same_pids
    result.assert_same_result(undisturbed(name))
    result.assert_nothing_grows()
    check_resumed(result, 20)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_sharded_state_is_refused(ranks: Any, name: str) -> None:
    (said,) = ranks(1, **PATIENT).run(refused, name).values
    assert said.startswith("live=...: ") and "the same on all ranks" in said
