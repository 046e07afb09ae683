"""The state of a training comes back from disk, once nobody has it any more; faults at every place of that."""

from __future__ import annotations

import signal

import pytest

from tests.harness import At, Kill, KillTogether, Raise

from . import checks, learning


@pytest.fixture(scope="module")
def calm():
    """What a run without faults comes to; made once."""
    return []


def result_of(launch, calm, folder, world_size=3, **options):
    """Of a run with faults, of ranks with the same result: that of one without."""
    if not calm:
        ranks = launch(learning.run_sharded, 3, args={"live": {}}).wait()
        calm += {tuple(rank.value[:3]) for rank in ranks}
        assert len(calm) == 1
    ranks = launch(learning.run_sharded, world_size, args=args(folder), **options).wait()
    finished = [rank.value for rank in ranks if rank.value is not None]
    assert {tuple(value[:3]) for value in finished} == {*calm}, ranks.exceptions
    return ranks


def args(folder, steps=6):
    return {"live": {"folder": str(folder), "save_every": 2}, "steps": steps}


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("place", "step"),
    [("before 1", 0), ("summed 3", 2), ("stage", 0), ("write", 0), ("inside 4", 4)],
)
def test_one_dies_and_is_replaced(launch, calm, tmp_path, victim, place, step):
    """All go back to the last checkpoint: the one under way is unfinished."""
    faults = {At(victim, step=place): Kill()}
    ranks = result_of(launch, calm, tmp_path, faults=faults, respawn=1)
    checks.died(ranks, {victim: -signal.SIGKILL})
    source = f"the checkpoint {tmp_path}/step_{step:08d} at {step}" if step else "nowhere at 0"
    assert ranks[3].value[3][-1] == source


def test_whoever_finishes_it_dies(launch, calm, tmp_path):
    ranks = result_of(launch, calm, tmp_path, faults={At(0, step="finish"): Kill()}, respawn=1)
    assert ranks[1].value[3] == ["nowhere at 0"] * 2
    written = sorted(path.name for path in tmp_path.iterdir())
    assert {name.partition("_b")[0] for name in written} == {f"step_{step:08d}" for step in (2, 4, 6)}
    # with the replacement there may be an iteration in between
    assert {name.partition("_b")[2] for name in written} <= {"1", "2"}


@pytest.mark.parametrize("fault", [Kill(), Raise()])
def test_a_fault_during_the_load(launch, calm, tmp_path, fault):
    faults = {At(1, step="summed 3"): Kill(), **{At(2, n, step="load"): fault for n in range(1, 4)}}
    ranks = result_of(launch, calm, tmp_path, faults=faults, respawn=2)
    assert ranks[0].value[3][-1] == f"the checkpoint {tmp_path}/step_00000002 at 2"


@pytest.mark.parametrize("place", ["inside 3", "write", "before 5"])
def test_all_die(launch, calm, tmp_path, place):
    """Another job goes on."""
    faults = {At(rank, step=place): KillTogether(3) for rank in range(3)}
    ranks = launch(learning.run_sharded, 3, args=args(tmp_path), faults=faults)
    checks.died(ranks.wait(), dict.fromkeys(range(3), -signal.SIGKILL))
    result_of(launch, calm, tmp_path)


@pytest.mark.parametrize("world_size", [2, 4])
def test_another_world_size(launch, calm, tmp_path, world_size):
    """What was written by three ranks is read by others, which are sharded otherwise."""
    result_of(launch, calm, tmp_path)
    ranks = result_of(launch, calm, tmp_path, world_size)
    assert [rank.value[3] for rank in ranks] == [[f"the checkpoint {tmp_path}/step_00000006 at 6"]] * world_size


def test_a_folder_that_is_not_shared(launch, tmp_path):
    """Rank 0 sees checkpoints, the other one does not: nobody begins at step 0 and overwrites them."""
    launch(learning.run_sharded, 1, args=args(tmp_path, 2)).wait()
    ranks = launch(learning.run_sharded_apart, 2, args=args(tmp_path)).wait()
    assert {rank.exception for rank in ranks} <= {"StateLost", "RestartAbort"}
    assert all("none of the 1 checkpoints" in rank.message for rank in ranks)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]
