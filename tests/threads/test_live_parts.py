"""The parts of a LiveState: what another rank gets of them, and what they get back, is what they were at the commit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as ShardOf
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from inprocess.live import tree
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
