"""What an interrupted iteration left on the GPU, and who holds it.

Once the function is left, most of what it had made is free, with the last reference to it. What is in reference
cycles is freed by the garbage collector alone, and that knows nothing of GPUs: it may not come before the next
iteration needs the memory. So before the ranks meet again, garbage is collected where much more is allocated than
before: a collection takes 30 to 200 ms in a process with torch, and is left out where CUDA is not in use.

What is still there when the next iteration begins, somebody holds: one warning names the largest tensors and the way to
each. It is new only once; after that, what is more than last time. What a ``LiveState`` keeps is meant to stay.

``torch.cuda.empty_cache()`` is not called: it waits for the GPU, for ever where a kernel hangs, and is not needed: the
next iteration gets the blocks that were freed. Nor is anything else asked of the GPU, and CUDA is not initialized:
``torch.cuda.memory_allocated()`` reads the allocator's own books, also where a CUDA error has made the context useless.
It takes the allocator's lock with the interpreter's, so a thread that hangs in an allocation stops the process, as the
next allocation would, until the monitor ends it. (The backend ``cudaMallocAsync`` asks the driver; if that fails,
nothing is said.) Not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from inprocess.logs import get_logger
from inprocess.referrers import Known, Way, a, holders
from inprocess.state import FrozenState

log = get_logger("inprocess")

MIB = 1 << 20
#: bytes above the last level that are worth the time of a collection
WORTH_COLLECTING = 64 * MIB
#: new bytes that are worth a warning: 1 % of a GPU with 24 GiB, and more than torch's workspaces for cuBLAS, which stay
#: in the allocator: one for each handle (of a thread) and stream, 32 MiB on Hopper
WORTH_A_WARNING = 256 * MIB
#: of the largest tensors, how many are shown, if they are no smaller than this part of all
SHOWN = 5
SMALL = 100
#: tensors of one memory that are looked for
VIEWS = 4
#: for which holders are searched; one more pass over the heap may end later
SECONDS = 0.5
#: who keeps tensors over restarts on purpose: every LiveState
keepers: weakref.WeakSet[Any] = weakref.WeakSet()
#: how many objects below them are looked at
BELOW = 200_000


@dataclass(frozen=True)
class _Noted:
    """How much is allocated (bytes), and by whom."""

    allocated: int
    tensors: Sequence[weakref.ref[Any]] = ()


class Leftovers:
    """For one call at a time, in the main thread.

    Args:
        kind: the type of device.
        allocated: asks how much is allocated there, on all devices (bytes).
    """

    def __init__(self, kind: str = "cuda", allocated: Callable[[], int] | None = None) -> None:
        self._kind, self._allocated = kind, allocated or _allocated
        #: before the function was entered first, or when it was reported last
        self._noted: _Noted | None = None
        #: after the last collection (bytes)
        self._level = 0

    def begin(self, anew: bool = True) -> None:
        """A call begins; ``anew``: unless it is one that goes on, over another store."""
        if anew:
            self._noted = None

    def enter(self) -> None:
        """The function is about to be entered: what is there the first time is not the function's."""
        if self._noted is None:
            self._note(self._ask())

    def collect(self) -> None:
        """The function was left: free what is in reference cycles.

        While the process groups are still held: a model among the garbage must not be the last that lets go of one.
        """
        if self._noted is None:
            return
        now = self._ask()
        if now > self._level + WORTH_COLLECTING:
            gc.collect()
            self._level = self._ask()
        self._level = min(self._level, now)

    def report(self, state: FrozenState) -> None:
        """The next iteration begins: warn of what is held, where it is more than before. Never raises."""
        noted = self._noted
        if noted is None or self._ask() <= noted.allocated + WORTH_A_WARNING:
            return
        gc.collect()  # what process groups and their work held has come free since
        now = self._ask()
        if now <= noted.allocated + WORTH_A_WARNING:
            return
        with _quietly():
            _warn(state, _look(self._kind, noted, now))
        self._note(now)

    def _ask(self) -> int:
        try:
            return self._allocated()
        except Exception:  # the driver was asked, and the GPU is lost
            return 0

    def _note(self, allocated: int) -> None:
        self._level = allocated
        self._noted = _Noted(allocated)
        if allocated:
            with _quietly():
                self._noted = _Noted(allocated, _references(self._kind))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """What fails in here, among objects of any kind, is no fault of the training's."""
    try:
        yield
    except Exception:
        log.debug("what holds memory of the GPU could not be found out", exc_info=True)


def _allocated() -> int:
    """0 where CUDA is not in use. One generator per device is made with CUDA; to count devices may ask the driver."""
    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return 0
    return sum(int(cuda.memory_allocated(device)) for device in range(len(cuda.default_generators)))


# --- who has it ---------------------------------------------------------------------------------------------------


@dataclass
class _Heap:
    """Of all objects, those that matter here."""

    tensors: list[Any] = field(default_factory=list)
    modules: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class _Look:
    """What was found, in words."""

    #: new bytes without those that are kept on purpose, and how many of them no tensor of Python's has
    size: int
    hidden: int = 0
    #: size and kind of the largest tensors, and who holds each
    largest: Sequence[str] = ()
    #: tensors that keep the autograd graph they come from
    graphs: Sequence[str] = ()


def _heap() -> _Heap:
    heap = _Heap()
    wanted = ((torch.Tensor, heap.tensors), (torch.nn.Module, heap.modules), (torch.optim.Optimizer, heap.optimizers))
    # by type, not with isinstance(), which asks the object itself
    lists: dict[int, list[Any] | None] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if id(kind) not in lists:
            lists[id(kind)] = next((into for base, into in wanted if issubclass(kind, base)), None)
        if (into := lists[id(kind)]) is not None:
            into.append(thing)
    return heap


def _references(kind: str) -> list[weakref.ref[Any]]:
    with torch._C.DisableTorchFunctionSubclass():
        return [weakref.ref(tensor) for tensor in _heap().tensors if _memory_of(tensor, kind)]


def _memory_of(tensor: Any, kind: str) -> tuple[int, int] | None:
    """Address and size of a tensor's memory; None: it has none there, such as one that only stands for others."""
    try:
        storage = torch.Tensor.untyped_storage(tensor)
        if storage.device.type != kind or _is_lazy_copy(tensor) or not storage.nbytes():
            return None
        return storage.data_ptr(), storage.nbytes()
    except Exception:
        return None


def _is_lazy_copy(tensor: Any) -> bool:
    """Asking one for its address would copy it."""
    asks = getattr(torch._C, "_is_cow_tensor", None)
    return asks is not None and asks(tensor)


def _look(kind: str, noted: _Noted, now: int) -> _Look:
    known, sources = Known(), list[Any]()
    with torch._C.DisableTorchFunctionSubclass():
        look, counts = _choose(kind, noted, now, known, sources)
    found = iter(holders(sources, SECONDS, known))
    ways = [_best([next(found) for _ in range(count)]) for count in counts]
    lines = [f"{text}: {way}" for text, way in zip((*look.largest, *look.graphs), ways, strict=True)]
    shown = len(look.largest)
    return replace(look, largest=lines[:shown], graphs=lines[shown:])


def _best(ways: Sequence[Way]) -> str:
    """Several tensors share one memory: the way to one of them that leads somewhere."""
    return next((way for way in ways if way.ends), ways[0]).words


def _choose(kind: str, noted: _Noted, now: int, known: Known, sources: list[Any]) -> tuple[_Look, list[int]]:
    """What is new; and into ``sources`` the tensors to look for, so many for each line.

    It keeps nothing else of them: whatever holds a tensor would be found as well.
    """
    heap = _heap()
    before = {id(tensor): tensor for reference in noted.tensors if (tensor := reference()) is not None}
    old = _memories(before.values(), kind).keys()
    kept = _memories(_with_gradients(_kept(keepers)), kind).keys()
    found = [m for m in _memories(_with_gradients(heap.tensors), kind).values() if m.address not in old]
    size = now - noted.allocated - sum(memory.size for memory in found if memory.address in kept)
    if size <= WORTH_A_WARNING:
        return _Look(size), []
    fresh = [memory for memory in found if memory.address not in kept]
    large = [memory for memory in fresh if memory.size * SMALL >= size]
    largest = sorted(large, key=lambda memory: memory.size, reverse=True)[:SHOWN]
    named = {id(tensor) for memory in largest for tensor in memory.tensors}.union(before)
    with_graph = [tensor for tensor in heap.tensors if _graph(tensor) and id(tensor) not in named]
    latest = with_graph[-SHOWN:]
    groups = [memory.tensors for memory in largest] + [[tensor] for tensor in latest]
    for tensors in groups:
        sources += tensors
    _know(heap, known)
    look = _Look(
        size,
        size - sum(memory.size for memory in fresh),
        [f"{in_words(memory.size)}, {_shape(memory.tensors[0])}" for memory in largest],
        [f"{_shape(tensor)} from {_graph(tensor)}" for tensor in latest],
    )
    return look, list(map(len, groups))


@dataclass(frozen=True)
class _Memory:
    """A piece of memory, and some of the tensors in it."""

    address: int
    #: bytes
    size: int
    tensors: list[Any] = field(default_factory=list)


def _memories(tensors: Iterable[Any], kind: str) -> dict[int, _Memory]:
    """By address."""
    found: dict[int, _Memory] = {}
    for tensor in tensors:
        if (memory := _memory_of(tensor, kind)) is not None:
            views = found.setdefault(memory[0], _Memory(*memory)).tensors
            if len(views) < VIEWS and not any(tensor is view for view in views):
                views.append(tensor)
    return found


def _with_gradients(tensors: Iterable[Any]) -> Iterator[Any]:
    """C++ holds them, for their parameters."""
    for tensor in tensors:
        yield tensor
        if (gradient := _gradient(tensor)) is not None:
            yield gradient


def _gradient(tensor: Any) -> Any:
    with contextlib.suppress(Exception):
        base: Any = torch._C.TensorBase
        if base.is_leaf.__get__(tensor) and base.requires_grad.__get__(tensor):
            return base.grad.__get__(tensor)
    return None


def _graph(tensor: Any) -> str:
    """The operation that a tensor comes from, where it keeps the graph."""
    with contextlib.suppress(Exception):
        base: Any = torch._C.TensorBase
        operation = base.grad_fn.__get__(tensor)
        return "" if operation is None else type(operation).__name__
    return ""


def _shape(tensor: Any) -> str:
    base: Any = torch._C.TensorBase
    try:
        dtype = str(base.dtype.__get__(tensor)).removeprefix("torch.")
        return f"{dtype} {list(base.shape.__get__(tensor))} on {base.device.__get__(tensor)}"
    except Exception:
        return a(tensor)


def _know(heap: _Heap, known: Known) -> None:
    """Who has what, of what torch's own classes hold: that takes no search."""
    for tensor in heap.tensors:
        if (gradient := _gradient(tensor)) is not None:
            known.add(gradient, tensor, f"the gradient of {a(tensor)}")
    parents = {id(child): (name, module) for module in heap.modules for name, child in _parts(module, "_modules")}
    for module in heap.modules:
        top, path = _top(module, parents)
        if top is not module:
            known.add(module, top, f"module `{path}` of {a(top)}")
        for table in ("_parameters", "_buffers"):
            for name, tensor in _parts(module, table):
                known.add(tensor, top, f"`{'.'.join(filter(None, (path, name)))}` of {a(top)}")
    for optimizer in heap.optimizers:
        for _, state in _parts(optimizer, "state"):
            for name, value in state.items() if type(state) is dict else ():
                known.add(value, optimizer, f"`{name}` in the state of {a(optimizer)}")


def _parts(thing: Any, table: str) -> list[tuple[Any, Any]]:
    try:
        found = object.__getattribute__(thing, "__dict__").get(table)
        return [entry for entry in dict.items(found) if entry[1] is not None]
    except Exception:  # one that is not yet made, or made in another way
        return []


def _top(module: Any, parents: dict[int, tuple[str, Any]]) -> tuple[Any, str]:
    """The outermost module around this one, and its name there."""
    names: list[str] = []
    while id(module) in parents and len(names) < SHOWN * VIEWS:
        name, module = parents[id(module)]
        names.append(name)
    return module, ".".join(reversed(names))


def _kept(owners: Iterable[Any]) -> list[Any]:
    """The tensors of those who keep them on purpose: what is below, without what functions and modules refer to."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting = list(owners)
    while waiting and len(seen) < BELOW:
        thing = waiting.pop()
        if id(thing) in seen or issubclass(type(thing), _ELSEWHERE):
            continue
        seen.add(id(thing))
        if issubclass(type(thing), torch.Tensor):
            found.append(thing)
        waiting += gc.get_referents(thing)
    return found


_ELSEWHERE = (FunctionType, ModuleType, FrameType, CodeType, type)


# --- words --------------------------------------------------------------------------------------------------------


def _warn(state: FrozenState, look: _Look) -> None:
    if look.size <= WORTH_A_WARNING:
        return
    lines = [
        f"rank {state.rank} (initial rank {state.initial_rank}): as iteration {state.iteration} begins, "
        f"{in_words(look.size)} of the GPU's memory that an earlier iteration took are not free. Who holds the most:",
        *look.largest,
    ]
    if look.graphs:
        lines.append("Each of these keeps the autograd graph that it comes from, with all that this has saved:")
        lines += look.graphs
    if look.hidden > WORTH_A_WARNING:
        lines.append(
            f"{in_words(look.hidden)} belong to no tensor that Python knows of: C++ holds them, such as an autograd "
            "graph, or a process group that does not end"
        )
    lines.append(
        "Let go of it when the function is left (a `finally` block or the finalize hook). What is meant to outlive a "
        "restart may stay; this is said again only of what is new"
    )
    log.warning("\n  ".join(lines))


def in_words(size: int) -> str:
    """Bytes, as people say them."""
    return f"{size / MIB:.1f} MiB" if size < 1024 * MIB else f"{size / MIB / 1024:.2f} GiB"


#: one per process
leftovers = Leftovers()
