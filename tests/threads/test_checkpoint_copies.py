"""The copy of the state that a checkpoint is written from: its memory is used again, but not while it is being read."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from inprocess import LiveState
from inprocess.call_wrapper import CallWrapper, Controls
from inprocess.interrupt.signals import Interrupter
from inprocess.live import checkpoints
from inprocess.live.checkpoints import Checkpoints, Staged
from inprocess.live.present import LiveParts
from inprocess.monitor.board import Board
from inprocess.state import State
from tests.harness.stuck import Stuck, install

from .test_live_state import setup_module  # noqa: F401  (setup_module runs here too)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Weights(torch.nn.Module):
    """Tensors, all of one value."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for tensor in self.all:
                tensor.fill_(value)

    @property
    def values(self) -> set[float]:
        return {value for tensor in self.all for value in tensor.detach().flatten().tolist()}


def commit(live: LiveState, weights: Weights, step: int) -> None:
    with live.commit(step):
        weights.fill(step)


def loaded(folder: Any, *shapes: tuple[int, ...]) -> set[float]:
    """What is in the newest checkpoint."""
    weights = Weights(*shapes)
    assert LiveState(weights=weights, folder=folder).recover() > 0
    return weights.values


def where(disk: Checkpoints) -> dict[str, int]:
    return {name: copy.data_ptr() for name, copy in disk._copies.items() if name != checkpoints.REST}


def stage(disk: Checkpoints, weights: torch.nn.Module) -> Staged:
    return disk.stage(1, LiveParts({"weights": weights}), "", leads=False)


@pytest.fixture
def disk(tmp_path: Path) -> Checkpoints:
    return Checkpoints(str(tmp_path), 3)


def test_each_checkpoint_is_copied_to_where_the_one_before_was(tmp_path: Path) -> None:
    weights = Weights((100, 3), (7,), ())
    live = LiveState(weights=weights, folder=tmp_path, save_every=1)
    live.recover()
    places, sizes = set[Any](), set[int]()
    for step in range(1, 6):
        commit(live, weights, step)
        live.wait()
        places.add(tuple(where(live._saving.disk).values()))  # type: ignore[arg-type]
        sizes.add(live.nbytes)
    assert len(places) == len(sizes) == 1
    assert sizes.pop() > 4 * (300 + 7 + 1)
    assert loaded(tmp_path, (100, 3), (7,), ()) == {5.0}


def test_what_does_not_fit_gets_other_room(disk: Checkpoints) -> None:
    """Shapes and types change where ranks are sharded anew; what is not needed any more is not kept."""
    old = stage(disk, Weights((4, 2), (3,), (5,)))
    freed = weakref.ref(old.copies["weights.all.2"])
    same, before = where(disk)["weights.all.1"], disk.nbytes
    del old
    new = stage(disk, Weights((2, 4), (3,)))
    assert {name: tuple(copy.shape) for name, copy in new.copies.items()} == {
        "weights.all.0": (2, 4),
        "weights.all.1": (3,),
    }
    assert where(disk)["weights.all.1"] == same
    assert freed() is None and disk.nbytes == before - 20
    half = stage(disk, Weights((2, 4), (3,), dtype=torch.bfloat16))
    assert {copy.dtype for copy in half.copies.values()} == {torch.bfloat16}
    assert disk.nbytes == 2 * (8 + 3)


def test_no_copy_is_made_into_what_is_being_written(disk: Checkpoints) -> None:
    weights, may_end = Weights((4, 2)), threading.Event()
    weights.fill(1)
    written = stage(disk, weights)
    disk.writer.begin(1, may_end.wait)
    weights.fill(2)
    other = stage(disk, weights).copies["weights.all.0"].data_ptr()
    assert set(written.copies["weights.all.0"].flatten().tolist()) == {1.0}
    may_end.set()
    assert disk.writer.ended(10)
    weights.fill(3)
    assert stage(disk, weights).copies["weights.all.0"].data_ptr() == other


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[str]:
    install()
    yield f"stuck://{tmp_path}"
    Stuck.come_back()


def test_a_slow_disk_gets_what_was_there_when_it_began(stuck: str) -> None:
    weights = Weights((100, 3))
    live = LiveState(weights=weights, folder=stuck, save_every=1)
    live.recover()
    commit(live, weights, 1)
    live.wait()
    before = live.nbytes
    Stuck.hang()
    for step in range(2, 6):  # the first one is begun, the others are left out
        commit(live, weights, step)
        assert live.nbytes == before
    assert Stuck.asked.wait(60)
    Stuck.come_back()
    live.wait()
    assert loaded(stuck, (100, 3)) == {2.0}


def test_the_end_of_the_call_gives_it_back(stuck: str, interrupter: Interrupter) -> None:
    """What is being written then is written to its end; the next call begins anew."""
    weights, board = Weights((100, 3)), Board.create()
    live = LiveState(weights=weights, folder=stuck, save_every=1)
    for begin in (0, 1):
        call = CallWrapper(board, lambda: None)
        Controls(call).place(State(0, 1).freeze())
        Controls(call).gate = interrupter.new_gate()
        live.recover(call)
        live.recover(call)
        Stuck.hang()
        commit(live, weights, begin + 1)
        assert live.nbytes > 1200
        Controls(call).end()
        assert live.nbytes == 0
        Stuck.come_back()
        live.wait()
        assert loaded(stuck, (100, 3)) == {begin + 1.0}
    board.close()


def test_shards_leave_nothing_of_their_iteration(disk: Checkpoints, excepthook: None) -> None:
    """Neither the mesh, which has the process group, nor the data on the device, though the disk may hang for hours."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    weights = torch.nn.Module()
    weights.one = torch.nn.Parameter(distribute_tensor(torch.ones(7, 2), mesh, [Shard(0)], src_data_rank=None))
    staged = stage(disk, weights)
    outline, copy = staged.state["weights.one"], staged.copies["weights.one"]
    assert isinstance(outline, DTensor) and outline.to_local().is_meta
    assert (outline.shape, outline.placements, outline.dtype) == ((7, 2), (Shard(0),), torch.float32)
    assert type(copy) is torch.Tensor and copy.shape == (4, 2) and copy.eq(1).all()
    dist.destroy_process_group()
