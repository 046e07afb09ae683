"""The parts of a LiveState: what another rank gets of them, and what they get back, is what they were at the commit."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as ShardOf
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from inprocess import LiveState
from inprocess.exception import LiveStateError
from inprocess.live import transfer, tree
from inprocess.live.plan import Shard
from inprocess.live.present import LiveParts

from .test_live_state import Faulty, Part, parts, setup_module, train, values  # noqa: F401  (setup_module runs here too)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def committed(step: int = 1, **given: Any) -> LiveParts:
    live = LiveParts(given)
    live.at(step)
    return live


def send(one: LiveParts, other: LiveParts) -> None:
    """As over a process group."""
    record = one.record()
    room = other.room_for(tree.read(record.header()))
    with transfer.in_one_piece(room.tensors) as rooms, torch.no_grad():
        for target, source in zip(rooms, record.tensors, strict=True):
            target.copy_(source)
    other.load(room)


def hand_over(one: LiveParts, other: LiveParts) -> None:
    """As to parts that are made anew."""
    other.fill(one.record())


to_others = pytest.mark.parametrize("give", [send, hand_over])
Give = Callable[[LiveParts, LiveParts], None]

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


# --- containers -------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    one: Any
    other: Any


CONTAINERS = {
    "Counter": lambda: collections.Counter("aab"),
    "OrderedDict": lambda: collections.OrderedDict(b=torch.ones(2), a=1),
    "Size": lambda: torch.Size([2, 3]),
    "set": lambda: {1, 2},
    "nested": lambda: [collections.Counter("a"), (collections.OrderedDict(a=torch.ones(1)),)],
}


def same_kinds(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_kinds(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_kinds, one, other))
    return bool(one == other)


@to_others
@pytest.mark.parametrize("made", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_containers_stay_what_they_are(made: Callable[[], Any], give: Give) -> None:
    one, other = Part(made()), Part()
    give(committed(part=one), LiveParts({"part": other}))
    assert same_kinds(other.value, made())


@pytest.mark.parametrize(
    "value",
    [collections.defaultdict(list, a=[torch.ones(2)]), Pair(torch.ones(2), 3), collections.deque([torch.ones(2)], 5)],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_sent_is_given_to_parts_of_this_process_and_refused_else(value: Any) -> None:
    """As something else it would be wrong in silence, on whoever receives."""
    one, other = Part({"deep": [0, value]}), Part()
    live = committed(part=one)
    live.fill(live.record())
    hand_over(live, LiveParts({"part": other}))
    assert type(other.value["deep"][1]) is type(value)
    kept = [leaf for _, leaf in tree.leaves(other.value)]
    assert [leaf.tolist() for leaf in kept] == [[1, 1]] and kept[0] is not next(iter(tree.leaves(one.value)))[1]
    with pytest.raises(LiveStateError, match=rf"part\.value\.deep\.1 is a \S*{type(value).__name__}") as refused:
        live.record().header()
    assert "without running code" in str(refused.value)


def test_a_class_that_all_ranks_know() -> None:
    one, other = Part([Pair(torch.ones(2), 3)]), Part()
    with torch.serialization.safe_globals([Pair]):
        send(committed(part=one), LiveParts({"part": other}))
    assert same_kinds(other.value, one.value)


def test_a_state_is_no_longer_that_of_the_part() -> None:
    """What the part changes later is not changed in the copy."""
    state = {"list": [1], "counter": collections.Counter("a"), "deque": collections.deque([1])}
    found = tree.take(state).tree
    state["list"].append(2)  # type: ignore[attr-defined]
    state["counter"]["b"] = 1  # type: ignore[index]
    state["deque"].append(2)  # type: ignore[attr-defined]
    assert found == {"list": [1], "counter": {"a": 1}, "deque": collections.deque([1])}


@to_others
def test_versions_of_modules_arrive(give: Give) -> None:
    """Without them a module takes what it is given for something that an old version of it has saved."""

    given: list[Any] = []

    class Versioned(torch.nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *more: Any) -> None:
            given.append(metadata.get("version"))
            super()._load_from_state_dict(state, prefix, metadata, *more)

    give(committed(model=Versioned(2, 2)), LiveParts({"model": Versioned(2, 2)}))
    assert given == [3]


@to_others
def test_a_sequence_of_schedulers(give: Give) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any]:
        _, optim = parts()
        kinds = torch.optim.lr_scheduler
        several = [kinds.ConstantLR(optim, 0.5, 3), kinds.MultiStepLR(optim, [2, 4])]
        return optim, kinds.SequentialLR(optim, several, [3])  # type: ignore[arg-type]

    (optim, schedule), (other, schedule_of_other) = made(), made()
    optim.step()
    schedule.step()
    give(committed(optim=optim, schedule=schedule), LiveParts({"optim": other, "schedule": schedule_of_other}))
    for _ in range(8):
        for each in (schedule, schedule_of_other):
            each.optimizer.step()
            each.step()
        assert schedule_of_other.get_last_lr() == schedule.get_last_lr()


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
