"""What of an interrupted iteration is alive when the next one begins: nothing but what the program itself keeps.

The interpreter's own collections are off meanwhile, so that what only they would free is seen: on a GPU it would be
memory that is not there when the new iteration allocates. There garbage is collected; the GPU is the host here.
"""

from __future__ import annotations

import builtins
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from inprocess.hardware import leftovers
from tests.harness import At, Raise, When
from tests.harness.child import Context

from . import targets

SIZE = 1000
_refs: dict[str, weakref.ref[Any]] = {}
_kept: list[Any] = []


def run(context: Context) -> Any:
    if context.args.get("gpu"):
        _pretend(context.args["gpu"])
    try:
        return context.wrap(_body, initialize=lambda state: _look(context, state))()
    finally:
        _refs.clear()
        _kept.clear()
        sys.__dict__.pop("last_exc", None)
        gc.enable()


def _pretend(warning: int) -> None:
    """The tensors of this test are those of a GPU."""
    leftovers.WORTH_COLLECTING, leftovers.WORTH_A_WARNING = SIZE, warning
    leftovers.SECONDS = 60.0  # a machine that has other things to do must not cut the search short
    leftovers.leftovers._kind = "cpu"
    leftovers.leftovers._allocated = lambda: 4 * SIZE * len(_alive())


def _look(context: Context, state: Any) -> None:
    if state.iteration:
        context.emit("alive", names=_alive())


def _alive() -> list[str]:
    return sorted(name for name, ref in _refs.items() if ref() is not None)


def _body(context: Context, call: Any) -> Any:
    rank, size = targets.place_in_world()
    dist.init_process_group("gloo", timeout=targets.LONG)
    targets.check_sum(size)
    if call.iteration < context.args.get("restarts", 1):
        gc.disable()
        return ALL[context.args["way"]](context, rank == 0)
    dist.destroy_process_group()
    return [call.iteration, rank, size]


def _new(name: str) -> torch.Tensor:
    tensor = torch.ones(SIZE, requires_grad=True) * 1
    _refs[name] = weakref.ref(tensor)
    return tensor


def _fail(context: Context, raises: bool) -> None:
    """One rank raises, the other one waits for it in an all-reduce."""
    if raises:
        context.wait_for(When("blocked", 1))
        raise ValueError("leftovers")
    context.emit("blocked")
    dist.all_reduce(torch.ones(SIZE))


def _local(context: Context, raises: bool) -> None:
    tensor = _new("local")
    _fail(context, raises)
    del tensor


def _generator(context: Context, raises: bool) -> None:
    def numbers() -> Iterator[int]:
        tensor = _new("generator")
        yield 0
        yield len(tensor)

    steps = numbers()
    next(steps)
    for _ in steps:
        _fail(context, raises)


def _graph(context: Context, raises: bool) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            ctx.more = _new("graph attribute")
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            saved = _new("in backward")
            _fail(context, raises)
            return grad * saved

    Double.apply(_new("graph")).sum().backward()


def _hook(context: Context, raises: bool) -> None:
    tensor = _new("hook")
    tensor.register_hook(lambda grad: _fail(context, raises) or grad * tensor.detach())
    (tensor * 2).sum().backward()


def _ddp(context: Context, raises: bool) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32))
    optimizer = torch.optim.Adam(model.parameters())
    _refs["ddp"] = weakref.ref(model.module.weight)
    for _ in range(2):
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
    _refs["optimizer"] = weakref.ref(optimizer.state[model.module.weight]["exp_avg"])
    _refs["gradient"] = weakref.ref(model.module.weight.grad)
    if raises:
        _fail(context, raises)
    context.emit("blocked")
    model(torch.ones(4, 32)).sum().backward()


def _closure(context: Context, raises: bool) -> None:
    tensor = _new("closure")

    def again() -> Any:
        return again, tensor

    _fail(context, raises)


def _loader(context: Context, raises: bool) -> None:
    data = torch.utils.data.TensorDataset(_new("loader"))
    for _ in torch.utils.data.DataLoader(data, batch_size=10):
        _fail(context, raises)


def _future(context: Context, raises: bool) -> None:
    tensor = torch.ones(SIZE)
    _refs["future"] = weakref.ref(tensor)
    if raises:
        _fail(context, raises)
    work = dist.all_reduce(tensor, async_op=True)
    context.emit("blocked")
    work.get_future().then(lambda done: done.value()).wait()


def _chain(context: Context, raises: bool) -> None:
    """The first error refers to itself by way of the frame that caught it, and the next ones hide it."""
    try:
        try:
            _caught(context, raises)
        except BaseException as error:
            tensor = _new("cause")
            raise KeyError("of another kind") from error
    except KeyError:
        tensor = _new("context")
        raise RuntimeError("while handling", tensor.shape)  # noqa: B904


def _caught(context: Context, raises: bool) -> None:
    tensor = _new("caught")
    try:
        _fail(context, raises)
    except BaseException as error:
        same = error
        raise
    del tensor, same


def _group(context: Context, raises: bool) -> None:
    """Not the context of what is raised, but a part of it."""
    errors: list[BaseException] = []
    tensor = _new("several")
    try:
        _caught(context, raises)
    except BaseException as error:
        errors.append(error)
    several: Any = getattr(builtins, "BaseExceptionGroup", lambda _, errors: errors[0])  # since Python 3.11
    raise several(str(tensor.shape), errors)


def _tried_again(context: Context, raises: bool) -> None:
    """An error that is not behind what is raised later: locals have it, and the frame that it came from has it, too."""

    def attempt() -> None:
        tensor = _new("attempt")
        try:
            raise ConnectionError("of a first attempt")
        except ConnectionError as error:
            same = error
            raise
        del tensor, same

    errors: list[Exception] = []
    for _ in range(2):
        try:
            attempt()
        except ConnectionError as error:
            errors.append(error)
            last = error
    if raises:
        errors.clear()
    else:
        del last
    _fail(context, raises)


def _thread(context: Context, raises: bool) -> None:
    def run() -> None:
        tensor = _new("thread")
        try:
            raise ValueError("of a thread")
        except ValueError as error:
            errors.append(error)
        del tensor

    errors: list[BaseException] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    _fail(context, raises)
    raise errors[0]


def _last(context: Context, raises: bool) -> None:
    tensor = _new("last exception")
    try:
        _fail(context, raises)
    except BaseException as error:
        sys.last_exc = error
        raise
    del tensor


def _keep(context: Context, raises: bool) -> None:
    """The program keeps the exception, and with it the frames that it came through, and those behind it."""
    try:
        _chain(context, raises)
    except BaseException as error:
        _kept.append(error)
        raise


def _return(context: Context, raises: bool) -> Any:
    """One has returned when the other one raises."""
    if raises:
        context.wait_for(When("leave", 1))
        raise ValueError("leftovers")
    return _new("value")


def _list(context: Context, raises: bool) -> None:
    """The program's own code holds on, in a list that is not frozen, as all is that was there when the rank began."""
    global _kept
    _kept = [*_kept, _new("list")]
    _fail(context, raises)


WAYS: dict[str, Callable[[Context, bool], Any]] = {
    "local": _local,
    "generator": _generator,
    "graph": _graph,
    "hook": _hook,
    "ddp": _ddp,
    "closure": _closure,
    "loader": _loader,
    "future": _future,
    "chain": _chain,
    "group": _group,
    "tried again": _tried_again,
    "thread": _thread,
    "last": _last,
    "keep": _keep,
    "return": _return,
}
ALL = {**WAYS, "list": _list}


#: what waits for the garbage collector. A hook of a tensor that refers to that tensor is out of its sight: torch's own
LATE = {"closure": ["closure"], "hook": ["hook"]}
NEVER = {"hook": ["hook"]}


def alive(ranks: Any) -> list[list[str]]:
    assert ranks.exceptions == [None, None]
    return [rank.of("alive")[0]["names"] for rank in ranks]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_alive(launch, way):
    assert alive(launch(run, 2, args={"way": way}).wait()) == [LATE.get(way, [])] * 2


@pytest.mark.parametrize("way", ["closure", "hook", "ddp"])
def test_what_is_alive_on_a_gpu(launch, way):
    assert alive(launch(run, 2, args={"way": way, "gpu": 100 * SIZE}).wait()) == [NEVER.get(way, [])] * 2


def test_who_holds_on_is_said_once(launch):
    ranks = launch(run, 2, args={"way": "list", "gpu": SIZE, "restarts": 3}).wait()
    for rank in ranks:
        found = [line for line in rank.log.splitlines() if "of the GPU's memory" in line]
        assert len(found) == 1, rank.log
        assert f" rank {rank.rank}: as iteration 1 begins, " in found[0]
        assert "item 0 of a list, in `_kept` of module `tests.ranks.test_leftovers`" in rank.log


def test_a_value_is_the_caller_s_alone(launch):
    """It is free with the caller's last reference, not when garbage is collected next."""
    assert launch(run_value, 1).wait().values == [[True, False]]


def run_value(context: Context) -> list[bool]:
    gc.disable()
    value = context.wrap(lambda context, call: _new("value"))()
    found = [value is not None and bool(_alive())]
    context.values.clear()
    del value
    found.append(bool(_alive()))
    _refs.clear()
    gc.enable()
    return found


def test_what_an_interrupted_context_manager_has_set(launch):
    """Without it the ranks that waited would train without gradients, and in half precision, from then on."""
    faults = {At(1, step="fault"): Raise(when=When("entered", 2))}
    ranks = launch(targets.run_in_a_context_manager, 3, faults=faults).wait(20)
    assert [rank.value for rank in ranks] == [[1, True, "torch.float32", False]] * 3, ranks.exceptions
