"""The parts of a LiveState: what another rank gets of them, and what they get back, is what they were at the commit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as ShardOf
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from inprocess import LiveState
from inprocess.live import transfer, tree
from inprocess.live.plan import Shard

from .test_live_state import Faulty, Part, parts, setup_module, train, values  # noqa: F401  (setup_module runs here too)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


# --- shards -----------------------------------------------------------------------------------------------------------


def shards(names: str, placements: list[Any]) -> Iterator[tuple[list[int], Shard]]:
    """What each of eight ranks has of eight rows, and as which shard. Rows are split by ``t``, each part by ``f``."""
    for rank in range(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        mesh = DeviceMesh("cpu", torch.arange(8).view(2, 2, 2), mesh_dim_names=tuple(names))
        where = dict(zip(names, mesh.get_coordinate() or (), strict=True))
        rows = torch.arange(8).chunk(2)[where["t"]].chunk(2)[where["f"]]
        tensor = DTensor.from_local(torch.zeros(2, 3), mesh, placements, run_check=False)
        yield rows.tolist(), tree.shard_of({"model": {"weight": tensor}})
        dist.destroy_process_group()


@pytest.mark.usefixtures("excepthook")
@pytest.mark.parametrize(
    ("names", "placements"),
    [
        ("rft", [Replicate(), _StridedShard(0, split_factor=2), ShardOf(0)]),  # as by fully_shard, of parallel layers
        ("frt", [_StridedShard(0, split_factor=2), Replicate(), ShardOf(0)]),
        ("ftr", [_StridedShard(0, split_factor=2), ShardOf(0), Replicate()]),
        ("tfr", [ShardOf(0), ShardOf(0), Partial()]),
    ],
)
def test_ranks_with_other_rows_are_no_replicas(names: str, placements: list[Any]) -> None:
    """And those with the same ones are."""
    found = list(shards(names, placements))
    for (rows, shard), (other_rows, other_shard) in itertools.combinations(found, 2):
        assert (rows == other_rows) == (shard == other_shard), found
    assert {shard.count for _, shard in found} == {4}


# --- on the way -------------------------------------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    """A number that says it is on a GPU, and is not stacked with one that is elsewhere."""

    @property
    def device(self) -> Any:
        return torch.device("cuda", 0)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.stack and any(type(each) is not cls for each in args[0]):
            raise RuntimeError("Expected all tensors to be on the same device")
        if func in (torch.Tensor.cpu, torch.Tensor.to):
            return torch.Tensor.as_subclass(args[0], torch.Tensor)  # type: ignore[arg-type]
        return super().__torch_function__(func, types, args, kwargs or {})


def test_checksums_of_two_devices_are_sent_together() -> None:
    """Adam's steps are on the CPU, and in a new process all of its state is."""
    sums = [torch.tensor(number) for number in range(5)]
    for number in (1, 4):
        sums[number] = sums[number].as_subclass(OnGpu)  # type: ignore[assignment]
    found = transfer._together(sums)
    assert type(found) is torch.Tensor and found.tolist() == [0, 1, 2, 3, 4]
    assert transfer._together([]).tolist() == [0]


@pytest.mark.parametrize(
    ("backends", "through_the_host"),
    [("cpu:gloo,cuda:gloo", True), ("cpu:gloo,cuda:nccl", False), ("cuda:nccl", False)],
)
def test_gloo_does_not_send_from_a_gpu(monkeypatch: pytest.MonkeyPatch, backends: str, through_the_host: bool) -> None:
    monkeypatch.setattr(transfer, "dist", SimpleNamespace(get_backend_config=lambda group: backends))
    tensor = torch.ones(2).as_subclass(OnGpu)  # type: ignore[arg-type]
    carried = transfer.Wire().carry(tensor)
    assert (carried is not tensor) == through_the_host


@pytest.mark.parametrize("count", [40, 40_000])
def test_a_tensor_at_any_place_of_a_larger_one(count: int) -> None:
    """Parameters that lie in one buffer."""
    data = torch.rand(count + 1).bfloat16()
    assert transfer.checksum(transfer.flat(data[1:])) == transfer.checksum(transfer.flat(data[1:].clone()))
    model = torch.nn.Linear(1, 1, dtype=torch.bfloat16)
    model.weight.data = data[1:].view(1, -1)
    live = LiveState(model=model)
    assert live.recover() == 0
