"""What is where on the main thread's stack: the user's function, and code that is not interrupted half-way."""

from __future__ import annotations

import contextlib
import operator
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

from inprocess.system import observers, writing
from inprocess.system.errors import PACKAGE

__all__ = ["call", "codes", "inside", "leave_alone", "places", "room", "whereabouts"]

#: how many calls deep the handler may get where it is called within itself, and to spare
ROOM = 20
#: how many places of a thread's stack a message names
PLACES = 3
IMPORT = "<frozen importlib._bootstrap>"
#: where torch begins a collective and hands its result out: one that nobody gets is never waited for, nor freed
FUNCTIONAL = "torch.distributed._functional_collectives"
#: functions that take a lock: it would stay locked if nobody were there yet to give it back. They may wait for it, so
#: they are left alone for a moment only; in modules that the program may not have imported, as all below
LOCKING = (
    ("threading", "Condition.__enter__"),
    ("multiprocessing.synchronize", "SemLock.__enter__"),
    ("multiprocessing.synchronize", "Condition.__enter__"),
    ("multiprocessing.sharedctypes", "SynchronizedBase.__enter__"),
    ("multiprocessing.sharedctypes", "Synchronized.value.fget"),
    ("multiprocessing.sharedctypes", "Synchronized.value.fset"),
)
#: and those that give it back, which never wait: left alone for longer, since a loop may be found there again and again
UNLOCKING = (
    ("threading", "Condition.__exit__"),
    ("multiprocessing.synchronize", "SemLock.__exit__"),
    ("multiprocessing.synchronize", "Condition.__exit__"),
    ("multiprocessing.sharedctypes", "SynchronizedBase.__exit__"),
)
#: functions that start processes, or begin and end a profile, which crashes if it is cut in half
STARTERS = (
    ("multiprocessing.process", "BaseProcess.start"),
    ("multiprocessing.managers", "BaseManager.start"),
    ("multiprocessing.pool", "Pool.__init__"),
    ("concurrent.futures.process", "ProcessPoolExecutor._start_executor_manager_thread"),
    ("subprocess", "Popen.__init__"),
    ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter.__init__"),
    ("torch.autograd.profiler", "profile.__enter__"),
    ("torch.autograd.profiler", "profile.__exit__"),
    ("torch.profiler.profiler", "_KinetoProfile.start"),
    ("torch.profiler.profiler", "_KinetoProfile.stop"),
    ("torch.profiler.profiler", "profile.__enter__"),
    ("torch.profiler.profiler", "profile.__exit__"),
    ("torch.profiler.profiler", "profile.start"),
    ("torch.profiler.profiler", "profile.stop"),
    ("torch.profiler.profiler", "profile._transit_action"),
)
#: functions that would lose a descriptor or the name of shared memory: that make one, or take or free one
LOSERS = (
    ("torch.multiprocessing.reductions", "rebuild_storage_fd"),
    ("multiprocessing.connection", "Pipe"),
    ("multiprocessing.connection", "_ConnectionBase.__del__"),
    ("multiprocessing.connection", "_ConnectionBase.close"),
    ("multiprocessing.heap", "Arena.__init__"),
    ("multiprocessing.resource_tracker", "ResourceTracker.ensure_running"),
    ("multiprocessing.shared_memory", "SharedMemory.__init__"),
    ("multiprocessing.shared_memory", "SharedMemory.close"),
    ("multiprocessing.shared_memory", "SharedMemory.unlink"),
    ("multiprocessing.synchronize", "SemLock.__init__"),
    ("multiprocessing.util", "Finalize.__call__"),
)
#: the files of what would lose a temporary file, and of what Python calls when an object is freed that others refer to
#: weakly, which runs it once
LOSING = (
    tempfile.__file__,
    weakref.finalize.__call__.__code__.co_filename,
    weakref.WeakSet.add.__code__.co_filename,
)
#: and those that wait for the end of one: the kernel tells of it once, and what was not noted then is never closed
REAPERS = (("multiprocessing.popen_fork", "Popen.poll"),)
#: what is never interrupted half-way; by identity, since comparing and hashing code objects takes long
WHOLE: set[int] = set()


def leave_alone(*codes: CodeType) -> None:
    """Code that is never interrupted half-way, nor what it calls; for the life of the process."""
    WHOLE.update(map(id, codes))


def call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``fn(*args, **kwargs)``. Where the stack has the frame of this, the main thread is in the user's function."""
    return fn(*args, **kwargs)


CALL_CODE = call.__code__


def inside(frame: FrameType | None) -> list[CodeType]:
    """What runs within the user's function, innermost first; `Gate._is_inside` holds."""
    found: list[CodeType] = []
    while frame is not None and frame.f_code is not CALL_CODE:
        found.append(frame.f_code)
        frame = frame.f_back
    return found


leave_alone(inside.__code__, *writing.whole(), *observers.whole())


def room(calls: int = ROOM) -> None:
    """RecursionError here, rather than half-way through what follows."""
    if calls:
        room(calls - 1)


def codes(functions: Sequence[tuple[str, str]]) -> frozenset[int]:
    """The identities of their code; a version that has them elsewhere is interrupted there as anywhere."""
    found = set[int]()
    for module, name in functions:
        if (loaded := sys.modules.get(module)) is not None:  # else an exception each, on the way of each restart
            with contextlib.suppress(AttributeError):
                found.add(id(operator.attrgetter(name)(loaded).__code__))
    return frozenset(found)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def whereabouts(ident: int) -> str:
    """The innermost places of a thread."""
    return places(sys._current_frames().get(ident))


def places(frame: FrameType | None) -> str:
    """A frame and those around it, as far as the user's function goes where it is in that; innermost first. Those of
    this library only where there are no others."""
    found: list[str] = []
    ours = ""
    while frame is not None and frame.f_code is not CALL_CODE and len(found) < PLACES:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            found.append(_place(frame))
        ours = ours or _place(frame)
        frame = frame.f_back
    return ", called from ".join(found) or ours or "an unknown place"
