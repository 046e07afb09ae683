"""The state of the parts as a list of tensors, and everything else of it as bytes; and back.

Bytes are torch's own format without code in it (``weights_only``), with each tensor as one without data.
"""

from __future__ import annotations

import copy
import io
import operator
import sys
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

import torch

from inprocess.exception import LiveStateError
from inprocess.live.plan import Shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "Path",
    "Record",
    "Stateful",
    "dotted",
    "faults",
    "into",
    "leaves",
    "like",
    "local",
    "put",
    "read",
    "replaced",
    "shard_of",
    "take",
]


#: types of values that torch loads whatever they are; almost all of a state is of these, so the rest can be tried
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size))
#: containers that it loads, if what is in them can be loaded
_CONTAINERS = frozenset((dict, OrderedDict, list, tuple))
#: keys and indices that lead to a tensor
Path: TypeAlias = tuple[Any, ...]


@runtime_checkable
class Stateful(Protocol):
    """A module, an optimizer, a scheduler, a data loader: what a state can be taken of, and given back to."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass
class Record:
    """A state at one step.

    Args:
        tree: all of it as nested containers; where it travels or is kept, each tensor is one on the device ``meta``.
        tensors: their data, in the order in which `leaves` meets them; of a DTensor what is on this rank.
    """

    tree: Any
    tensors: list[torch.Tensor]

    def header(self) -> bytes:
        """Raises LiveStateError for what torch does not load again without running code."""
        try:
            return _header(self.tree)  # the one that sends it should say so, and not the one that receives it
        except Exception as error:
            found = next((f"{dotted(path)} is a {kind}" for path, kind in faults(self.tree)), error)
            raise LiveStateError(
                f"a part's state_dict() holds something that cannot be loaded without running code: {found}. Keep it "
                "to tensors, numbers, strings, None, and dicts, lists, tuples and sets of these. A named tuple, or "
                "another class that torch can load so, may be told to torch.serialization.add_safe_globals, on all "
                "ranks"
            ) from error

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def read(header: bytes) -> Any:
    """The tree whose `header` this is. Raises LiveStateError where code would have to run for it."""
    try:
        return torch.load(io.BytesIO(header), weights_only=True)
    except Exception as error:  # whatever its unpickler meets
        raise LiveStateError(f"a state cannot be loaded without running code: {error}") from error


def _header(tree: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tree, file)
    torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    return file.getvalue()


def faults(state: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Where in a state something is that torch does not load again without running code, and of which type."""
    kind = type(state)
    is_common = kind in _CONTAINERS
    if kind in _PLAIN or isinstance(state, torch.Tensor) or not (is_common or _is_strange(state)):
        return
    is_here = not is_common
    for key, value in _content(state) if _is_container(state) else ():
        for fault in faults(value, (*path, key)):
            is_here = False
            yield fault
    if metadata := getattr(state, "_metadata", None):  # of a module's: versions, and what its hooks put there
        yield from faults(metadata, (*path, "_metadata"))
    if isinstance(state, dict) and not all(type(key) in _PLAIN for key in state) and _is_strange(dict.fromkeys(state)):
        yield path, "dict with such keys"
    elif is_here:
        yield path, f"{kind.__module__}.{kind.__qualname__}"


def _is_strange(value: Any) -> bool:
    """Tensors never are; without them it is quick."""
    try:
        _header(replaced(value, lambda leaf: None))
    except Exception:  # whatever pickle and its reader meet
        return True
    return False


def take(state: Any) -> Record:
    """What a state_dict() holds; the tensors themselves, not copies."""
    with torch.no_grad():
        tensors = [local(leaf) for _, leaf in leaves(state)]
    found = iter(tensors)
    return Record(replaced(state, lambda leaf: torch.empty_like(next(found), device="meta")), tensors)


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor; nobody has made one where torch's module, which takes long to import, is not there."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is on this rank: of a DTensor its shard, sharing its memory."""
    found: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return found.detach()


def put(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, also to a tensor that is expanded: one element in several places, to which torch does not copy."""
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def leaves(state: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors in nested containers, each with where it is."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif _is_container(state):
        for key, value in _content(state):
            yield from leaves(value, (*path, key))


def _is_container(state: Any) -> bool:
    return isinstance(state, Mapping | tuple | MutableSequence) and not isinstance(state, bytearray)


def _content(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, Mapping) else enumerate(container)


def dotted(path: Path) -> str:
    """As torch names what is in a checkpoint."""
    return ".".join(map(str, path))


def replaced(state: Any, new: Callable[[torch.Tensor], Any]) -> Any:
    """The same containers, of the same types, with other tensors."""
    if isinstance(state, torch.Tensor):
        return new(state)
    if not _is_container(state):
        return state
    return like(state, {key: replaced(value, new) for key, value in _content(state)})


def like(container: Any, content: dict[Any, Any]) -> Any:
    """A container as that one with other content, by key or index.

    Whoever loads a Counter, say, or a named tuple, uses it as such.
    """
    kind = type(container)
    if kind is dict:
        return content
    if isinstance(container, tuple):
        if all(map(operator.is_, container, content.values())):
            return container
        make: Callable[[Any], Any] = getattr(container, "_make", kind)  # a named tuple takes its values one by one
        return make(content.values())
    if isinstance(container, dict | list | UserDict | UserList | deque):
        made = copy.copy(container)  # with what belongs to it besides: a factory, a length, versions of modules
        for key, value in content.items():
            made[key] = value
        return made
    return content if isinstance(container, Mapping) else list(content.values())


def into(state: Any, skeleton: Any) -> Record:
    """A record to be filled with the data of another one; its tree is for load_state_dict().

    Its tensors are those of ``state`` wherever that has one of this shape at that place: so nothing is in memory twice,
    and a DTensor stays one.
    """
    own = dict(leaves(state))
    paths = iter([path for path, _ in leaves(skeleton)])
    tensors: list[torch.Tensor] = []

    def target(leaf: torch.Tensor) -> torch.Tensor:
        path = next(paths)
        mine = own.get(path)
        if mine is not None and local(mine).shape == leaf.shape and mine.dtype == leaf.dtype:
            tensors.append(local(mine))
            return mine
        if mine is not None and is_sharded(mine):
            raise LiveStateError(
                f"{dotted(path)} is sharded, with {tuple(local(mine).shape)} {mine.dtype} on this rank, and what was "
                f"kept of it has {tuple(leaf.shape)} {leaf.dtype}: shard it as before"
            )
        tensors.append(torch.empty_like(leaf, device="cpu" if mine is None else mine.device))
        return tensors[-1]

    with torch.no_grad():
        return Record(replaced(skeleton, target), tensors)


def shard_of(state: Any) -> Shard:
    """Which shard of a state is here, from its DTensors; one without any is the same everywhere."""
    meshes: dict[Any, set[int]] = {}
    for _, leaf in leaves(state):
        if is_sharded(leaf):
            # there are kinds of shards, as of a dimension that is sharded twice, which do not count as one for torch
            whole = (placement.is_replicate() or placement.is_partial() for placement in leaf.placements)
            dims = {dim for dim, is_whole in enumerate(whole) if not is_whole}
            meshes.setdefault(leaf.device_mesh, set()).update(dims)
    if len(meshes) > 1:
        raise LiveStateError(
            "the parts are sharded over more than one device mesh; say which shard this rank has: "
            "recover(call, shard=(index, count))"
        )
    index, count = 0, 1
    for mesh, dims in meshes.items():
        where = mesh.get_coordinate()
        for dim in sorted(dims):
            index, count = index * mesh.size(dim) + where[dim], count * mesh.size(dim)
    return Shard(index, count)
