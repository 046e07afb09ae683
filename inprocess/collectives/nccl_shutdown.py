"""What the program asks of its process groups during a call, where that may cost the process.

*Groups that it destroys.* Each is kept for a while, so that nothing else is its last owner: see
`dead_groups`. All that follows is for NCCL alone.

*Shutdown beside abort.* ``destroy_process_group()`` destroys a communicator; an abort beside it, or after it, uses what
is no more, and a healthy rank gets SIGSEGV (torch 2.13 with NCCL 2.29: none of 8 trials survived 15 restarts; with what
is here all of 6 survived 72). To wait until the main thread has left ``destroy_process_group()`` does not help: it may
enter it while the groups are being aborted. So for the time of a call ``ProcessGroup.shutdown`` and
``ProcessGroup.abort`` share a lock for each group, and the first of them that comes is the only one. A shutdown that
comes while an abort is at work, or after one, does nothing. An abort waits for the shutdown that is at work, but not
for ever: where a peer is gone, it may be that only the abort ends it. From NCCL 2.31 on a rank that destroys its
communicator and one that aborts it wait for each other. So once this rank begins to abort, a shutdown that begins is an
abort, too.

While the program destroys a group, NCCL's thread that waits for datagrams is woken (`nccl_wake`): with
``destroy_process_group()`` in a ``finally:``, the others learn of an exception only after it.

*Groups of some ranks, where the default group is bound to a device.* In NCCL 2.29.7 the ranks outside such a group
crash where a peer fails while it is made. A warning says so where the program does it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

import torch.distributed as dist

from inprocess.collectives import groups, nccl, nccl_wake
from inprocess.collectives.dead_groups import dead_groups
from inprocess.interrupt.frames import leave_alone
from inprocess.system.logs import get_logger, once

__all__ = ["Replaced", "Shutdowns", "shutdowns"]

log = get_logger(__name__)
#: seconds that an abort waits for a shutdown
LIMIT = 2.0
SHUTDOWN, ABORT = "shutdown", "abort"
Method = Callable[..., Any]


class _End:
    """Of one group."""

    def __init__(self) -> None:
        #: held by whoever ends it
        self.lock = threading.Lock()
        #: which of the two does, or did; written by whoever has the lock, or no hope of it
        self.by = ""
        #: a restart aborts it on all ranks, so it must not be shut down any more
        self.is_doomed = False


class Replaced:
    """A method of a class, or a function of a module, and what is called in its place."""

    def __init__(self, kind: Any, name: str, instead: Method) -> None:
        self._kind, self._name = kind, name
        #: as the class has it, which is not what asking the class for it answers; None: it has its base's
        self._own = vars(kind).get(name)
        self._replacement = _in_place_of(_called_from(name, getattr(kind, name)), instead)
        setattr(kind, name, self._replacement)

    def restore(self) -> None:
        """What the program itself has put there meanwhile stays."""
        if vars(self._kind).get(self._name) is not self._replacement:
            return
        if self._own is None:
            delattr(self._kind, self._name)
        else:
            setattr(self._kind, self._name, self._own)


def _called_from(name: str, original: Method) -> Method:
    """The same, for a group whose class is derived from torch's in Python, as small backends are.

    torch's methods in C++ call what such a class has under their name. That would be the replacement, which would call
    itself without end. They do not if they are called by a function of this name, with the group as first argument:
    pybind11 takes that for a derived class that calls its base.
    """
    if isinstance(original, FunctionType):
        return original

    def caller(group: Any, *args: Any, **kwargs: Any) -> Any:
        return original(group, *args, **kwargs)

    caller.__code__ = caller.__code__.replace(co_name=name)
    return functools.update_wrapper(caller, original)


def _in_place_of(original: Method, instead: Method) -> Method:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return instead(original, *args, **kwargs)

    return replacement


class Shutdowns:
    """At most one shutdown or abort of each group, from `begin` to `end`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # under the lock; an entry goes with its group
        self._ends: weakref.WeakKeyDictionary[Any, _End] = weakref.WeakKeyDictionary()
        self._replaced: list[Replaced] = []
        self._wakes = False

    def begin(self, kind: Any = None, backend: Any = None, wakes: bool = False) -> None:
        """A call begins. Where torch has no NCCL, only what is destroyed is noted.

        Args:
            wakes: whether NCCL's threads are to be woken.
            kind: the class of groups; default None: ``torch.distributed.ProcessGroup``.
            backend: that of NCCL's part in them; default None: torch's classes over NCCL.
        """
        if self._replaced:
            return
        self._wakes = wakes
        with_nccl = kind is not None or dist.is_nccl_available()
        backends = nccl.classes() if kind is None else [backend]
        kind = dist.ProcessGroup if kind is None else kind
        methods = [(kind, SHUTDOWN, self._shutdown if with_nccl else _note)]
        if with_nccl:
            methods += [(kind, ABORT, self._abort), *((each, nccl.SPLIT, _warn_of_split) for each in backends)]
        self._replaced = [Replaced(*method) for method in methods if hasattr(*method[:2])]

    def doom(self, current: Iterable[Any]) -> None:
        """These groups of NCCL are about to be aborted."""
        for group in current:
            self._end_of(group).is_doomed = True

    def end(self) -> None:
        """The call is over."""
        while self._replaced:
            self._replaced.pop().restore()

    def _end_of(self, group: Any) -> _End:
        with self._lock:
            return self._ends.setdefault(group, _End())

    def _shutdown(self, original: Method, group: Any) -> None:
        dead_groups.destroyed(group)
        end = self._end_of(group)
        if end.is_doomed:
            group.abort()
            return
        if not end.lock.acquire(blocking=False):  # it is being ended
            return
        try:
            if not end.by:
                end.by = SHUTDOWN
                with _woken() if self._wakes and nccl.is_used_by(group) else contextlib.nullcontext():
                    original(group)
        except Exception:  # so it may still have to be aborted
            end.by = ""
            raise
        finally:
            end.lock.release()

    def _abort(self, original: Method, group: Any) -> None:
        end = self._end_of(group)
        alone = end.lock.acquire(timeout=LIMIT)
        try:
            if end.by == ABORT or (alone and end.by):
                return
            if not alone:
                log.warning(
                    "process group %s: the program's destroy_process_group() has not ended for %g s: the group is "
                    "aborted beside it, which may end this process",
                    groups.name_of(group),
                    LIMIT,
                )
            end.by = ABORT
            original(group)
        finally:
            if alone:
                end.lock.release()


@contextlib.contextmanager
def _woken() -> Iterator[None]:
    """NCCL's threads are, beside what runs here."""
    over = threading.Event()
    thread = threading.Thread(target=nccl_wake.beside_shutdown, args=(over.wait,), name="inprocess-wake", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # there is no thread left
        yield
        return
    try:
        yield
    finally:
        over.set()
        thread.join()


def _note(original: Method, group: Any) -> None:
    dead_groups.destroyed(group)
    original(group)


def _warn_of_split(original: Method, group: Any, *args: Any) -> None:
    once(
        log.warning,
        "a group of some of the ranks is made while the default group is bound to a device: with NCCL 2.29 the ranks "
        "outside that group crash where another rank fails meanwhile. Leave device_id= of init_process_group() away; "
        "torch 2.15 binds each group without it, unless TORCH_DIST_USE_NCCL2=0 is set",
    )
    original(group, *args)


# its lock would stay locked, and it would wait in the handler for an abort that waits for that lock
leave_alone(Shutdowns._shutdown.__code__)

#: one per process, like torch's process groups; `call.parts` begins and ends it
shutdowns = Shutdowns()
