"""NCCL's service threads are woken while its groups are aborted: what took half a second takes a tenth of that.

``ncclCommAbort`` ends what runs on the GPU at once, and then waits for the threads that serve a communicator's
connections. These look at the abort flag only between two calls of ``poll``, each of which lasts 500 ms (NCCL 2.29,
``proxy.cc``). Whatever arrives ends the call: a connection to the socket on which the one thread listens, a message
for the other one's. docs/notebook/nccl.md has what was measured.

``destroy_process_group()`` waits for the same threads. It tells the first by itself, so only the second is woken then.

Not before the flag is set: the thread would then wait for what the connection has to say. So this begins a moment
after the aborts, and goes on until they have ended. That a connection ended early is a warning in NCCL's own log.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from inprocess.system import clock, procfs
from inprocess.system.logs import get_logger, once

__all__ = ["beside_shutdown", "is_wanted", "until", "wake"]

log = get_logger(__name__)
#: seconds from the begin of the aborts to the first look, between two looks, and in all
FIRST_PAUSE_S, MAX_PAUSE_S, WAKE_LIMIT_S = 0.005, 0.01, 2.0
#: what NCCL's thread waits for: more descriptors than this (one for each rank of a host, and its listener), and so long
DESCRIPTORS, POLL_MS = 64, 500
#: part of the names of its datagram sockets
NAME = b"nccl-socket-"


def until(ended: Callable[[float], object]) -> None:
    """Wake NCCL's threads again and again.

    Args:
        ended: waits for the end of the aborts, so many seconds, and returns whether they have ended.
    """
    end, pause = clock.monotonic() + WAKE_LIMIT_S, FIRST_PAUSE_S
    while not ended(pause) and clock.monotonic() < end:
        wake()
        pause = MAX_PAUSE_S


def beside_shutdown(ended: Callable[[float], object]) -> None:
    """Wake the threads that wait for datagrams while the program destroys a group; ``ended`` as in `until`.

    It may first wait for the GPU, and each message is a warning in NCCL's log: so the pauses grow.
    """
    end, pause = clock.monotonic() + WAKE_LIMIT_S, FIRST_PAUSE_S
    while not ended(pause) and clock.monotonic() < end:
        wake_receivers()
        pause *= 2


def is_wanted(hook: Any) -> bool:
    """Whether an ``abort`` hook, or a part of it where it is composed, has NCCL's threads woken."""
    return any(getattr(part, "nccl_wake", False) for part in getattr(hook, "parts", (hook,)))


def wake() -> int:
    """Wake NCCL's threads once; returns how many were spoken to."""
    return sum(map(_connect_to, _listeners())) + wake_receivers()


def _listeners() -> Sequence[int]:
    """The descriptors that may be listened on by NCCL's threads: the last of many."""
    try:
        polls = procfs.polls()
    except procfs.Unknown as error:
        once(
            log.info,
            "NCCL's service threads cannot be found (%s): the abort of its groups takes half a second longer. "
            "AbortTorchDistributed(nccl_wake=False) does not look for them",
            str(error),
        )
        return ()
    return [
        poll.descriptors[-1] for poll in polls if len(poll.descriptors) > DESCRIPTORS and poll.timeout_ms == POLL_MS
    ]


def _connect_to(descriptor: int) -> bool:
    """Connect to what listens there, and go away again."""
    listener = procfs.copy_of(descriptor)
    if listener is None:  # or -1: there is no listener any more
        return False
    with listener:
        if os.get_blocking(listener.fileno()) or listener.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        with socket.socket(listener.family) as visitor:
            visitor.setblocking(False)
            return visitor.connect_ex(listener.getsockname()) in (0, errno.EINPROGRESS)


def wake_receivers() -> int:
    """Wake the threads that wait for datagrams; returns how many were spoken to."""
    return sum(map(_send_to, _datagram_names()))


def _datagram_names() -> Iterator[str | bytes]:
    """Of this process's own. Asked of the sockets themselves: NCCL's names are abstract, and padded with zeros to the
    length of the whole address, which the kernel's list shows as other characters."""
    with contextlib.suppress(OSError):
        for inode, descriptor in procfs.sockets().items():
            copy = procfs.copy_of(descriptor, inode)
            if copy is not None:
                with copy:
                    yield from _name_of(copy)


def _name_of(copy: socket.socket) -> Sequence[str | bytes]:
    if copy.family != socket.AF_UNIX or copy.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) != socket.SOCK_DGRAM:
        return ()
    name = copy.getsockname()  # bytes where it is abstract
    return (name,) if NAME in os.fsencode(name) else ()


def _send_to(name: str | bytes) -> bool:
    """A message that is none of NCCL's: it has no descriptor with it, so that what reads it drops it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
        sender.setblocking(False)
        return sender.sendto(b"\0", name) == 1
    return False
