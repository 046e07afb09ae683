"""What the abort took from torch, kept until everybody has left the function; and what torch itself remembers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from inprocess.collectives.gloo_lost import lost_operations
from inprocess.system import clock
from inprocess.system.errors import in_words
from inprocess.system.heap import heap
from inprocess.system.logs import get_logger

log = get_logger(__name__)
#: the name of the threads that free groups
FREEING = "inprocess-free"
#: seconds that the end of a call waits for the destructors of process groups
LET_GO = 1.0


class DeferredRelease:
    """What the abort took from torch, kept until everybody has left the function.

    Copies of connections: closing one resets it at the other end, and a peer whose event thread is just writing loses
    the operation, which then waits until its timeout. So each rank ends its own reading, and closes later.

    Process groups: a DistributedDataParallel reducer that is a group's last owner destroys it with the interpreter
    lock held, and waits for Gloo's worker, which may want that lock to free an operation. So a group that is referred
    to from elsewhere stays here until it is not, or until the call ends. That holds for those that the program itself
    destroys, too: with torch 2.13 a function that ends right after its last backward pass and
    ``destroy_process_group()`` would now and then not return.
    """

    def __init__(self) -> None:
        self._active = False
        #: by inode: the abort is repeated until the function was left
        self._connections: dict[int, socket.socket] = {}
        self._groups: list[Any] = []
        #: those that the program destroyed
        self._destroyed: list[Any] = []
        #: those that nobody else has
        self._unused: list[Any] = []
        #: of groups, how many others had after the last collection
        self._kept = 0
        #: what functional collectives have begun, and nobody has waited for
        self._pending: list[Any] = []
        self._results = _Results()
        #: since it last let go
        self._aborted = self._graphs_were_reset = False

    def begin(self) -> None:
        """Let go of what is held, but for groups that others have, and keep what comes from now on.

        Groups wait for `free`.
        """
        self._let_go([*_shared(self._groups), *_shared(self._destroyed)])
        self._active = True
        self._results.begin()
        lost_operations.begin()

    def free(self) -> list[threading.Thread]:
        """Free the groups that were let go of, once the function runs: to begin it before took a restart up to 1.8 ms.

        Any thread. Answers the threads that do it.
        """
        unused, self._unused = self._unused, []
        try:
            return [_in_background(functools.partial(_free, unused))] if unused else []
        except RuntimeError:  # there is no thread left
            self._unused = unused
            return []

    def end(self) -> None:
        """Let go of what is held and keep nothing more."""
        self._active = False
        self._kept = 0
        threads = self._wait_for_pending()
        self._results.end()
        if _shared(self._groups):  # a collection that found one in use for a moment skips the next one in a cycle
            heap.collect()
        self._let_go([])
        threads += self.free()
        until = clock.monotonic() + LET_GO
        for thread in threads:
            thread.join(max(0.0, until - clock.monotonic()))

    def connection(self, connection: socket.socket) -> None:
        """A connection that was just shut down."""
        if self._active and (inode := os.fstat(connection.fileno()).st_ino) not in self._connections:
            self._connections[inode] = connection.dup()

    def groups(self, groups: list[Any]) -> None:
        """Process groups that torch has forgotten; takes them out of the list."""
        self._aborted = True
        if self._active:
            self._groups += groups
            groups.clear()
        elif groups:
            _in_background(groups.clear)

    def destroyed(self, group: Any) -> None:
        """The program is destroying a process group. Lets go of earlier ones that nobody else has."""
        if not self._active:
            return
        kept = _shared(self._destroyed)
        alone = _without(self._destroyed, kept)
        self._destroyed = [*kept, group]
        if alone:
            _in_background(alone.clear)

    def pending(self) -> None:
        """torch is about to forget its groups.

        The function runs on meanwhile: it may get further results, then fail for want of a group, and free them all.
        """
        if self._active:
            self._pending += self._results.keep(self._pending)

    def raised(self) -> None:
        """In the main thread: an exception has left the function, whose frames still have what they had."""
        if self._active and _begun_here():
            with contextlib.suppress(Exception):
                self._pending.extend(self._results.waiting())

    def collect(self) -> None:
        """The function was left: free the groups that are in reference cycles.

        With tensor parallelism or FSDP each iteration leaves such cycles, and each group has threads and sockets. The
        collection looks at what this iteration has made. There is none where nothing but this list has a group, as with
        DistributedDataParallel, and none where no more groups are shared than those that the last one did not free:
        these the program keeps, in a global variable perhaps.
        """
        self._wait_for_pending()
        _forget_meshes()
        _forget_defaults()
        for generation in (1, 2):
            if len(_shared(self._groups)) > self._kept:
                heap.collect(generation)
        self._kept = len(_shared(self._groups))

    def _wait_for_pending(self) -> list[threading.Thread]:
        self._results.keep(None)
        pending, self._pending = self._pending, []
        # torch lets go of the operation when the wait begins; that may last as long as the timeout of the group
        return [_in_background(functools.partial(_wait_for, tensor)) for tensor in pending]

    def graphs_were_reset(self) -> None:
        """The CUDA graphs of this process can be replayed no more."""
        self._graphs_were_reset = True

    def _let_go(self, without: list[Any]) -> None:
        _forget_meshes()
        if self._aborted:
            _forget(_ABORTED)
        if self._graphs_were_reset and _has_compiled_graphs():
            _forget(_COMPILED)
        self._aborted = self._graphs_were_reset = False
        connections, self._connections = self._connections, {}
        groups, self._groups, self._destroyed = [*self._groups, *self._destroyed], without, []
        self._unused += _without(groups, without)
        del groups
        for connection in connections.values():
            connection.close()


#: what DTensor remembers of operations it has seen, by mesh
_MESHES = (
    "torch._C:_clear_DTensor_sharding_propagator_cache",
    "torch.distributed.tensor:DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear",
    "torch.distributed.tensor._redistribute:_gen_transform_infos.cache_clear",
    "torch.distributed.tensor._redistribute:clear_redistribute_planner_cache",
    "torch.distributed.tensor._collective_utils:MeshTopoInfo.build_from_mesh.cache_clear",
)
#: what is of no use after an abort: stores and buffers of symmetric memory, by names of groups, which the next ones
#: have too
_ABORTED = (
    "torch.distributed._symmetric_memory:_group_name_to_store.clear",
    "torch.distributed._symmetric_memory:_group_name_to_workspace_tensor.clear",
)
#: compiled code, which would go on to replay graphs that were reset: it is compiled again
_COMPILED = ("torch.compiler:reset",)


def _counts(things: Sequence[Any]) -> list[int]:
    """How many references there are to each, with those that it takes to count them."""
    return [sys.getrefcount(thing) for thing in things]


#: of a thing that only one list refers to
_ALONE = _counts([object()])[0]


def _shared(groups: Sequence[Any]) -> list[Any]:
    """Those that are referred to from elsewhere."""
    return [group for group, count in zip(groups, _counts(groups), strict=True) if count > _ALONE]


def _without(groups: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Those that are none of the others."""
    return [group for group in groups if not any(group is other for other in others)]


class _Results:
    """The results of functional collectives, noted while they are made: to look for them takes longer, the more objects
    there are. torch notes an operation by its result, and keeps both until somebody waits."""

    def __init__(self) -> None:
        #: torch's class of such results, and what makes one of it
        self._kind: Any = None
        self._make: Any = None
        #: by number; what is wrapped stands here itself until its result is made
        self._made: dict[int, weakref.ref[Any]] = {}
        self._numbers = itertools.count()
        #: gets what is wrapped from now on
        self._kept: list[Any] | None = None

    def begin(self) -> None:
        """Note what is made from now on, of this iteration."""
        self._made.clear()
        if self._kind is not None:
            return
        try:
            # a model in DistributedDataParallel imports it later, inside the function
            from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: PLC0415

            self._kind = AsyncCollectiveTensor
            self._make = vars(self._kind)["__new__"]
        except Exception as error:  # torch without torch.distributed, or it keeps them elsewhere
            log.debug("functional collectives are not noted: %s", in_words(error))
            self._kind = None
            return
        self._kind.__new__ = functools.partial(self._note, self._kind.__new__)

    def end(self) -> None:
        if self._kind is not None:
            self._kind.__new__, self._kind, self._make = self._make, None, None
        self._made.clear()

    def keep(self, kept: list[Any] | None) -> list[Any]:
        """Those that are still to be waited for; what is made from now on is put into this list (None: no more)."""
        self._kept = kept
        return [] if kept is None else self.waiting()

    def waiting(self) -> list[Any]:
        """What was wrapped, of those that nobody has waited for."""
        found = [reference() for reference in list(self._made.values())]
        return [getattr(each, "elem", each) for each in found if each is not None and not _is_completed(each)]

    def _note(self, make: Callable[..., Any], kind: Any, tensor: Any) -> Any:
        if self._kept is not None:
            self._kept.append(tensor)
        made, number = self._made, next(self._numbers)

        def forget(_: object) -> None:
            made.pop(number, None)

        made[number] = weakref.ref(tensor, forget)
        result = make(kind, tensor)
        made[number] = weakref.ref(result, forget)
        return result


def _is_completed(result: Any) -> bool:
    """False also of what is not wrapped yet."""
    return bool(getattr(result, "completed", False))


def _begun_here() -> int:
    """How many collectives of this thread are still to be waited for."""
    bindings = getattr(torch._C, "_distributed_c10d", None)
    count: Callable[[], int] = getattr(bindings, "_get_work_registry_size", lambda: 0)
    return count()


def _wait_for(tensor: Any) -> None:
    with contextlib.suppress(Exception):  # its group is aborted, so it may have failed
        torch.ops._c10d_functional.wait_tensor(tensor)


def _has_compiled_graphs() -> bool:
    """Whether the compiler recorded CUDA graphs of its own in this thread."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    try:
        containers = trees.get_obj(trees.local, "tree_manager_containers")
        return any(container.tree_manager is not None for container in containers.values())
    except Exception:  # not imported, not used, or kept elsewhere
        return False


def _forget_meshes() -> None:
    if "torch.distributed.tensor" in sys.modules:
        _forget(_MESHES)


#: modules whose functions have the default group for a default argument. It is the one of the moment at which they are
#: imported; DistributedDataParallel does that inside the function (torch 2.9 to 2.15). The group would stay for ever,
#: and the next iteration's collectives would use it
_WITH_DEFAULTS = ("torch.distributed.nn.functional", "torch.distributed.optim.zero_redundancy_optimizer")


def _forget_defaults() -> None:
    """None stands for the default group of the moment at which a function is called."""
    for name in _WITH_DEFAULTS:
        for function in list(vars(sys.modules.get(name, object)).values()):
            if type(function) is FunctionType and any(map(_is_group, function.__defaults__ or ())):
                defaults = function.__defaults__ or ()
                function.__defaults__ = tuple(None if _is_group(each) else each for each in defaults)


def _is_group(value: Any) -> bool:
    return isinstance(value, dist.ProcessGroup)


def _forget(names: Sequence[str]) -> None:
    """In the main thread, whose memory it partly is. Where torch keeps it elsewhere, one iteration's groups stay."""
    for name in names:
        module, _, path = name.partition(":")
        try:
            operator.attrgetter(path)(sys.modules.get(module))()
        except AttributeError:  # not imported, or elsewhere
            continue
        except Exception as error:  # a GPU that is lost
            log.debug("%s failed: %s", name, in_words(error))


def _free(groups: list[Any]) -> None:
    """A group's destructor waits for its threads, and one of these for an operation that is lost."""
    lost_operations.release_rest()
    groups.clear()


def _in_background(action: Callable[[], object]) -> threading.Thread:
    """A group's destructor waits for Gloo's threads (10 ms), and could wait for ever."""
    thread = threading.Thread(target=action, name=FREEING, daemon=True)
    thread.start()
    return thread


#: one per process, like torch's process groups; the loop begins and ends it
held = DeferredRelease()
