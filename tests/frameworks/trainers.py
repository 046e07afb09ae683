"""Trainers of frameworks under faults: they go on from their own checkpoints, and end with the right weights."""

from __future__ import annotations

from typing import Any

import pytest

from inprocess.testing import At, Job, Kill, Raise

from .kept import PATIENT, check_beliefs, replaced
from .programs import accelerate_loop, lightning_fit, same, transformers_trainer

STEPS = 16
PROGRAMS = {"transformers": transformers_trainer, "lightning": lightning_fit}
#: where the fault strikes
PLACES: dict[str, dict[str, Any]] = {
    "between steps": {},
    "in the forward pass": {"label": "forward"},
    "at a checkpoint": {},
    "in the validation": {"label": "validation"},
}
AT_CHECKPOINT: dict[str, dict[str, Any]] = {"transformers": {"file": "*optimizer.pt"}, "lightning": {"label": "saving"}}
#: pings after which there is a checkpoint to go on from; Lightning's come at the end of an epoch, and validation pings
SAVED = {"transformers": 6, "lightning": 14}


def at(name: str, rank: int, place: str) -> At:
    where = AT_CHECKPOINT[name] if place == "at a checkpoint" else PLACES[place]
    return At(rank=rank, step=SAVED[name], **where)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of two ranks of each program."""
    folders = {name: str(tmp_path_factory.mktemp(name)) for name in PROGRAMS}
    return {name: Job(2, **PATIENT).run(PROGRAMS[name], STEPS, folders[name]) for name in PROGRAMS}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_raises(ranks: Any, tmp_path: Any, undisturbed: Any, name: str, place: str) -> None:
    """The same world, so the same weights as without the fault."""
    rank = 0 if place == "at a checkpoint" else 1
    if name == "transformers" and place == "in the validation":
        pytest.skip("its loss is computed by the model, as in a training step")
    run = ranks(2, **PATIENT).run(PROGRAMS[name], STEPS, str(tmp_path), faults={at(name, rank, place): Raise(OSError)})
    assert run.world_sizes == [2, 2] and run.same_pids
    run.assert_same_result(undisturbed[name])
    check_beliefs(run, 4)


@pytest.mark.parametrize("place", ["between steps", "in the forward pass"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_dies(ranks: Any, tmp_path: Any, name: str, rank: int, place: str) -> None:
    run = ranks(3, **PATIENT).run(PROGRAMS[name], STEPS, str(tmp_path), faults={at(name, rank, place): Kill()})
    assert run.world_sizes == [3, 2]
    left = [value for value in run.values if value is not None]
    assert len(left) == 2 and same(*left)
    check_beliefs(run, 5)


@pytest.mark.parametrize("fault", [Raise(OSError), Kill()], ids=["raise", "kill"])
@pytest.mark.parametrize("name", [*PROGRAMS, "accelerate"])
def test_the_workers_of_a_loader_are_being_started(ranks: Any, tmp_path: Any, name: str, fault: Any) -> None:
    """On the other ranks as well, and on all of them they end with the iteration. Those of a rank that is killed before
    they look for their parent stay, with torch alone as well."""
    program, arguments = PROGRAMS.get(name, accelerate_loop), (str(tmp_path),) if name in PROGRAMS else ()
    faults = {At(rank=1, label="workers run" if isinstance(fault, Kill) else "workers start"): fault}
    run = ranks(2, **PATIENT).run(program, STEPS, *arguments, workers=2, faults=faults)
    assert run.world_sizes == [2, 1 if isinstance(fault, Kill) else 2]
    check_beliefs(run, 3)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_dies_and_is_replaced(ranks: Any, tmp_path: Any, undisturbed: Any, name: str, rank: int) -> None:
    faults = {at(name, rank, "between steps"): Kill()}
    run = ranks(2, **replaced(2)).run(PROGRAMS[name], STEPS, str(tmp_path), faults=faults)
    assert run.world_sizes[0] == run.world_sizes[-1] == 2
    expected = undisturbed[name].values[0]
    for value in run.values:
        assert value is None or same(value, expected)
    check_beliefs(run, 4)


@pytest.mark.parametrize("name", PROGRAMS)
def test_twenty_restarts_leave_nothing(ranks: Any, tmp_path: Any, name: str) -> None:
    faults = {At(rank=i % 2, step=2, iteration=i): Raise(OSError) for i in range(20)}
    run = ranks(2, **PATIENT).run(PROGRAMS[name], STEPS, str(tmp_path), faults=faults)
    assert run.restarts == 20 and run.same_pids
    run.assert_nothing_grows()


@pytest.mark.parametrize("rank", [0, 1])
def test_accelerate_replaced(ranks: Any, rank: int) -> None:
    expected = Job(2, **PATIENT).run(accelerate_loop, STEPS)
    run = ranks(2, **replaced(2)).run(accelerate_loop, STEPS, faults={At(rank=rank, step=5): Kill()})
    for value in run.values:
        assert value is None or same(value, expected.values[0])
    check_beliefs(run, 4)
