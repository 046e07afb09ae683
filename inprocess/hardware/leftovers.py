"""What an interrupted iteration left on the GPU, and who holds it.

Once the function is left, most of what it had made is free, with the last reference to it. What is in reference cycles
is freed by the garbage collector alone, which knows nothing of GPUs and may not run before the next iteration needs the
memory. So before the ranks meet again, garbage of this iteration is collected (`inprocess.system.heap`) where much more
is allocated than before; nothing is done where CUDA is not in use. Whatever is still there when the next
iteration begins is held by something: one warning names the largest tensors and the first owner of each. It is repeated
only for memory that is new. What a ``LiveState`` keeps is meant to stay.

Nothing is asked of the GPU, and CUDA is not initialized: ``torch.cuda.memory_allocated()`` reads the allocator's own
books, also where a CUDA error has made the context useless, and ``empty_cache()``, which waits for the GPU, is not
called: the next iteration gets the blocks that were freed. Not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch

from inprocess.attribution import name_of
from inprocess.call.part import Part
from inprocess.state import FrozenState
from inprocess.system import clock
from inprocess.system.errors import PACKAGE
from inprocess.system.heap import heap
from inprocess.system.logs import get_logger

log = get_logger("inprocess")
MIB = 1 << 20
#: bytes above the last level that are worth the time of a collection
WORTH_COLLECTING = 64 * MIB
#: new bytes that are worth a warning: 1 % of a GPU with 24 GiB, and more than torch's workspaces for cuBLAS, which stay
#: in the allocator: one for each handle (of a thread) and stream, 32 MiB on Hopper
WORTH_A_WARNING = 256 * MIB
#: of the largest tensors, how many are shown, if they are no smaller than this part of all
SHOWN, SMALL = 5, 100
#: passes over the heap in search of an owner, which take 25 to 60 ms each in a process with torch; and the seconds
#: after which none begins, if it takes as long as the one before
PASSES, SECONDS = 8, 0.5
#: of one pass, how many holders are looked at; of what a LiveState keeps, how many objects
HOLDERS, KEPT = 512, 200_000
#: what keeps tensors over restarts on purpose: every LiveState
keepers: weakref.WeakSet[Any] = weakref.WeakSet()

_ELSEWHERE = (FunctionType, ModuleType, FrameType, CodeType, type)


class Leftovers:
    """For one call at a time, in the main thread.

    Args:
        kind: the type of device.
        allocated: asks how much is allocated there, on all devices (bytes).
    """

    def __init__(self, kind: str = "cuda", allocated: Callable[[], int] | None = None) -> None:
        self._kind, self._allocated = kind, allocated or _allocated
        #: bytes, and the tensors that had them, before the function was entered first, or when it was reported last
        self._noted: tuple[int, list[weakref.ref[Any]]] | None = None
        #: after the last collection (bytes)
        self._level = 0

    def begin(self, anew: bool = True) -> None:
        """A call begins; ``anew``: unless it is one that continues over another store."""
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
            _collect()
            self._level = self._ask()
        self._level = min(self._level, now)

    def report(self, state: FrozenState) -> None:
        """The next iteration begins: warn of what is held, where it is more than before. Never raises."""
        if self._noted is None:
            return
        before, tensors = self._noted
        if self._ask() <= before + WORTH_A_WARNING:
            return
        _collect()  # what process groups and their work held has come free since
        now = self._ask()
        if now <= before + WORTH_A_WARNING:
            return
        heap.thaw()  # an owner may be older
        with _quietly():
            _warn(state, *_find(self._kind, tensors, now - before))
        self._note(now)

    def _ask(self) -> int:
        try:
            return self._allocated()
        except Exception:  # the driver was asked, and the GPU is lost
            return 0

    def _note(self, allocated: int) -> None:
        self._level = allocated
        self._noted = (allocated, [])
        if allocated:
            with _quietly():
                found = (each for each in _tensors(gc.get_objects()) if _memory_of(each, self._kind))
                self._noted = (allocated, list(map(weakref.ref, found)))


def _collect() -> None:
    """What this iteration made; everything where that cannot be told: memory that is missing costs more."""
    if not heap.collect():
        gc.collect()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """What fails in here, among objects of any kind, is no fault of the training's."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            yield
    except Exception:
        log.debug("the owners of the GPU's memory could not be found", exc_info=True)


def _allocated() -> int:
    """0 where CUDA is not in use. One generator per device is made with CUDA; to count devices may ask the driver."""
    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return 0
    return sum(int(cuda.memory_allocated(device)) for device in range(len(cuda.default_generators)))


# --- which tensors ------------------------------------------------------------------------------------------------


def _find(kind: str, before: Sequence[weakref.ref[Any]], grown: int) -> tuple[int, int, list[str]]:
    """New bytes except what is kept on purpose, those of no tensor of Python's, and a line for each large tensor."""
    size, hidden, largest = _new(kind, before, grown)
    texts = [f"{in_words(memory)}, {_shape(tensor)}" for memory, tensor in largest]
    tensors = [largest.pop(0)[1] for _ in texts]  # a list that still has them would be found as their owner
    return size, hidden, [f"{text}: {owner}" for text, owner in zip(texts, _owners(tensors), strict=True)]


def _new(kind: str, before: Sequence[weakref.ref[Any]], grown: int) -> tuple[int, int, list[tuple[int, Any]]]:
    found = _memories(_with_gradients(_tensors(gc.get_objects())), kind)
    kept = _memories(_with_gradients(_tensors(_below(keepers))), kind).keys()
    for address in _memories((reference() for reference in before), kind):
        found.pop(address, None)
    size = grown - sum(found.pop(address)[0] for address in kept & found.keys())
    fresh = sorted(found.values(), key=lambda memory: memory[0], reverse=True)
    largest = [memory for memory in fresh[:SHOWN] if memory[0] * SMALL >= size]
    return size, size - sum(memory[0] for memory in fresh), largest


def _tensors(things: Iterable[Any]) -> list[Any]:
    # by type, not with isinstance(), which asks the object itself
    return [thing for thing in things if issubclass(type(thing), torch.Tensor)]


def _memories(tensors: Iterable[Any], kind: str) -> dict[int, tuple[int, Any]]:
    """By address: size, and a tensor that has it. A view, where there is one: what it shows may be held by it alone."""
    found: dict[int, tuple[int, Any]] = {}
    for tensor in tensors:
        memory = None if tensor is None else _memory_of(tensor, kind)
        if memory is not None and (memory[0] not in found or torch.Tensor._is_view(tensor)):
            found[memory[0]] = memory[1], tensor
    return found


def _memory_of(tensor: Any, kind: str) -> tuple[int, int] | None:
    """Address and size of a tensor's memory; None: it has none there, such as one that only stands for others."""
    try:
        storage = torch.Tensor.untyped_storage(tensor)
        # to ask a lazy copy for its address would make it
        lazy = getattr(torch._C, "_is_cow_tensor", lambda tensor: False)(tensor)
        if storage.device.type != kind or lazy or not storage.nbytes():
            return None
        return storage.data_ptr(), storage.nbytes()
    except Exception:
        return None


def _with_gradients(tensors: Iterable[Any]) -> Iterator[Any]:
    """C++ holds them, for their parameters."""
    for tensor in tensors:
        yield tensor
        with contextlib.suppress(Exception):
            base: Any = torch._C.TensorBase
            if base.is_leaf.__get__(tensor) and base.requires_grad.__get__(tensor):
                yield base.grad.__get__(tensor)


def _below(owners: Iterable[Any]) -> Iterator[Any]:
    """All that these refer to, without what functions and modules do."""
    seen, waiting = set[int](), list(owners)
    while waiting and len(seen) < KEPT:
        thing = waiting.pop()
        if id(thing) not in seen and not issubclass(type(thing), _ELSEWHERE):
            seen.add(id(thing))
            waiting += gc.get_referents(thing)
            yield thing


# --- who holds them -----------------------------------------------------------------------------------------------


def _owners(tensors: list[Any]) -> list[str]:
    """For each the way to its first owner: ``item 3 of a list, in `losses` of module train``."""
    ways: list[list[str]] = [[] for _ in tensors]
    waiting = dict(enumerate(tensors))
    tensors.clear()
    until, took = clock.monotonic() + SECONDS, 0.0
    for _ in range(PASSES):
        begin = clock.monotonic()
        if begin + took > until:
            break
        variables = _variables({id(thing) for thing in waiting.values()})
        for place in [place for place, thing in waiting.items() if id(thing) in variables]:
            ways[place].append(variables[id(waiting.pop(place))])
        targets = list(waiting.values())
        found = gc.get_referrers(*targets)[:HOLDERS] if targets else []
        holders = [each for each in found if each is not targets and each is not waiting and not _is_ours(each)]
        del found, targets
        for place, child in list(waiting.items()):
            holder = next((each for each in holders if any(child is one for one in gc.get_referents(each))), None)
            words, ends = _role(child, holder)
            ways[place].append(words)
            waiting[place] = holder
            if ends:
                del waiting[place]
        del holders
        took = clock.monotonic() - begin
    for place in waiting:
        ways[place].append("something else (the search ends here)")
    return [", in ".join(way) for way in ways]


def _variables(ids: set[int]) -> dict[int, str]:
    """Which of them are variables of modules; the collector lists no module that gc.freeze() has hidden."""
    found: dict[int, str] = {}
    for name, module in list(sys.modules.items()):
        space = object.__getattribute__(module, "__dict__") if issubclass(type(module), ModuleType) else {}
        for key, value in list(space.items()):
            if id(value) in ids:
                found.setdefault(id(value), f"`{key}` of module `{name}`")
    return found


def _is_ours(holder: Any) -> bool:
    return type(holder) is FrameType and holder.f_code.co_filename.startswith(PACKAGE)


def _role(child: Any, holder: Any) -> tuple[str, bool]:
    """What it is to its holder, and whether the way ends there."""
    if holder is None:
        return "held by C++ (as a gradient, by a hook, a graph) or by a function that runs", True
    kind = type(holder)
    with contextlib.suppress(Exception):  # an object of the program's own may answer anything
        if issubclass(kind, ModuleType | type):
            return f"`{holder.__name__}`", True
        if kind in (FunctionType, FrameType, GeneratorType):
            code = next(getattr(holder, name) for name in ("__code__", "f_code", "gi_code") if hasattr(holder, name))
            return (
                f"{kind.__name__} `{code.co_name}` ({os.path.basename(code.co_filename)}:{code.co_firstlineno})",
                True,
            )
        if issubclass(kind, dict):
            found = [key for key, value in dict.items(holder) if value is child]
            words = (
                "a key of a dict" if not found else f"`{found[0]}`" if type(found[0]) is str else "a value of a dict"
            )
            if type(name := dict.get(holder, "__name__")) is str and dict.__contains__(holder, "__builtins__"):
                return f"{words} of module `{name}`", True
            return words, False
        if issubclass(kind, list | tuple):
            place = next(place for place, each in enumerate(holder) if each is child)
            return f"item {place} of a {kind.__name__}", False
        names = [name for name, value in object.__getattribute__(holder, "__dict__").items() if value is child]
        return f"{''.join(f'`{name}`, in ' for name in names[:1])}a {kind.__name__}", False
    return f"a {kind.__name__}", False


# --- words --------------------------------------------------------------------------------------------------------


def _shape(tensor: Any) -> str:
    base: Any = torch._C.TensorBase
    dtype = str(base.dtype.__get__(tensor)).removeprefix("torch.")
    return f"{dtype} {list(base.shape.__get__(tensor))} on {base.device.__get__(tensor)}"


def _warn(state: FrozenState, size: int, hidden: int, largest: Sequence[str]) -> None:
    if size <= WORTH_A_WARNING:
        return
    lines = [
        f"{name_of(state.rank, state.initial_rank)}: as iteration {state.iteration} begins, "
        f"{in_words(size)} of the GPU's memory that an earlier iteration took is not free. The largest tensors:",
        *largest,
    ]
    if hidden > WORTH_A_WARNING:
        lines.append(
            f"{in_words(hidden)} belongs to no tensor that Python knows of: C++ holds it, such as the autograd graph "
            "of a loss that is kept, or a process group that does not end"
        )
    lines.append(
        "Release it when the function is left (a `finally` block or the finalize hook). What is meant to outlive a "
        "restart may stay; this warning is repeated only for memory that is new"
    )
    log.warning("\n  ".join(lines))


def in_words(size: int) -> str:
    """Bytes, as people say them."""
    return f"{size / MIB:.1f} MiB" if size < 1024 * MIB else f"{size / MIB / 1024:.2f} GiB"


#: one per process
leftovers = Leftovers()
part = Part(
    call_begins=lambda call: leftovers.begin(anew=not call.moved),
    iteration_begins=lambda iteration: leftovers.report(iteration.state),
    function_begins=leftovers.enter,
    collect=leftovers.collect,
)
