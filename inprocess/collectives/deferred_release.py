"""What the abort took from torch, kept until everybody has left the function; and what torch itself remembers."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch

from inprocess.collectives.gloo_lost import lost_operations
from inprocess.system import clock
from inprocess.system.errors import in_words
from inprocess.system.interpreter import running_frames
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
        self._pending: list[Any] = []
        #: what makes such a result, while another function stands in its place
        self._make: Any = None
        #: of them, how many others had after the last collection
        self._kept = 0
        #: since it last let go
        self._aborted = self._graphs_were_reset = False

    def begin(self) -> None:
        """Let go of what is held, but for groups that others have, and keep what comes from now on.

        Groups wait for `free`.
        """
        self._let_go([*_shared(self._groups), *_shared(self._destroyed)])
        self._active = True
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
        if _shared(self._groups):  # a collection that found one in use for a moment skips the next one in a cycle
            gc.collect(2)
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
        """torch is about to forget its groups. Takes 25 ms with 300,000 objects where functional collectives are used.

        The function runs on meanwhile: it may get further results, then fail for want of a group, and free them all.
        """
        if self._active and (kind := _result()) is not None:
            if self._make is None:
                self._make = vars(kind)["__new__"]
                kind.__new__ = functools.partial(_make, kind.__new__, self._pending)
            self._pending += [*_pending(), *_being_made(self._make.__func__.__code__)]

    def raised(self) -> None:
        """In the main thread: an exception has left the function, whose frames still have what they had."""
        if self._active and _begun_here():
            with contextlib.suppress(Exception):
                self._pending.extend(_pending())

    def collect(self) -> None:
        """The function was left: free the groups that are in reference cycles.

        With tensor parallelism or FSDP each iteration leaves such cycles, and each group has threads and sockets. A
        full collection takes 30 to 40 ms. So there is none where nothing but this list has a group, as with
        DistributedDataParallel, and none where no more groups are shared than those that the last one did not free:
        these the program keeps, in a global variable perhaps.
        """
        self._wait_for_pending()
        _forget_meshes()
        for generation in (1, 2):
            if len(_shared(self._groups)) > self._kept:
                gc.collect(generation)
        self._kept = len(_shared(self._groups))

    def _wait_for_pending(self) -> list[threading.Thread]:
        if self._make is not None:
            _result().__new__, self._make = self._make, None
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


def _result() -> Any:
    """torch's class of what a functional collective answers; None where the program uses none."""
    return getattr(sys.modules.get("torch.distributed._functional_collectives"), "AsyncCollectiveTensor", None)


def _make(make: Callable[..., Any], made: list[Any], kind: Any, tensor: Any) -> Any:
    made.append(tensor)
    return make(kind, tensor)


def _pending() -> list[Any]:
    """The results that are still to be waited for, wherever they are; but for one that is just being made."""
    if (kind := _result()) is None:
        return []
    return [each.elem for each in gc.get_referrers(kind) if type(each) is kind and not getattr(each, "completed", True)]


def _being_made(make: CodeType) -> list[Any]:
    """What is just being wrapped in a result, in a function with this code; the result may not exist yet."""
    tensor = make.co_varnames[1]  # after the class
    return [frame.f_locals[tensor] for _, frame in running_frames() if frame.f_code is make]


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
