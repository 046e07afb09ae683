"""What an exception leaves open where it leaves a coalescing context of torch's: NCCL's group call.

Between ``ncclGroupStart`` and ``ncclGroupEnd`` NCCL only queues what is asked of it. ``batch_isend_irecv`` and
``_coalescing_manager`` of torch (2.13) begin such a group call with ``ProcessGroup._start_coalescing`` and end it with
``_end_coalescing``, but not where an exception comes between. Both NCCL (how deep group calls are nested) and torch
(how many it has begun) count in variables of the thread, which outlive the groups, and the main thread goes on: in the
next iteration its collectives are queued and never begin, so that their results are what was in the memory before. Or
torch cannot make a communicator any more, since it ends as many group calls as it has counted.

It is no rare window. A loop that waits for one batch when the abort comes goes on to the next, where torch raises.

So for the time of a call

* a context cannot begin on a group that is being aborted;
* an abort waits a moment for the contexts that are open on its group: NCCL's queue refers to the communicator, and an
  abort frees it;
* what is open where an exception leaves the context is ended, in the thread that began it. An interruption may come
  even here, so the main thread ends what is open again when it has left the function, before the others are told.
  Nothing that was queued is begun by that: it would wait for peers. An invalid operation before the end has NCCL drop
  it all; it is a warning in NCCL's own log.

Where ``ncclGroupEnd`` fails, NCCL has one group call less, and torch counts as many as before, since it counts after
the call has succeeded. Then one is begun behind torch's back, and ended with torch.

Gloo has no such state, and that of ``nccl2`` goes with its groups: neither has ``_group_end``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from inprocess.collectives import groups
from inprocess.collectives.nccl_shutdown import ABORT, SHUTDOWN, Method, Replaced
from inprocess.interrupt.frames import leave_alone
from inprocess.system.errors import in_words
from inprocess.system.logs import get_logger, once

__all__ = ["Contexts", "contexts"]

log = get_logger(__name__)
#: seconds that an abort waits for the contexts of its group; the main thread may just be parked in one
LIMIT = 0.1
START, END = "_start_coalescing", "_end_coalescing"
#: torch's context manager, which two modules have under this name
MANAGER = "_coalescing_manager"
#: files that may have NCCL, as the dynamic linker knows them
_LIBRARIES = ("libnccl.so.2", "libtorch_cuda.so")


@dataclass(frozen=True, eq=False)
class _Context:
    """One that has begun."""

    group: Any
    device: Any


class _Here(threading.local):
    """Of each thread: its open contexts, the innermost last."""

    def __init__(self) -> None:
        self.open: list[_Context] = []


class Contexts:
    """The coalescing contexts that are open, from `begin` to `end`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # under its lock; an entry goes with its group
        self._aborted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._here = _Here()
        self._replaced: list[Replaced] = []

    def begin(self, kind: Any = None) -> None:
        """A call begins, after that of `Shutdowns`. Where torch has no NCCL, nothing is done.

        Args:
            kind: the class of groups; default None: ``torch.distributed.ProcessGroup``.
        """
        if self._replaced or (kind is None and not (dist.is_available() and dist.is_nccl_available())):
            return
        kind = dist.ProcessGroup if kind is None else kind
        methods = ((START, self._start), (END, self._end), (SHUTDOWN, self._shutdown), (ABORT, self._abort))
        self._replaced = [Replaced(kind, *method) for method in methods if hasattr(kind, method[0])]
        modules = (dist.distributed_c10d, dist)
        self._replaced += [Replaced(each, MANAGER, self._manager) for each in modules if hasattr(each, MANAGER)]

    def end(self) -> None:
        """The call is over, before that of `Shutdowns`. Main thread."""
        self.close()
        while self._replaced:
            self._replaced.pop().restore()
        self._aborted.clear()

    def close(self, keep: int = 0) -> None:
        """End what this thread has begun and not ended, except the outermost contexts, so many."""
        while len(self._here.open) > keep:
            context = self._here.open.pop()
            _end_group_call(context)
            self._count(context.group, -1)
            _forget(context.group)
        with self._changed:
            aborted = list(self._aborted)
        for group in aborted:  # a context that had not begun yet, or needs no group call
            _forget(group)

    def _count(self, group: Any, change: int) -> None:
        with self._changed:
            self._counts[group] = max(0, self._counts.get(group, 0) + change)
            self._changed.notify_all()

    # --- in place of torch's ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _manager(self, original: Method, *args: Any, **kwargs: Any) -> Iterator[Any]:
        outside = len(self._here.open)
        try:
            with original(*args, **kwargs) as manager:
                yield manager
        except BaseException:
            self.close(outside)
            raise

    def _start(self, original: Method, group: Any, *args: Any) -> Any:
        with self._changed:
            if group in self._aborted:
                raise RuntimeError(f"process group {groups.name_of(group)} was aborted for a restart")
            self._counts[group] = self._counts.get(group, 0) + 1
        if any(context.group in self._aborted for context in self._here.open):
            self.close()  # of an earlier iteration
        try:
            found = original(group, *args)
        except BaseException:
            self._count(group, -1)
            raise
        self._here.open.append(_Context(group, args[0] if args else None))
        return found

    def _end(self, original: Method, group: Any, *args: Any) -> Any:
        """Where it raises, torch counts it as open, as `close` does."""
        found = original(group, *args)
        for context in reversed(self._here.open):
            if context.group is group:
                self._here.open.remove(context)
                self._count(group, -1)
                break
        return found

    def _shutdown(self, original: Method, group: Any) -> Any:
        """In an open group call it would only be queued: in a ``finally:``, after an exception in a context."""
        self.close()
        return original(group)

    def _abort(self, original: Method, group: Any) -> Any:
        with self._changed:
            self._aborted.add(group)
            if not self._changed.wait_for(lambda: not self._counts.get(group), LIMIT):
                log.debug("process group %s is aborted within a coalescing context", groups.name_of(group))
        return original(group)


def _forget(group: Any) -> None:
    """torch notes what a context collects, by its group; after an exception this would keep the group."""
    collected: Any = getattr(groups.world(), "pg_coalesce_state", {})
    collected.pop(group, None)


def _end_group_call(context: _Context) -> None:
    end = _end_of(context)
    if end is None:
        return
    nccl = _nccl()
    if nccl is not None:
        # without a communicator: what is queued in this thread is dropped, and ending it is an error
        nccl.ncclAllReduce(None, None, ctypes.c_size_t(0), 0, 0, None, None)
    try:
        end()
    except Exception as error:
        log.debug("what was queued for NCCL is dropped: %s", in_words(error))
        _recount(nccl, end)


def _recount(nccl: Any, end: Callable[[], object]) -> None:
    """NCCL's group call is over, torch's is not."""
    if nccl is None:
        once(
            log.warning,
            "an exception has left a coalescing context (batch_isend_irecv) half-way, and NCCL's library is not found: "
            "torch may fail to make NCCL groups in this process",
        )
        return
    with contextlib.suppress(Exception):
        if nccl.ncclGroupStart() == 0:
            end()


def _end_of(context: _Context) -> Callable[[], object] | None:
    """What ends a group call of NCCL's as torch does it; None where the group has none."""
    try:
        backend = groups.backend_of(context.group, context.device)
    except Exception:  # none for this device
        return None
    end: Callable[[], object] | None = getattr(backend, "_group_end", None)
    return end


def _nccl() -> Any:
    """NCCL's library as torch has loaded it; None where it is not found."""
    for name in _LIBRARIES:
        with contextlib.suppress(OSError, AttributeError):
            found = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            _ = found.ncclGroupStart, found.ncclAllReduce
            return found
    return None


# an interruption half-way would leave the lock locked, or a group call that nobody knows of
_WHOLE = (Contexts.close, Contexts._start, Contexts._end, Contexts._shutdown, Contexts._abort)
leave_alone(*(each.__code__ for each in _WHOLE))

#: one per process, as NCCL's threads are; `call.parts` begins and ends it
contexts = Contexts()
