"""A restart while ``torch.distributed.checkpoint`` saves in a thread: the save ends, and never meets the next group."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import inprocess
from inprocess.testing import At, Kill, Raise, here

from .kept import PATIENT, replaced

STEPS = 4
#: until when the disk of the first iteration is busy
BUSY = ("for a moment", "until the function is left", "until the next group is there")


class Writer(checkpoint.FileSystemWriter):
    """To a disk that may be slower than a restart."""

    def __init__(self, path: str, call: inprocess.CallWrapper, busy: str) -> None:
        super().__init__(path)
        self.call, self.busy, self.begun = call, busy, threading.Event()

    def write_data(self, *arguments: Any) -> Any:
        self.begun.set()
        wanted = BUSY.index(self.busy)
        while wanted and (inprocess.current_call() is not None and self.call.iteration == 0):
            time.sleep(0.005)
        while wanted == 2 and not dist.is_initialized():
            time.sleep(0.005)
        return super().write_data(*arguments)


@inprocess.Wrapper()
def train(folder: str, busy: str, call: inprocess.CallWrapper = None) -> Any:  # type: ignore[assignment]
    dist.init_process_group("gloo")
    ours = dist.new_group()  # the thread has the default group to itself
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("AsyncCheckpoint")]
    here("threads", left=threads)
    saved = []
    for step in range(STEPS):
        call.ping()
        path = f"{folder}/{call.iteration}-{step}"
        writer = Writer(path, call, busy if call.iteration == 0 and step == 2 else BUSY[0])
        future = checkpoint.async_save(
            {"step": torch.tensor(step)}, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.THREAD
        )
        writer.begun.wait()
        dist.barrier(ours)
        here("saving")
        future.result()
        saved.append(os.path.exists(f"{path}/.metadata"))
        dist.barrier(ours)
    return saved


@pytest.mark.parametrize("fault", [Raise(OSError), Kill()], ids=["raise", "kill"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("busy", BUSY)
def test_a_thread_writes(ranks: Any, tmp_path: Any, busy: str, rank: int, fault: Any) -> None:
    result = ranks(3, **PATIENT).run(train, str(tmp_path), busy, faults={At(rank=rank, label="saving", step=3): fault})
    assert result.world_sizes == [3, 2 if isinstance(fault, Kill) else 3]
    left = [value for value in result.values if value is not None]
    assert left == [[True] * STEPS] * result.world_sizes[-1]
    assert busy == BUSY[0] or not (tmp_path / "0-2" / ".metadata").exists()
    found = [event["left"] for each in result.ranks for event in each.of("here", label="threads", iteration=1)]
    assert busy == BUSY[2] or not any(found)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_dies_and_is_replaced(ranks: Any, tmp_path: Any, rank: int) -> None:
    faults = {At(rank=rank, label="saving", step=2): Kill()}
    result = ranks(2, **replaced(2)).run(train, str(tmp_path), BUSY[0], faults=faults)
    assert result.world_sizes == [2, 2]
    assert [value for value in result.values if value is not None] == [[True] * STEPS] * 2


def test_twenty_restarts_leave_nothing(ranks: Any, tmp_path: Any) -> None:
    faults = {At(rank=i % 2, label="saving", step=1, iteration=i): Raise(OSError) for i in range(20)}
    result = ranks(2, **PATIENT).run(train, str(tmp_path), BUSY[0], faults=faults)
    assert result.restarts == 20 and result.same_pids
    result.assert_nothing_grows()
