"""Whether compiled code may stay where rank or world size changed: what the compiler's guards name, with a real one."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch._dynamo.testing import CompileCounter
from torch.distributed import get_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import inprocess
from inprocess.kept import dynamo
from inprocess.kept.registry import Registry

ONE = torch.ones(1, 1)


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of one process; and the compiler as it was found."""
    monkeypatch.setattr(dynamo, "_keeps", False)
    monkeypatch.setattr(dynamo, "_place", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts its own there
    torch.compiler.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.compiler.reset()


class Layer(torch.nn.Module):
    """Its result is of the world's size, or of what else is kept in an attribute."""

    def __init__(self, value: Any = 1, ask: Callable[[Any], Any] = lambda value: value) -> None:
        super().__init__()
        self.linear, self.value, self.ask = torch.nn.Linear(1, 1), value, ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x) * self.ask(self.value)
        return found


def helper() -> int:
    return dist.get_world_size()


def imports(x: torch.Tensor) -> torch.Tensor:
    import torch.distributed as late

    return x * late.get_rank()


def sharded() -> torch.nn.Module:
    layer = torch.nn.Linear(1, 1)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    return layer


#: what asks -> makes what is compiled
ASKS: dict[str, Callable[[], Callable[..., Any]]] = {
    "a function of the module": lambda: lambda x: x * dist.get_rank(),
    "a name of its own": lambda: lambda x: x * get_rank(),
    "a helper": lambda: lambda x: x * helper(),
    "an import": lambda: imports,
    "a collective": lambda: dist.all_reduce,
    "a functional collective": lambda: lambda x: collectives.all_reduce(x, "sum", dist.group.WORLD),
    "a group": lambda: Layer(dist.group.WORLD, lambda group: group.size()),
    "a mesh": lambda: Layer(init_device_mesh("cpu", (1,)), lambda mesh: mesh.size()),
    "a mesh's rank": lambda: Layer(init_device_mesh("cpu", (1,)), lambda mesh: mesh.get_local_rank()),
    "DistributedDataParallel": lambda: DistributedDataParallel(torch.nn.Linear(1, 1)),
    "fully_shard": sharded,
    "a variable": lambda: lambda x: x * int(os.getenv("RANK", "0")),
}


@pytest.mark.filterwarnings("ignore:Detected that context_fn:UserWarning")
@pytest.mark.parametrize("what", ASKS)
def test_code_that_asks_for_its_place_is_dropped(what: str, caplog: pytest.LogCaptureFixture) -> None:
    inprocess.keep_compiled_code()
    registry = Registry()
    registry.enter(0, 1)
    compiled(ASKS[what]())(ONE)
    registry.enter(0, 2)
    assert "dropped in spite of keep_compiled_code()" in said(caplog)
    assert "uses torch.distributed or os.getenv" in said(caplog)
    assert not [*dynamo._compiled()]


@pytest.mark.parametrize("keeps", [True, False])
def test_other_code_stays_where_the_program_says_so(keeps: bool, caplog: pytest.LogCaptureFixture) -> None:
    if keeps:
        inprocess.keep_compiled_code()
    registry = Registry()
    registry.enter(0, 2)
    DistributedDataParallel(compiled(Layer(2)))(ONE)
    for place in ((None, 2), (1, 2), (0, 1)):
        registry.enter(*place)
    assert bool([*dynamo._compiled()]) is keeps
    assert not said(caplog)


def test_values_of_its_own_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    """By torch's guards: a rank that a module keeps, a closure, a variable that is read from os.environ."""
    inprocess.keep_compiled_code()
    registry, layer, rank = Registry(), Layer(1), 1
    function = compiled(lambda x: x * rank)
    reads = compiled(lambda x: x * int(os.environ["TEST_RANK"]))
    module = compiled(layer)
    with pytest.MonkeyPatch.context() as patch:
        for rank, place in ((1, (1, 3)), (2, (2, 3))):
            patch.setenv("TEST_RANK", str(rank))
            registry.enter(*place)
            layer.value = rank
            assert function(ONE).item() == reads(ONE).item() == rank
            assert module(ONE).item() == pytest.approx(layer(ONE).item())
    assert not said(caplog)


def test_os_getenv_is_a_constant_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13. Where it is none any more, `dynamo._identities` does without it."""
    function = compiled(lambda x: x * int(os.getenv("TEST_RANK", "0")))
    monkeypatch.setenv("TEST_RANK", "1")
    assert function(ONE).item() == 1
    monkeypatch.setenv("TEST_RANK", "2")
    assert function(ONE).item() == 1


@pytest.mark.parametrize(
    "missing",
    ["torch._dynamo.convert_frame.input_codes", "guards", "torch._C._dynamo.compiled_autograd.is_cache_empty"],
)
def test_what_cannot_be_told_is_dropped(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inprocess.keep_compiled_code()
    registry, resets = Registry(), list[int]()
    registry.enter(0, 1)
    compiled(torch.nn.Linear(1, 1))(ONE)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "reset", lambda: resets.append(1))
        if missing == "guards":
            patch.setattr("torch._dynamo.eval_frame._debug_get_cache_entry_list", lambda code: [Entry()])
        else:
            patch.delattr(missing)
        registry.enter(0, 2)
    assert resets == [1]
    assert f"cannot be read with torch {torch.__version__}" in said(caplog)


class Entry:
    guard_manager = "something else"


def test_what_was_compiled_before_the_call_is_used_in_it() -> None:
    """As it is, also in DistributedDataParallel, where torch 2.13 compiles in parts."""
    counter = CompileCounter()
    compiled = torch.compile(Layer(), backend=counter)
    compiled(ONE).sum().backward()
    wrapped = DistributedDataParallel(compiled)
    wrapped(ONE)
    assert counter.frame_count == 1


def test_it_takes_milliseconds() -> None:
    """A model of many layers: far less than a second to compile it again."""
    inprocess.keep_compiled_code()
    registry = Registry()
    registry.enter(0, 1)
    compiled(torch.nn.Sequential(*(Layer(number) for number in range(50))))(ONE)
    begin = time.monotonic()
    registry.enter(0, 2)
    assert time.monotonic() - begin < 1
    assert [*itertools.islice(dynamo._compiled(), 1)]


def compiled(what: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(what, backend="eager")  # type: ignore[no-any-return]


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "".join(record.getMessage() for record in caplog.records if record.name == "inprocess")
