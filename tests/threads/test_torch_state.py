"""torch's state of a thread after an interruption that came inside a context manager."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from inprocess.collectives import remembered
from inprocess.interrupt import torch_state
from inprocess.interrupt.torch_state import TorchState
from inprocess.system import logs

C: Any = torch._C


class FunctionMode(torch.overrides.TorchFunctionMode):
    """One that does nothing."""


class DispatchMode(TorchDispatchMode):
    """One that does nothing."""


def pack(thing: Any) -> Any:
    return thing


CHANGES = {
    "no_grad": torch.no_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast on a GPU": lambda: torch.autocast("xpu", dtype=torch.float16),
    "below autograd": C._AutoDispatchBelowAutograd,
    "excluded keys": lambda: C._ExcludeDispatchKeyGuard(C.DispatchKeySet(C.DispatchKey.AutogradCPU)),
    "no forward gradients": lambda: torch.autograd.forward_ad._set_fwd_grad_enabled(False),
    "one thread for backward": lambda: torch.autograd.set_multithreading_enabled(False),
    "function mode": FunctionMode,
    "dispatch mode": DispatchMode,
    "device": lambda: torch.device("meta"),
    "no torch functions": C.DisableTorchFunctionSubclass,
    "checkpointing": lambda: torch.autograd.graph.saved_tensors_hooks(pack, pack),
}


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """torch starts a thread with the first such product."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()


def trains() -> bool:
    """In full precision, on the CPU, with gradients."""
    layer = torch.nn.Linear(2, 2)
    loss = layer(torch.ones(1, 2)).sum()
    loss.backward()
    return loss.device.type == "cpu" and loss.dtype == torch.float32 and layer.weight.grad is not None


def state() -> tuple[Any, ...]:
    """All that is put back."""
    keys = (C._dispatch_tls_local_include_set().raw_repr(), C._dispatch_tls_local_exclude_set().raw_repr())
    modes = (C._len_torch_function_stack(), C._len_torch_dispatch_stack(), str(C._get_torch_function_state()))
    autocast = (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("xpu"), torch_state._autocast_depth())
    autograd = (torch.is_grad_enabled(), C._is_fwd_grad_enabled(), C._is_multithreading_enabled())
    return keys, modes, autocast, autograd, torch.is_inference_mode_enabled(), torch_state._top_hooks()


@pytest.mark.parametrize("name", CHANGES)
def test_one_that_was_entered_and_never_left(name: str) -> None:
    before, own = state(), TorchState()
    entered = CHANGES[name]()
    entered.__enter__()
    assert state() != before
    own.restore()
    assert state() == before
    assert trains()
    del entered
    own.restore()
    assert state() == before


def test_one_inside_the_other_left_in_the_wrong_order() -> None:
    """As the generators of an interrupted function are, when they are freed."""
    before, own = state(), TorchState()
    entered = [CHANGES[name]() for name in ("below autograd", "no_grad", "excluded keys", "autocast", "inference_mode")]
    for each in entered:
        each.__enter__()
    for each in entered[:3]:
        each.__exit__(None, None, None)
    own.restore()
    assert state() == before
    assert trains()
    del entered, each  # some are left by that, too
    own.restore()
    assert state() == before


def test_what_the_program_had_set_before_stays() -> None:
    with torch.no_grad(), torch.autocast("cpu"), DispatchMode(), torch.inference_mode():
        before, own = state(), TorchState()
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        FunctionMode().__enter__()
        own.restore()
        assert state() == before
    assert trains()


def test_the_default_device_stays() -> None:
    """torch keeps it as a mode, and leaves that mode when it is set again."""
    own = TorchState()
    torch.set_default_device("meta")
    try:
        FunctionMode().__enter__()
        own.restore()
        assert torch.ones(1).device.type == "meta"
    finally:
        torch.set_default_device(None)
    assert not C._len_torch_function_stack()


def test_nothing_is_done_where_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = TorchState()
    monkeypatch.setattr(C, "_InferenceMode", None)
    own.restore()


def test_a_torch_that_keeps_it_elsewhere(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    logs.once.cache_clear()
    monkeypatch.delattr(C, "_dispatch_tls_local_include_set")
    assert [torch_state.capture(), torch_state.capture()] == [None, None]
    assert caplog.text.count("keeps the state of its threads in a way that is not known here") == 1


class Stop(BaseException):
    """An interruption."""


@contextlib.contextmanager
def stopping_at(number: int) -> Iterator[list[int]]:
    """Raise before the n-th line of a context manager that is entered or left, in all of torch; counts them."""
    count = [0]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and frame.f_code.co_name in ("__enter__", "__exit__"):
            count[0] += 1
            if count[0] == number:
                raise Stop
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def test_interrupted_in_a_step_with_tensor_parallelism(
    excepthook: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its operations pass dozens of context managers that are written in Python; the other rank is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # or torch sets it
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with ThreadPoolExecutor(1) as thread:  # Python, too, loses something that it keeps per thread
            assert thread.submit(interrupt_steps, 40).result() >= 5
    finally:
        dist.destroy_process_group()
        remembered.forget_meshes()
        gc.collect()


def interrupt_steps(count: int) -> int:
    """How many interruptions of so many changed torch's state."""
    seed = 1
    step()
    with stopping_at(-1) as lines:
        step()
    chance, changed = random.Random(seed), 0
    before, own = state(), TorchState()
    for _ in range(count):
        line = chance.randrange(1, lines[0])
        with contextlib.suppress(BaseException), stopping_at(line):
            step()
        changed += state() != before
        own.restore()
        assert state() == before, f"seed {seed}, line {line} of {lines[0]}"
    return changed


def step() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    remembered.forget_meshes()  # so that each step does all the work
    mesh = init_device_mesh("cpu", (2,))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    with torch.no_grad():
        model(torch.ones(4, 8))
    model(torch.ones(4, 8)).sum().backward()


class Node(torch.autograd.Function):
    """Keeps a thing, or raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, thing: object) -> torch.Tensor:
        ctx.thing = thing
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.thing is None:
            raise ValueError("interrupted")
        return gradient, None


@pytest.mark.parametrize("grad", [True, False])
def test_what_a_backward_pass_kept_that_was_interrupted(grad: bool) -> None:
    thing, x = TorchState(), torch.ones(3, requires_grad=True)
    kept = weakref.ref(thing)
    with pytest.raises(ValueError, match="interrupted"):
        (Node.apply(x, thing) + Node.apply(x, None)).sum().backward()
    del thing, x
    gc.collect()
    assert kept() is not None, "torch keeps it no more"
    with torch.set_grad_enabled(grad):
        torch_state.forget_backward()
    assert kept() is None


def test_no_backward_pass_is_run_in_a_thread_that_had_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "backward", lambda tensor: pytest.fail("a pass was run"))
    with ThreadPoolExecutor(1) as thread:
        thread.submit(torch_state.forget_backward).result()


def test_a_torch_without_such_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(C._autograd, "_get_sequence_nr")
    torch_state.forget_backward()
