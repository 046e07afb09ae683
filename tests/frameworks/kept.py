"""What a library believes of its rank and world after a restart is what is true."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inprocess.initialize import RetryController
from inprocess.testing import At, Kill, Raise
from tests.harness import ReservedPort

from . import deepspeed_programs
from .programs import accelerate_loop, checkpoint_process, compiled, megatron_groups

STEPS = 12
PROGRAMS = {
    "accelerate": accelerate_loop,
    "torch.compile": compiled,
    "DeepSpeed": deepspeed_programs.deepspeed_loop,
    "DeepSpeed ZeRO 1": deepspeed_programs.deepspeed_zero_1,
    "DeepSpeed ZeRO 2": deepspeed_programs.deepspeed_zero_2,
    "DeepSpeed ZeRO 3": deepspeed_programs.deepspeed_zero_3,
    "DeepSpeed activations": deepspeed_programs.deepspeed_activations,
    "Megatron-Core": megatron_groups,
}
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


def replaced(size: int) -> dict[str, Any]:
    """A job of this size waits for a replacement, which imports for longer than the others train."""
    wait = RetryController(min_world_size=size, wait_for_replacement=120)
    return {"respawn": 1, "options": {"initialize": wait}, **PATIENT}


def need(name: str) -> None:
    """Not by importing it: DeepSpeed sets variables."""
    package = PACKAGES.get(name.partition(" ")[0])
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def check_beliefs(result: Any, least: int) -> None:
    beliefs = [event for rank in result.ranks for event in rank.of("here") if event.get("label") == "belief"]
    assert len(beliefs) >= least
    assert [event["believed"] for event in beliefs] == [event["true"] for event in beliefs]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_truth_is_believed(ranks: Any, name: str, fault: str) -> None:
    need(name)
    faults, sizes = FAULTS[fault]
    if name in ("torch.compile", "Megatron-Core") and fault == "in a backward pass":
        pytest.skip("it has none")
    result = ranks(3, **PATIENT).run(PROGRAMS[name], STEPS, faults=faults)
    assert result.world_sizes == sizes
    check_beliefs(result, sum(sizes))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "accelerate"])
def test_one_dies_and_is_replaced(ranks: Any, name: str, rank: int) -> None:
    """For accelerate see ``trainers``, where its weights are compared."""
    need(name)
    result = ranks(2, **replaced(2)).run(PROGRAMS[name], STEPS, faults={At(rank=rank, step=5): Kill()})
    assert result.world_sizes == [2, 2]
    check_beliefs(result, 4)


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


@pytest.mark.parametrize("rank", [0, 1])
def test_the_checkpoint_process_of_a_replaced_rank(ranks: Any, tmp_path: Any, rank: int) -> None:
    faults = {At(rank=rank, label="saving", step=2): Kill()}
    result = ranks(2, **replaced(2)).run(checkpoint_process, 4, str(tmp_path), faults=faults)
    assert result.world_sizes == [2, 2]
    assert [value for value in result.values if value is not None] == [[True] * 4] * 2


@pytest.mark.timeout(700)
def test_the_checkpoint_process_after_twenty_restarts(ranks: Any, tmp_path: Any) -> None:
    """Each makes two new processes that import torch, which takes 13 s where both processors are busy."""
    faults = {At(rank=i % 2, step=1, iteration=i): Raise(OSError) for i in range(20)}
    result = ranks(2, deadline=600.0).run(checkpoint_process, 4, str(tmp_path), faults=faults)
    assert result.restarts == 20 and result.same_pids
    result.assert_nothing_grows()
    assert result.values == [[True] * 4] * 2


SCRIPT = """
import torch, torch.distributed as dist, inprocess

def place(ones):
    return torch.cat([ones * dist.get_rank(), ones * dist.get_world_size()])

@inprocess.Wrapper()
def train(call: inprocess.CallWrapper = None):
    dist.init_process_group("gloo")
    function = torch.compile(place, backend="eager")
    for step in range(6):
        call.ping()
        value, true = function(torch.ones(1)).tolist(), [float(dist.get_rank()), float(dist.get_world_size())]
        assert value == true, f"compiled code says {value}, but it is {true}"
        dist.barrier()
        if step == 3 and call.iteration == 0 and dist.get_rank() == 0:
            import os
            os.kill(os.getpid(), 9)
    return call.iteration

if __name__ == "__main__":
    print("iteration", train())
"""


def test_the_compiler_is_imported_while_the_function_runs(tmp_path: Path) -> None:
    """As a rule, but not in the tests above: the process that their ranks are forked from has imported it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with ReservedPort() as port:
        env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number), "WORLD_SIZE": "3"}
        ranks = [
            subprocess.Popen(
                [sys.executable, tmp_path / "train.py"],
                env=env | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(3)
        ]
        try:
            said = [rank.communicate(timeout=200)[0] for rank in ranks]
        finally:
            for rank in ranks:
                with rank:  # which closes its pipe and waits
                    rank.kill()
    assert [rank.returncode for rank in ranks] == [-9, 0, 0], "\n".join(said)
    assert [text.count("iteration 1\n") for text in said[1:]] == [1, 1], "\n".join(said)
