"""NCCL's service threads are woken while its groups are aborted: what took half a second takes a tenth of that.

``ncclCommAbort`` ends what runs on the GPU at once, and then waits for the threads that serve a communicator's
connections. These look at the abort flag only between two calls of ``poll``, each of which lasts 500 ms (NCCL 2.29,
``proxy.cc``). Whatever arrives ends the call: a connection to the socket on which the one thread listens, a message
for the other one's. docs/design/nccl.md has what was measured.

Not before the flag is set: the thread would then wait for what the connection has to say. So this begins a moment
after the aborts, and goes on until they have ended. That a connection ended early is a warning in NCCL's own log.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Sequence

from inprocess.system import clock, procfs
from inprocess.system.logs import get_logger, once

__all__ = ["until", "wake"]

log = get_logger(__name__)
#: seconds from the begin of the aborts to the first look, between two looks, and in all
FIRST_PAUSE_S, MAX_PAUSE_S, WAKE_LIMIT_S = 0.005, 0.01, 2.0
#: what NCCL's thread waits for: more descriptors than this (one for each rank of a host, and its listener), and so long
DESCRIPTORS, POLL_MS = 64, 500
#: part of the names of its datagram sockets
NAME = "nccl-socket-"


def until(ended: Callable[[float], object]) -> None:
    """Wake NCCL's threads again and again.

    Args:
        ended: waits for the end of the aborts, so many seconds, and answers whether they have ended.
    """
    end, pause = clock.monotonic() + WAKE_LIMIT_S, FIRST_PAUSE_S
    while not ended(pause) and clock.monotonic() < end:
        wake()
        pause = MAX_PAUSE_S


def wake() -> int:
    """Wake NCCL's threads once; answers how many were spoken to."""
    return sum(map(_connect_to, _listeners())) + sum(map(_send_to, _datagram_names()))


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


def _datagram_names() -> list[str]:
    """Of this process's own."""
    with contextlib.suppress(OSError):
        return [name for name in procfs.unix_names(procfs.sockets()) if NAME in name]
    return []


def _send_to(name: str) -> bool:
    address = f"\0{name[1:]}" if name.startswith("@") else name
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
        sender.setblocking(False)
        return sender.sendto(b"\0", address) == 1
    return False
