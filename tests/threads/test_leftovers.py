"""What is left of a GPU's memory, and who is said to hold it; the GPU is the host, whose memory torch has as well."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import inprocess
from inprocess.hardware import leftovers
from inprocess.hardware.leftovers import MIB, Leftovers, in_words
from inprocess.state import FrozenState

MODULE = "tests.threads.test_leftovers"
STATE = FrozenState(rank=0, world_size=2, initial_rank=0, initial_world_size=2, iteration=1)
#: elements and bytes of a tensor that is worth a warning here
MANY = 30_000
SIZE = 4 * MANY

_kept: list[Any] = []


def setup_module() -> None:
    """The first optimizer and the first large operation of a process leave a variable and threads."""
    torch.optim.SGD([torch.ones(1, requires_grad=True)])
    loss_of(2 * MANY)


def loss_of(many: int) -> torch.Tensor:
    return (torch.ones(many, requires_grad=True) * 2).exp().sum()


@pytest.fixture(autouse=True)
def little_is_much(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(leftovers, "WORTH_A_WARNING", SIZE // 2)
    # a ceiling, not a duration: the heap of a process that ran thousands of tests, on a busy machine
    monkeypatch.setattr(leftovers, "SECONDS", 20.0)
    gc.collect()
    yield
    _kept.clear()


class Host(Leftovers):
    """As if the host's memory were a GPU's: ``allocated`` more than when the function was entered."""

    def __init__(self) -> None:
        self.allocated = 100 * MIB
        super().__init__("cpu", lambda: self.allocated)
        self.begin()
        self.enter()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[Host, int], list[str]]:
    """The lines that are said when the next iteration begins, with so many bytes more."""

    def say(host: Host, size: int) -> list[str]:
        caplog.clear()
        host.allocated += size
        host.report(STATE)
        return "\n".join(record.getMessage() for record in caplog.records).split("\n  ")

    return say


def large(**kwargs: Any) -> torch.Tensor:
    return torch.empty(MANY, **kwargs)


def test_the_warning(said: Any) -> None:
    host = Host()
    _kept.append(large())
    first, tensor, remedy = said(host, SIZE)
    assert first.startswith(f"rank 0: as iteration 1 begins, {in_words(SIZE)} of the GPU's memory")
    assert tensor == f"{in_words(SIZE)}, float32 [{MANY}] on cpu: item 0 of a list, in `_kept` of module `{MODULE}`"
    assert remedy.startswith("Release it when the function is left")
    assert said(host, 0) == [""]


def test_what_was_there_before_is_not_named(said: Any) -> None:
    _kept.append(torch.empty(2 * MANY))
    host = Host()
    _kept.append(large())
    _, tensor, _ = said(host, SIZE)
    assert "item 1 of a list" in tensor
    _kept.append(large())
    _, tensor, _ = said(host, SIZE)
    assert "item 2 of a list" in tensor


def test_the_largest_first_and_not_all(said: Any) -> None:
    host = Host()
    sizes = (1, 7, 3, 60, 5, 4, 6)
    _kept.extend(torch.empty(size * MANY) for size in sizes)
    _, *lines, _ = said(host, SIZE * sum(sizes))
    assert [line.split(",")[0] for line in lines] == [in_words(size * SIZE) for size in (60, 7, 6, 5, 4)]
    _kept.extend(torch.empty(size * MANY) for size in (1, 200))
    _, *lines, _ = said(host, SIZE * 201)
    assert [line.split(",")[0] for line in lines] == [in_words(200 * SIZE)]


def test_a_memory_counts_once(said: Any) -> None:
    host = Host()
    whole = large()
    _kept.append(whole[:10])
    _kept.append(whole[10:])
    del whole
    _, tensor, _ = said(host, SIZE)
    assert tensor.startswith(f"{in_words(SIZE)}, float32 [")
    assert tensor.endswith(f" of a list, in `_kept` of module `{MODULE}`")


def test_models_and_optimizers(said: Any) -> None:
    host = Host()
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(3, MANY // 3, bias=False)))
    weight: Any = model[1][0].weight
    weight.grad = torch.empty_like(weight)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.empty_like(weight)
    _kept.append((model, optimizer))
    del model, weight, optimizer
    lines = said(host, 3 * SIZE)
    buffer, *weight, gradient = sorted(line.partition("on cpu: ")[2] for line in lines if "on cpu" in line)
    assert buffer.startswith(
        "`momentum_buffer`, in a value of a dict, in `state`, in a SGD, in item 1 of a tuple, in item"
    )
    # the optimizer has it, too
    assert weight[0].startswith(
        ("`weight`, in `_parameters`, in a Linear, in `0`", "a key of a dict, in `state`, in a SGD")
    )
    assert gradient == "held by C++ (as a gradient, by a hook, a graph) or by a function that runs"


def test_what_a_graph_keeps(said: Any) -> None:
    """A loss that is kept: it is small itself, and what its graph has saved is C++'s."""
    host = Host()
    _kept.append(loss_of(MANY))
    *_, hidden, _ = said(host, 3 * SIZE)
    assert "the autograd graph of a loss that is kept" in hidden


def test_what_nobody_in_python_has(said: Any) -> None:
    *_, hidden, _ = said(Host(), 2 * SIZE)
    assert hidden.startswith(f"{in_words(2 * SIZE)} belongs to no tensor that Python knows")
    assert hidden.endswith("or a process group that does not end")


def test_what_a_live_state_has_is_meant_to_stay(said: Any) -> None:
    model = torch.nn.Linear(3, MANY // 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    live = inprocess.LiveState(model=model, optimizer=optimizer)
    host = Host()
    model.weight.grad = torch.empty_like(model.weight)
    optimizer.state[model.weight]["momentum_buffer"] = torch.empty_like(model.weight)
    assert said(host, 2 * SIZE) == [""]
    _kept.append(large())
    first, tensor, _ = said(host, SIZE)
    assert f"{in_words(SIZE)} of the GPU" in first
    assert "`_kept`" in tensor
    assert live.step == -1


# --- tensors of other kinds -----------------------------------------------------------------------------------------


class Odd(torch.Tensor):
    """That answers nothing."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    def __hash__(self) -> int:
        raise ZeroDivisionError

    def __getattribute__(self, name: str) -> Any:
        raise ZeroDivisionError


class Wrapped(torch.Tensor):
    """One that stands for another one, as a DTensor does."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError


def test_a_tensor_that_answers_nothing(said: Any) -> None:
    host = Host()
    _kept.append(large().as_subclass(Odd))
    _, tensor, _ = said(host, SIZE)
    assert tensor.startswith(
        f"{in_words(SIZE)}, float32 [{MANY}] on cpu: item 0 of a list, in `_kept` of module `{MODULE}`"
    )


def test_one_that_stands_for_another_one_has_no_memory(said: Any) -> None:
    host = Host()
    _kept.append(Wrapped(large()))
    _, tensor, _ = said(host, SIZE)
    assert tensor.startswith(f"{in_words(SIZE)}, float32 [{MANY}] on cpu: `inner`, in a Wrapped, in item 0 of a list")


def test_neither_has_one_that_is_fake_or_elsewhere() -> None:
    with FakeTensorMode():
        fake = large()
    lazy = torch._lazy_clone(torch.ones(10))
    for tensor in (fake, large(device="meta"), torch.empty(0), lazy):
        with torch._C.DisableTorchFunctionSubclass():
            assert leftovers._memory_of(tensor, "cpu") is None
    assert torch._C._is_cow_tensor(lazy)


# --- it leaves nothing behind ---------------------------------------------------------------------------------------


def test_nothing_holds_more_than_before(said: Any) -> None:
    host = Host()
    tensors = [large(), torch.ones(MANY, requires_grad=True)]
    tensors[1].grad = torch.empty(MANY)
    _kept.append(tensors)
    before = [sys.getrefcount(tensor) for tensor in tensors]
    assert len(said(host, 3 * SIZE)) == 5
    assert [sys.getrefcount(tensor) for tensor in tensors] == before
    references = [weakref.ref(tensor) for tensor in tensors]
    _kept.clear()
    tensors.clear()
    assert [reference() for reference in references] == [None, None]


def test_the_time_for_the_search_is_bounded(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the heap: each pass takes 0.3 s here, so there is one."""
    monkeypatch.setattr(leftovers, "SECONDS", 0.5)
    now, passes = [100.0], []
    original = gc.get_referrers

    def slow(*targets: object) -> list[Any]:
        now[0] += 0.3
        passes.append(len(targets))
        return original(*targets)

    monkeypatch.setattr(gc, "get_referrers", slow)
    monkeypatch.setattr(leftovers.clock, "monotonic", lambda: now[0])
    host = Host()
    _kept.append([[[[[large()]]]]])
    _, tensor, _ = said(host, SIZE)
    assert passes == [1]
    assert tensor.endswith(", in something else (the search ends here)")


def test_the_search_is_bounded(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that is long, or leads in a circle."""
    monkeypatch.setattr(leftovers, "PASSES", 4)
    host = Host()
    _kept.append([[[[[[large()]]]]]])
    _, tensor, _ = said(host, SIZE)
    assert tensor.endswith(": " + ", in ".join([*["item 0 of a list"] * 4, "something else (the search ends here)"]))


class Shared:
    """A class that keeps one for all."""


@pytest.mark.parametrize(
    ("hold", "words"),
    [
        (lambda tensor: lambda: tensor, "a cell, in item 0 of a tuple, in function `<lambda>` (test_leftovers.py:"),
        (lambda tensor: (each for each in [tensor]), "generator `<genexpr>`"),
        (lambda tensor: {1: tensor}, "a value of a dict, in item 0 of a list, in `_kept` of module"),
        (lambda tensor: {tensor}, "a set, in item 0 of a list, in `_kept` of module"),
        (lambda tensor: setattr(Shared, "one", tensor), "`one`, in `Shared`"),
    ],
)
def test_owners(said: Any, hold: Callable[[torch.Tensor], Any], words: str) -> None:
    host = Host()
    _kept.append(hold(large()))
    try:
        _, tensor, _ = said(host, SIZE)
        assert words in tensor
    finally:
        if "one" in vars(Shared):
            del Shared.one  # type: ignore[attr-defined]
