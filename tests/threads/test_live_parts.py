"""The parts of a LiveState: what another rank gets of them, and what they get back, is what they were at the commit."""

from __future__ import annotations

import collections
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as ShardOf
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from inprocess import LiveState
from inprocess.exception import LiveStateError
from inprocess.interrupt.signals import Interrupter
from inprocess.live import transfer, tree
from inprocess.live.plan import Point, Shard
from inprocess.live.present import LiveParts

from .test_live_state import Faulty, Part, parts, setup_module, values  # noqa: F401  (setup_module runs here too)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def committed(step: int = 1, **given: Any) -> LiveParts:
    live = LiveParts(given)
    commit(live, step)
    return live


def commit(live: LiveParts, step: int) -> None:
    live.at(Point(0, step))


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


def test_what_is_kept_never_stays_in_place_of_what_is_there() -> None:
    """An interruption while it is there, for ``state_dict()``, would leave it: buffers, extra state and groups of that
    step would be those of all later ones."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    live = committed(model=model, optim=torch.optim.SGD(model.parameters(), lr=0.1))
    gate, places = Interrupter().new_gate(), list[str]()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        gate._armed = True
        if gate.may_raise(frame):
            places.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        return trace

    def fn() -> None:
        sys.settrace(trace)
        live.record()
        sys.settrace(None)

    gate.run(fn)
    assert [place for place in places if not place.startswith("fn:")] == []


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


# --- buffers, and what else a module has ------------------------------------------------------------------------------


class Twice(torch.nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = torch.nn.BatchNorm1d(2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(inputs))
        return found


def renamed() -> torch.nn.Module:
    """By a hook, which makes copies as well."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))

    def there(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in list(state):
            state[f"{prefix}other.{name}"] = state.pop(name).clone()

    def back(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in list(state):
            state[name.removeprefix(f"{prefix}other.")] = state.pop(name)

    model.register_state_dict_post_hook(there)
    model.register_load_state_dict_pre_hook(back)
    return model


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "plain": lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(2)),
    "shared": Twice,
    "in a wrapper": lambda: torch.nn.Sequential(checkpoint_wrapper(torch.nn.Sequential(torch.nn.BatchNorm1d(2)))),
    "renamed": renamed,
}


@to_others
@pytest.mark.parametrize("made", MODULES.values(), ids=MODULES.keys())
def test_others_get_the_buffers_of_the_commit(made: Callable[[], torch.nn.Module], give: Give) -> None:
    """Not those of the step that was interrupted, whatever their names in the state are."""
    model, other = made(), made()
    model(torch.randn(8, 2))
    live, before = committed(model=model), [buffer.clone() for buffer in model.buffers()]
    model(torch.randn(8, 2) + 5)
    now = list(model.buffers())
    give(live, LiveParts({"model": other}))
    assert all(one is own for one, own in zip(model.buffers(), now, strict=True))
    assert not all(map(torch.equal, now, before))
    assert all(map(torch.equal, other.buffers(), before))
    live.give_back()
    assert all(map(torch.equal, model.buffers(), before))
    assert all(one is own for one, own in zip(model.buffers(), now, strict=True))


def test_a_fault_while_a_state_is_looked_at_changes_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), Remembers())
    live = committed(model=model)
    model(torch.randn(8, 2) + 5)
    now = list(model.buffers())

    def fail(*_: Any) -> None:
        raise Faulty

    model.register_state_dict_post_hook(fail)
    with pytest.raises(Faulty):
        live.record()
    assert all(one is own for one, own in zip(model.buffers(), now, strict=True))
    assert model[1].get_extra_state() == {"most": [float(model[1].most[0])]}


class Remembers(torch.nn.Module):
    """Has something that is no tensor, as a history of scaling factors."""

    def __init__(self) -> None:
        super().__init__()
        self.most = [0.0]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.most[0] = max(self.most[0], float(inputs.detach().abs().max()))
        return inputs

    def get_extra_state(self) -> Any:
        return {"most": self.most}

    def set_extra_state(self, state: Any) -> None:
        self.most = state["most"]


@to_others
@pytest.mark.parametrize("wrap", [torch.nn.Sequential, lambda module: torch.nn.Sequential(checkpoint_wrapper(module))])
def test_the_extra_state_of_a_module_is_that_of_the_commit(wrap: Any, give: Give) -> None:
    one, other = Remembers(), Remembers()
    model = wrap(one)
    model(torch.tensor([3.0]))
    live = committed(model=model)
    for _ in range(2):
        model(torch.tensor([9.0]))
        give(live, LiveParts({"model": wrap(other)}))
        assert (one.most, other.most) == ([9.0], [3.0])
        live.give_back()
        assert one.most == [3.0]


def test_an_extra_state_of_another_size(tmp_path: Path) -> None:
    """As of bytes that somebody has packed, in a checkpoint."""

    class Packs(torch.nn.Module):
        text = b""

        def get_extra_state(self) -> torch.Tensor:
            return torch.frombuffer(bytearray(self.text), dtype=torch.uint8) if self.text else torch.zeros(0)

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.text = bytes(state.tolist())

    one, other = Packs(), Packs()
    live = LiveState(model=one, folder=tmp_path, save_every=1)
    live.recover()
    with live.commit(1):
        one.text = b"of the first step"
    live.wait()
    other.text = b"no"
    assert LiveState(model=other, folder=tmp_path).recover() == 1
    assert other.text == one.text


class Expanded(torch.nn.Module):
    """One number in many places."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1, 3).expand(2, 4, 3), persistent=persistent)


@to_others
@pytest.mark.parametrize("persistent", [True, False])
def test_an_expanded_buffer(persistent: bool, give: Give) -> None:
    model, other = Expanded(persistent), Expanded(persistent)
    live = committed(model=model)
    commit(live, 2)
    model.mask[0, 0] += torch.arange(3)
    give(live, LiveParts({"model": other}))
    live.give_back()
    for each in (model, other):
        assert each.mask.tolist() == torch.ones(2, 4, 3).tolist()
        assert each.mask.stride() == (0, 0, 1)
    model.mask[0, 0] += torch.arange(3)
    commit(live, 3)
    give(live, LiveParts({"model": other}))
    assert torch.equal(other.mask, model.mask) == persistent


def test_a_buffer_that_has_grown_since_the_commit() -> None:
    """As an observer's at its first step. A cache that is no state, such as positions of a longer sequence, stays."""
    model = torch.nn.Module()
    model.register_buffer("least", torch.zeros(0))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    live = committed(model=model)
    for _ in range(2):
        model.least, model.cache = torch.ones(3), torch.ones(5)
        assert live.record().tree["model"]["least"].shape == (0,)
        live.give_back()
        assert (model.least.shape, model.cache.shape) == ((0,), (5,))
    model.least = torch.ones(3)
    commit(live, 2)
    model.least.fill_(2)
    live.give_back()
    assert model.least.tolist() == [1, 1, 1]
    model.least = None
    commit(live, 3)
    model.least = torch.ones(3)
    live.give_back()
    assert model.least.tolist() == [1, 1, 1]
    assert live._buffers[model].keys() == {"cache"}


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
