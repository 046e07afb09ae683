"""Programs that save with a framework's own call: a checkpoint that a restart cut off is not continued from."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from inprocess.testing import At, Job, Kill, Raise

from .deepspeed_programs import deepspeed_checkpoints
from .kept import PATIENT, check_beliefs, need, replaced
from .programs import accelerate_checkpoints, same

STEPS = 12
PROGRAMS = {
    "accelerate": accelerate_checkpoints,
    **{f"DeepSpeed ZeRO {stage}": partial(deepspeed_checkpoints, stage=stage) for stage in range(4)},
}
#: a file of a checkpoint that rank 0 writes. The first checkpoint is whole when the fault strikes
FILES = {"accelerate": "optimizer.bin", "DeepSpeed": "*model_states.pt"}


def torn(name: str, fault: Any) -> dict[Any, Any]:
    return {At(rank=0, step=6, file=FILES[name.partition(" ")[0]]): fault}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights at the end, of each program once."""
    known: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in known:
            folder = str(tmp_path_factory.mktemp("run"))
            known[name] = Job(2, **PATIENT).run(PROGRAMS[name], STEPS, folder).values[0]
        return known[name]

    return of


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_raises(ranks: Any, tmp_path: Any, undisturbed: Any, name: str) -> None:
    need(name)
    result = ranks(2, **PATIENT).run(PROGRAMS[name], STEPS, str(tmp_path), faults=torn(name, Raise(OSError)))
    assert result.world_sizes == [2, 2] and result.same_pids
    result.assert_resumed_from(4)
    assert all(same(value, undisturbed(name)) for value in result.values)
    check_beliefs(result, 4)


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_dies_and_is_replaced(ranks: Any, tmp_path: Any, undisturbed: Any, name: str) -> None:
    need(name)
    result = ranks(2, **replaced(2)).run(PROGRAMS[name], STEPS, str(tmp_path), faults=torn(name, Kill()))
    assert result.world_sizes == [2, 2]
    result.assert_resumed_from(4)
    assert all(value is None or same(value, undisturbed(name)) for value in result.values)
    check_beliefs(result, 4)
