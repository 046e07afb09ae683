"""Trainings on a device mesh under faults: tensor parallelism with FSDP2, a shared sequence, or a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

import inprocess
from inprocess.rank_assignment import ActiveWorldSizeDivisibleBy, ShiftRanks
from inprocess.testing import At, Job, Kill, Raise

from .kept import PATIENT, replaced
from .programs import mesh_training, same

STEPS = 12
KINDS = ("FSDP2 and TP", "CP and TP", "TP and PP")
#: after the first checkpoint
PLACES: dict[str, dict[str, Any]] = {
    "between steps": {"step": 6},
    "in a backward pass": {"label": "backward", "step": 6},
    "at an asynchronous checkpoint": {"label": "saving", "step": 6},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of each kind."""
    return {
        kind: Job(4, **PATIENT).run(mesh_training, STEPS, str(tmp_path_factory.mktemp("run")), kind) for kind in KINDS
    }


def check_weights(run: Any, expected: Any) -> None:
    """A replacement may have another place in the list of ranks; each stage of a pipeline has its own weights."""
    found = [value for value in run.values if value is not None]
    assert len(found) == 4
    known = [value for value in expected.values if value is not None]
    for value in found:
        assert any(same(value, other) for other in known)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_raises(ranks: Any, tmp_path: Any, undisturbed: Any, kind: str, place: str) -> None:
    faults = {At(rank=1, **PLACES[place]): Raise(OSError)}
    run = ranks(4, **PATIENT).run(mesh_training, STEPS, str(tmp_path), kind, faults=faults)
    assert run.world_sizes == [4, 4] and run.same_pids
    run.assert_resumed_from(4)
    run.assert_same_result(undisturbed[kind])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_one_dies_and_is_replaced(
    ranks: Any, tmp_path: Any, undisturbed: Any, kind: str, rank: int, place: str
) -> None:
    faults = {At(rank=rank, **PLACES[place]): Kill()}
    run = ranks(4, **replaced(4)).run(mesh_training, STEPS, str(tmp_path), kind, faults=faults)
    check_weights(run, undisturbed[kind])


@pytest.mark.parametrize("rank", [0, 3])
def test_one_dies_and_fewer_share_the_data(ranks: Any, tmp_path: Any, rank: int) -> None:
    options = {"rank_assignment": inprocess.Compose(ActiveWorldSizeDivisibleBy(2), ShiftRanks())}
    run = ranks(4, options=options, **PATIENT).run(
        mesh_training, STEPS, str(tmp_path), "FSDP2 and TP", faults={At(rank=rank, step=6): Kill()}
    )
    assert run.world_sizes == [4, 2]
    run.assert_resumed_from(4)


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_restarts_leave_nothing(ranks: Any, tmp_path: Any, kind: str) -> None:
    faults = {At(rank=i % 4, step=2, iteration=i): Raise(OSError) for i in range(20)}
    run = ranks(4, **PATIENT).run(mesh_training, STEPS, str(tmp_path), kind, faults=faults)
    assert run.restarts == 20 and run.same_pids
    run.assert_nothing_grows()
