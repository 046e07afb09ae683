"""Gloo's connections, which are shut down to release what waits on them.

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
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import struct
from collections.abc import Iterator

import torch

from inprocess.collectives.dead_connections import dead_connections
from inprocess.collectives.gloo_lost import lost_operations
from inprocess.collectives.groups import is_making, world
from inprocess.system import procfs
from inprocess.system.logs import get_logger

log = get_logger(__name__)
#: name of Gloo's event threads
GLOO_THREAD = "gloo_tcp_loop"
#: how the names of its classes' tables begin
GLOO_CLASSES = b"_ZTVN4gloo"
#: system call numbers of epoll_wait, epoll_pwait and epoll_pwait2: x86-64 and aarch64
_EPOLL_CALLS = frozenset({"232", "281", "441", "22"})
#: how often to look at an event thread that is busy, hence in no system call; it is so for microseconds
_LOOKS = 1000
#: seconds to connect to a listening socket of this very process
_KNOCK_TIMEOUT = 0.5
_LIBC = ctypes.CDLL(None)


def shutdown_gloo_connections(pairs: int = 0) -> int:
    """Shut down every connection that Gloo has in this process; returns how many.

    Pending collectives then fail at once, here and on the peers. The sockets stay open until their group is destroyed.

    Args:
        pairs: when a group is being made at this moment, end its wait for up to this many connections that its peers
            should make; the world size is enough. Default 0: such waits go on.
    """
    count = 0
    for descriptor, inode in _gloo_descriptors():
        connection = procfs.copy_of(descriptor, inode)
        if connection is None:
            continue
        with connection:
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                count += _shut(connection)
            elif pairs and is_making() and _speaks_plainly():
                _knock(connection, pairs)
    lost_operations.note()
    return count


def _gloo_descriptors() -> Iterator[tuple[int, int]]:
    """Descriptor and inode of everything registered with an event loop of Gloo."""
    epolls = [_epoll_of(f"/proc/self/task/{task}") for task in procfs.tasks()]
    named = [entry for epoll in epolls if epoll is not None for entry in _registered(epoll)]
    for entry in named or _registered_by_class():
        yield entry.descriptor, entry.inode


def _epoll_of(task: str) -> int | None:
    """The epoll instance on which a Gloo thread waits; None where it is no Gloo thread, or has ended."""
    try:
        if procfs.read(f"{task}/comm").strip() != GLOO_THREAD:
            return None
        for _ in range(_LOOKS):
            words = procfs.read(f"{task}/syscall").split()
            if len(words) > 1 and words[0] in _EPOLL_CALLS:
                return int(words[1], 16)
            os.sched_yield()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError:  # then by class
        return None
    log.warning(
        "a thread of Gloo's stays busy, so its connections were not shut down: a rank that waits in a collective there "
        "is released by the timeout of its process group"
    )
    return None


def _registered(epoll: int) -> list[procfs.Registered]:
    try:
        return procfs.registered(epoll)
    except procfs.Unknown as error:
        _warn_of_timeouts(str(error))
        return []


def _registered_by_class() -> list[procfs.Registered]:
    """What Gloo registered, whatever the names of its threads."""
    found = [entry for epoll in procfs.epolls() for entry in _registered(epoll) if _is_class_of_gloo(entry.data)]
    if not found and _has_gloo_group():
        _warn_of_timeouts(f"this build of torch ({torch.__version__}) does not show which connections are Gloo's")
    return found


def _is_class_of_gloo(address: int) -> bool:
    """Whether a C++ object of Gloo's is at the address: it begins with the address of its class's table."""
    try:
        table = procfs.word_at(address)
    except OSError:
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
    return any("gloo" in str(backend) for backend, _ in list(getattr(world(), "pg_map", {}).values()))


@functools.cache
def _warn_of_timeouts(reason: str) -> None:
    """Say once what it means when the kernel does not answer."""
    log.warning(
        "Gloo's connections cannot be found: %s. A pending Gloo collective will not be released by a restart but end "
        "at its own timeout; choose that timeout short, or give the process access to /proc/self",
        reason,
    )


def _shut(connection: socket.socket) -> bool:
    try:
        # reading only: Gloo tells all its pending operations of a failed read; a write that fails in its event thread
        # leaves the operation it belongs to waiting until the timeout
        connection.shutdown(socket.SHUT_RD)
        dead_connections.keep(connection)
    except OSError:  # not connected any more, or not yet: then it gives up connecting
        return False
    return True


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
