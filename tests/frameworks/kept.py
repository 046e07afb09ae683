"""What a library believes of its rank and world after a restart is what is true."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from inprocess.testing import At, Kill, Raise

from .programs import PROGRAMS, checkpoint_process

STEPS = 12
#: a rank's first iteration imports the framework, on a busy machine for many seconds
PATIENT = {"deadline": 300.0}
FAULTS = {
    "a rank raises": ({At(rank=1, step=3): Raise(OSError)}, [3, 3]),
    "rank 0 dies": ({At(rank=0, step=3): Kill()}, [3, 2]),
    "another one dies": ({At(rank=1, step=3): Kill()}, [3, 2]),
    "in a backward pass": ({At(rank=2, label="backward", step=4): Kill()}, [3, 2]),
    "two die, one after the other": ({At(rank=0, step=3): Kill(), At(rank=2, step=3, iteration=1): Kill()}, [3, 2, 1]),
}
PACKAGES = {"accelerate": "accelerate", "DeepSpeed": "deepspeed", "Megatron-Core": "megatron"}


def need(name: str) -> None:
    """Not by importing it: DeepSpeed sets variables."""
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{name} is not installed")


def check_beliefs(result: Any, least: int) -> None:
    beliefs = [event for rank in result.ranks for event in rank.of("here") if event.get("label") == "belief"]
    assert len(beliefs) >= least
    assert [event["believed"] for event in beliefs] == [event["true"] for event in beliefs]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_truth_is_believed(ranks: Any, name: str, fault: str) -> None:
    need(name)
    faults, sizes = FAULTS[fault]
    if name not in ("accelerate", "DeepSpeed") and fault == "in a backward pass":
        pytest.skip("it has none")
    result = ranks(3, **PATIENT).run(PROGRAMS[name], STEPS, faults=faults)
    assert result.world_sizes == sizes
    check_beliefs(result, sum(sizes))


@pytest.mark.parametrize("name", PROGRAMS)
def test_twenty_restarts_leave_nothing(ranks: Any, name: str) -> None:
    need(name)
    faults = {At(rank=i % 2, step=2, iteration=i): Raise(OSError) for i in range(20)}
    result = ranks(2, **PATIENT).run(PROGRAMS[name], STEPS, faults=faults)
    assert result.restarts == 20 and result.same_pids
    result.assert_nothing_grows()
    check_beliefs(result, 42)


@pytest.mark.parametrize("fault", [Raise(OSError), Kill()], ids=["raise", "kill"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", [{"step": 2}, {"label": "saving", "step": 2}], ids=["between", "saving"])
def test_the_checkpoint_process_is_made_anew(
    ranks: Any, tmp_path: Any, fault: Any, rank: int, place: dict[str, Any]
) -> None:
    result = ranks(3, **PATIENT).run(checkpoint_process, 4, str(tmp_path), faults={At(rank=rank, **place): fault})
    assert result.world_sizes == [3, 2 if isinstance(fault, Kill) else 3]
    left = [value for value in result.values if value is not None]
    assert left == [[True] * 4] * result.world_sizes[-1]
