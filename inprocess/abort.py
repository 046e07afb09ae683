"""The abort: unblocks whatever the main thread waits for inside torch.distributed, so that it can be interrupted.

A ladder of steps. Each has a deadline and a recorded result; one that fails or hangs does not stop the next. Runs in
the MonitorThread, and once more in the main thread for what the function made while the first run was under way.

Gloo
    torch has no way to release a pending Gloo collective: ``abort()`` and ``destroy_process_group()`` leave it blocked
    until its timeout (measured on torch 2.13: 25 to 30 s). Shutting its connections down releases it in under a
    millisecond. Only connections that are certainly Gloo's may be touched. The kernel knows which these are: Gloo's
    event thread is named ``gloo_tcp_loop`` and waits on an epoll instance, and ``/proc/self/fdinfo`` lists what is
    registered there. A user's socket cannot be in that list. The listening socket in it must stay untouched: Gloo ends
    the process when accepting fails.

    Not every Gloo names its threads (docs/versions.md). Then each epoll instance of the process is looked at: beside a
    descriptor the kernel lists what its owner registered with it, for Gloo the address of an object, and the dynamic
    linker knows which class that object is of.

    While a group is made, one of each two ranks waits for the other one to connect. If that one is gone or was
    interrupted there is no connection to shut down, and the wait lasts until the timeout, too. So we connect in its
    place: a connection begins with the number of the pair it is for; ours names each pair in turn and ends there. Gloo
    takes that for a peer that went away (measured: released in 10 ms, the period of its event loop).

    The other one of the two connects. Where its peer's host is gone, Gloo tries four times, so one shutdown is not
    enough: the monitor thread repeats it until the main thread has left (measured: released after 75 ms).
NCCL
    All groups in one coalesced abort: one after the other deadlocks (github.com/pytorch/pytorch/issues/119797).
torch's own tables
    Cleared here and not by ``destroy_process_group()`` or ``_abort_process_group()``: these first wait for every group,
    and when one that hung comes back later, they would clear away the groups of the next iteration.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import functools
import logging
import operator
import os
import re
import socket
import stat
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from inprocess import clock
from inprocess.state import FrozenState

__all__ = [
    "Abort",
    "AbortTorchDistributed",
    "AbortTransformerEngine",
    "Ladder",
    "StepResult",
    "shutdown_gloo_connections",
]

log = logging.getLogger(__name__)

#: seconds that a ladder may take in all
DEADLINE = 10.0
#: seconds that a step leaves for each of those after it
RESERVE = 0.5
#: name of Gloo's event threads
GLOO_THREAD = "gloo_tcp_loop"
#: how the names of its classes' tables begin
GLOO_CLASSES = b"_ZTVN4gloo"
#: system call numbers of epoll_wait, epoll_pwait and epoll_pwait2: x86-64 and aarch64
_EPOLL_CALLS = frozenset({"232", "281", "441", "22"})
#: how often to look at an event thread that is busy, hence in no system call; it is so for microseconds
_LOOKS = 1000
#: seconds that the end of a call waits for the destructors of process groups
LET_GO = 1.0
#: seconds to connect to a listening socket of this very process
_KNOCK_TIMEOUT = 0.5
#: functions of torch that make groups
_MAKERS = frozenset({"_new_process_group_helper", "init_process_group", "new_group"})
#: where `distributed_c10d` has torch's tables of groups, and which; not every version has all of them
WORLD = "_world"
_TABLES = (
    "comms",
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)

_LIBC = ctypes.CDLL(None)

Step = tuple[str, Callable[[], object]]


class Abort(abc.ABC):
    """Base class of ``abort`` hooks; any callable from state to state does as well.

    An abort hook runs in the monitor thread while the main thread is still inside the wrapped function. What it raises
    is logged and does not stop the restart.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState | None:
        """Unblock the main thread and return the state (None: unchanged)."""


@dataclass(frozen=True)
class StepResult:
    """How a step of the ladder ended."""

    name: str
    #: how long it took
    seconds: float
    #: what it raised, or how long it was waited for; empty where it succeeded
    error: str = ""
    #: whether it was left to itself
    hung: bool = False


class Ladder:
    """Steps that are tried one after the other, whatever becomes of the ones before.

    Args:
        steps: name and action of each.
        deadline: seconds for all steps together, default 10. A step that takes longer is left to itself, in a daemon
            thread, early enough for half a second of each of the others.
    """

    def __init__(self, steps: Sequence[Step], deadline: float = DEADLINE) -> None:
        self._steps, self._deadline = list(steps), deadline

    def run(self) -> list[StepResult]:
        """Run all steps; errors are logged and returned, never raised."""
        end = clock.monotonic() + self._deadline
        results: list[StepResult] = []
        for name, action in self._steps:
            reserved = RESERVE * (len(self._steps) - len(results) - 1)
            result = _try(name, action, max(end - reserved - clock.monotonic(), RESERVE))
            if result.error:
                log.warning("abort: the step %r failed after %.3f s: %s", result.name, result.seconds, result.error)
            results.append(result)
        return results


def _try(name: str, action: Callable[[], object], timeout: float) -> StepResult:
    error = ""

    def act() -> None:
        nonlocal error
        try:
            action()
        except BaseException as raised:
            error = traceback.format_exception_only(type(raised), raised)[-1].strip()

    # a thread of its own for each, so that one left to itself never begins the next one, perhaps iterations later
    thread = threading.Thread(target=act, name="inprocess-abort", daemon=True)
    begin = clock.monotonic()
    thread.start()
    thread.join(timeout)
    seconds = clock.monotonic() - begin
    if thread.is_alive():
        return StepResult(name, seconds, "did not end in time; it is left to itself", hung=True)
    return StepResult(name, seconds, error)


class AbortTorchDistributed(Abort):
    """Releases pending Gloo and NCCL operations and takes all process groups down.

    Does nothing where torch.distributed is not in use; may be called at any moment, and more than once.

    Args:
        deadline: seconds in all; default 10.
    """

    def __init__(self, deadline: float = DEADLINE) -> None:
        self.deadline = deadline

    def __call__(self, state: FrozenState) -> FrozenState:
        if not dist.is_available():
            return state
        pairs = state.world_size
        groups = _groups()
        steps: list[Step] = []
        if groups and _records_flights():
            steps.append(("flight recorder", lambda: _dump_flight_record(state.rank)))
        steps.append(("Gloo connections", lambda: shutdown_gloo_connections(pairs)))
        if groups:
            steps.append(("process groups", lambda: _abort_groups(groups)))
        steps.append(("torch's tables", lambda: _forget_groups(groups)))
        if _is_making_groups():  # it may have made connections meanwhile
            steps.append(("Gloo connections again", lambda: shutdown_gloo_connections(pairs)))
        Ladder(steps, self.deadline).run()
        return state


class AbortTransformerEngine(Abort):
    """Frees TransformerEngine's user buffers, which hold communicators. Nothing where the program does not use it.

    Args:
        deadline: seconds; default 10.
    """

    def __init__(self, deadline: float = DEADLINE) -> None:
        self.deadline = deadline

    def __call__(self, state: FrozenState) -> FrozenState:
        # imported by the program or not in use; importing it takes seconds, and the main thread may be importing it
        engine = sys.modules.get("transformer_engine.pytorch")
        if engine is not None:
            Ladder([("TransformerEngine user buffers", engine.module.base.destroy_ub)], self.deadline).run()
        return state


# --- process groups -----------------------------------------------------------------------------------------------


def _world() -> Any:
    """torch's tables of groups; None where this version has none under that name."""
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415  (absent where torch is built without)

    return getattr(c10d, WORLD, None)


def _groups() -> list[Any]:
    """All process groups, the latest first."""
    names = getattr(_world(), "pg_names", None)
    if names is None:
        return [dist.group.WORLD] if dist.is_initialized() else []
    names = dict(names)
    return sorted(names, key=lambda group: str(names[group]), reverse=True)


def _abort_groups(groups: Sequence[Any]) -> None:
    coalesce = next((backend for backend in map(_cuda_backend, groups) if _coalesces(backend)), None)
    if coalesce is not None:
        coalesce._group_start()
    try:
        for group in tuple(groups):
            _abort_group(group)
    finally:
        if coalesce is not None:
            coalesce._group_end()


def _coalesces(backend: Any) -> bool:
    return hasattr(backend, "_group_start") and hasattr(backend, "_group_end")


def _abort_group(group: Any) -> None:
    owner = group if hasattr(group, "abort") else _cuda_backend(group)  # torch before 2.6: only NCCL's backend can
    abort = getattr(owner, "abort", None) or getattr(owner, "_abort", None)
    if abort is not None:
        abort()


def _cuda_backend(group: Any) -> Any:
    try:
        return group._get_backend(torch.device("cuda"))
    except (RuntimeError, AttributeError):
        return None


def _forget_groups(groups: list[Any]) -> None:
    """Have torch forget its groups, so that init_process_group works again; a group ends with its last reference."""
    try:
        _clear_tables()
    except (AttributeError, ImportError) as error:
        _warn_of_tables(str(error))
        if dist.is_initialized():
            dist.destroy_process_group()
    held.groups(groups)


def _clear_tables() -> None:
    from torch._C import _distributed_c10d as bindings  # noqa: PLC0415
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

    # all that may be missing comes first, so that it is done whole or not at all
    world, set_default = getattr(c10d, WORLD), c10d._update_default_pg
    unregister_all = bindings._unregister_all_process_groups
    set_default(None)
    for table in _TABLES:
        getattr(world, table, {}).clear()
    unregister_all()
    # groups are named by number: a rank that began to make one and a rank that did not would never meet again
    world.group_count = 0


@functools.cache
def _warn_of_tables(reason: str) -> None:
    """Say once what it means when torch's tables are not where they were."""
    log.warning(
        "torch %s keeps its process groups in a way that is not known here (%s): they are destroyed with "
        "destroy_process_group(), which waits for a group that hangs",
        torch.__version__,
        reason,
    )


def unfinished() -> bool:
    """Whether torch.distributed has process groups, or only began to make some: then the abort is needed again."""
    return dist.is_available() and (dist.is_initialized() or _groups_begun() > 0)


def _groups_begun() -> int:
    return int(getattr(_world(), "group_count", 0))


def _records_flights() -> bool:
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    return any(os.environ.get(name, "0").strip("0") for name in names) and _flight_file() != ""


def _flight_file() -> str:
    """Where the user wants NCCL's flight record; torch adds the rank. Nowhere unless asked for."""
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE") or ""


def _dump_flight_record(rank: int) -> None:
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is None:
        return
    # not through a link, and without waiting for the other end of a pipe that somebody has put there
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(f"{_flight_file()}{rank}", flags, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(dump())


# --- Gloo's connections -------------------------------------------------------------------------------------------


def shutdown_gloo_connections(pairs: int = 0) -> int:
    """Shut down every connection that Gloo has in this process; answers how many.

    Pending collectives then fail at once, here and on the peers. The sockets stay open until their group is destroyed.

    Args:
        pairs: when a group is being made at this moment, end its wait for up to this many connections that its peers
            should make; the world size is enough. Default 0: such waits go on.
    """
    count = 0
    for descriptor, inode in _gloo_descriptors():
        connection = _socket_of(descriptor, inode)
        if connection is None:
            continue
        with connection:
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                count += _shut(connection)
            elif pairs and _is_making_groups() and _speaks_plainly():
                _knock(connection, pairs)
    return count


class Held:
    """What the abort took from torch, kept until everybody has left the function.

    Copies of connections: closing one resets it at the other end, and a peer whose event thread is just writing loses
    the operation, which then waits until its timeout. So each rank ends its own reading, and closes later.

    Process groups: a DistributedDataParallel reducer that is a group's last owner destroys it with the interpreter
    lock held, and waits for Gloo's worker, which may want that lock to free an operation.
    """

    def __init__(self) -> None:
        self._active = False
        self._connections: list[socket.socket] = []
        self._groups: list[Any] = []

    def begin(self) -> None:
        """Let go of what is held, and keep what comes from now on."""
        self._let_go()
        self._active = True

    def end(self) -> None:
        """Let go of what is held and keep nothing more."""
        self._active = False
        thread = self._let_go()
        if thread is not None:
            thread.join(LET_GO)

    def connection(self, connection: socket.socket) -> None:
        """A connection that was just shut down."""
        if self._active:
            self._connections.append(connection.dup())

    def groups(self, groups: list[Any]) -> None:
        """Process groups that torch has forgotten; takes them out of the list."""
        if self._active:
            self._groups += groups
            groups.clear()
        elif groups:
            _in_background(groups.clear)

    def _let_go(self) -> threading.Thread | None:
        _forget_meshes()
        connections, self._connections = self._connections, []
        groups, self._groups = self._groups, []
        for connection in connections:
            connection.close()
        return _in_background(groups.clear) if groups else None


#: what DTensor remembers of operations it has seen, by mesh
_MESH_CACHES = (
    ("torch._C", "_clear_DTensor_sharding_propagator_cache"),
    ("torch.distributed.tensor", "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear"),
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos.cache_clear"),
    ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache"),
    ("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
)


def _forget_meshes() -> None:
    """Have DTensor forget the mesh of an earlier iteration, and with it its groups.

    In the main thread, whose memory it partly is. Where torch keeps it elsewhere, one mesh's groups stay.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    for module, name in _MESH_CACHES:
        with contextlib.suppress(AttributeError):
            operator.attrgetter(name)(sys.modules.get(module))()


def _in_background(action: Callable[[], object]) -> threading.Thread:
    """A group's destructor waits for Gloo's threads (10 ms), and could wait for ever."""
    thread = threading.Thread(target=action, name="inprocess-abort", daemon=True)
    thread.start()
    return thread


#: one per process, like torch's process groups; the loop begins and ends it
held = Held()


def _gloo_descriptors() -> Iterator[tuple[int, int]]:
    """Descriptor and inode of everything registered with an event loop of Gloo."""
    epolls = [_epoll_of(f"/proc/self/task/{task}") for task in os.listdir("/proc/self/task")]
    named = [entry for epoll in epolls if epoll is not None for entry in _registered(epoll)]
    for entry in named or _registered_by_class():
        yield entry.descriptor, entry.inode


def _epoll_of(task: str) -> int | None:
    """The epoll instance on which a Gloo thread waits; None where it is no Gloo thread, or has ended."""
    try:
        if _read(f"{task}/comm").strip() != GLOO_THREAD:
            return None
        for _ in range(_LOOKS):
            words = _read(f"{task}/syscall").split()
            if len(words) > 1 and words[0] in _EPOLL_CALLS:
                return int(words[1], 16)
            os.sched_yield()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError:  # then by class
        return None
    log.warning("Gloo's event thread is busy for long; its connections were not shut down")
    return None


@dataclass(frozen=True)
class _Registered:
    """An entry of an epoll instance."""

    descriptor: int
    inode: int
    #: what the owner registered with it: an address, a number
    data: int


def _registered(epoll: int) -> list[_Registered]:
    try:
        lines = _read(f"/proc/self/fdinfo/{epoll}")
    except FileNotFoundError:
        return []
    except PermissionError as error:
        _warn_of_timeouts(str(error))
        return []
    found = re.findall(r"^tfd:\s*(\d+) .*\bdata:\s*([0-9a-f]+) .*\bino:([0-9a-f]+)", lines, re.MULTILINE)
    if "tfd:" in lines and not found:
        _warn_of_timeouts("this kernel does not tell which files an epoll instance watches")
    return [_Registered(int(descriptor), int(inode, 16), int(data, 16)) for descriptor, data, inode in found]


def _registered_by_class() -> list[_Registered]:
    """What Gloo registered, whatever the names of its threads."""
    found = [entry for epoll in _epolls() for entry in _registered(epoll) if _is_class_of_gloo(entry.data)]
    if not found and _has_gloo_group():
        _warn_of_timeouts(f"this build of torch ({torch.__version__}) does not show which connections are Gloo's")
    return found


def _epolls() -> Iterator[int]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                yield int(name)


def _is_class_of_gloo(address: int) -> bool:
    """Whether a C++ object of Gloo's is at the address: it begins with the address of its class's table."""
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:  # says no where reading would end the process
            table = int.from_bytes(os.pread(memory.fileno(), 8, address), sys.byteorder)
    except (OSError, OverflowError):
        return False
    symbol = _Symbol()
    _LIBC.dladdr(ctypes.c_void_p(table), ctypes.byref(symbol))
    return (symbol.name or b"").startswith(GLOO_CLASSES)


class _Symbol(ctypes.Structure):
    """``Dl_info`` of the dynamic linker."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _has_gloo_group() -> bool:
    return any("gloo" in str(backend) for backend, _ in list(getattr(_world(), "pg_map", {}).values()))


@functools.cache
def _warn_of_timeouts(reason: str) -> None:
    """Say once what it means when the kernel does not answer."""
    log.warning(
        "Gloo's connections cannot be found: %s. A pending Gloo collective will not be released by a restart but end "
        "at its own timeout; choose that timeout short, or give the process access to /proc/self",
        reason,
    )


def _socket_of(descriptor: int, inode: int) -> socket.socket | None:
    """A copy of a registered socket; None where it is none, or the number has been given to another file meanwhile."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    status = os.fstat(copy)
    if status.st_ino != inode or not stat.S_ISSOCK(status.st_mode):
        os.close(copy)
        return None
    return socket.socket(fileno=copy)


def _shut(connection: socket.socket) -> bool:
    try:
        # reading only: Gloo tells all its pending operations of a failed read; a write that fails in its event thread
        # leaves the operation it belongs to waiting until the timeout
        connection.shutdown(socket.SHUT_RD)
        held.connection(connection)
    except OSError:  # not connected any more, or not yet: then it gives up connecting
        return False
    return True


def _is_making_groups() -> bool:
    """Whether a thread is inside torch's functions that make groups."""
    for frame in sys._current_frames().values():
        place: FrameType | None = frame
        while place is not None:
            if place.f_code.co_name in _MAKERS and place.f_code.co_filename.endswith("distributed_c10d.py"):
                return True
            place = place.f_back
    return False


def _speaks_plainly() -> bool:
    return os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP").upper() in ("", "TCP")


def _knock(listener: socket.socket, pairs: int) -> None:
    """Connect to Gloo's listening socket once for each pair, and go away again."""
    address = listener.getsockname()
    for pair in range(pairs):
        with socket.socket(listener.family) as visitor, contextlib.suppress(OSError):
            visitor.settimeout(_KNOCK_TIMEOUT)
            visitor.connect(address)
            visitor.sendall(struct.pack("=Q", pair))


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
