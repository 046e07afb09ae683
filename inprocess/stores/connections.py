"""The TCP connections below a store: found, limited, shut down."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

from inprocess.exception import StoreLost
from inprocess.stores.addresses import numeric
from inprocess.stores.raw import innermost
from inprocess.system import procfs
from inprocess.system.descriptors import milliseconds
from inprocess.system.listening import is_port

__all__ = [
    "address_towards",
    "connections",
    "cut",
    "limit_silence",
    "numeric_address",
    "own_address",
    "published_at",
    "send_again_soon",
    "shut",
    "shut_awaited",
    "shut_connections",
]

#: socket options that Python has no names for
TCP_THIN_LINEAR_TIMEOUTS, TCP_RTO_MAX_MS = 16, 44
#: seconds that the kernel takes between its probes (`MAX_TCP_KEEPIDLE`)
LONGEST_KEEP = 32_767


def limit_silence(address: str, port: int, seconds: float) -> None:
    """Have the kernel give up connections to a server that cannot be reached, also those that only wait.

    Otherwise a host that is cut off would not learn of it: who sends waits a quarter of an hour for an answer, and who
    only waits does so for ever.
    """
    for descriptor, peer in connections():
        if peer == (address, port) and (copy := procfs.copy_of(descriptor)) is not None:
            with copy, contextlib.suppress(OSError):
                copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(milliseconds(seconds)))
                copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, min(max(1, int(seconds / 3)), LONGEST_KEEP))
                copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, min(max(1, int(seconds / 8)), LONGEST_KEEP))
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                send_again_soon(copy)


def send_again_soon(connection: socket.socket) -> None:
    """Have the kernel send what was lost again after a second at most; it would double the time again and again.

    Over a wire that loses three packets of ten, a heartbeat would now and then be minutes late. Old kernels refuse.
    """
    for option, value in ((TCP_THIN_LINEAR_TIMEOUTS, 1), (TCP_RTO_MAX_MS, 1000)):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def shut_connections(address: str, port: int) -> int:
    """Shut down this process' connections to a server: whoever is blocked on one gets an error. Returns how many."""
    found = [descriptor for descriptor, peer in connections() if peer == (address, port)]
    for descriptor in found:
        shut(descriptor)
    return len(found)


def shut_awaited(address: str, port: int, task: str) -> None:
    """As `shut_connections`, but only that for which a thread waits; all where the kernel does not tell which it is."""
    try:
        awaited = procfs.awaited(task)
    except procfs.Unknown:
        shut_connections(address, port)
        return
    for descriptor, peer in connections():
        if descriptor in awaited and peer == (address, port):
            shut(descriptor)


def own_address(port: int) -> str:
    """The address of this host on its connection to a server with that port; "@" where the server is on it as well."""
    for _, own, peer in _ends():
        if peer[1] == port:
            return "@" if own[0] == peer[0] else own[0]
    return "@"


def connections() -> Iterator[tuple[int, tuple[str, int]]]:
    """The TCP connections of this process: descriptor, and the peer's numeric address and port."""
    for descriptor, _, peer in _ends():
        yield descriptor, peer


def _ends() -> Iterator[tuple[int, tuple[str, int], tuple[str, int]]]:
    """Descriptor, own and the peer's address and port."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # not connected, not TCP, or closed meanwhile
            if (copy := procfs.copy_of(int(name))) is not None:
                with copy:
                    own, peer = copy.getsockname(), copy.getpeername()
                if isinstance(peer, tuple):
                    yield int(name), _plain(own), _plain(peer)


def _plain(address: tuple[Any, ...]) -> tuple[str, int]:
    return numeric(address), int(address[1])


def shut(descriptor: int) -> None:
    """Shut a connection down in both directions; the descriptor stays open, for its owner to close."""
    if (copy := procfs.copy_of(descriptor)) is not None:
        with copy, contextlib.suppress(OSError):
            copy.shutdown(socket.SHUT_RDWR)


def numeric_address(store: Any) -> str:
    """The address at which a connection reaches the TCPStore server."""
    return str(innermost(store).host)


def published_at(address: str, base: Callable[[], str]) -> tuple[str, int]:
    """Host and port of what a member has published; ``@`` stands for the host of the base store, ``base()``.

    Raises:
        StoreLost: it is not host:port.
    """
    host, _, port = address.rpartition(":")
    if not is_port(port):
        raise StoreLost(f"a published address is not host:port: {address[:80]!r}")
    return (base() if host == "@" else host), int(port)


def address_towards(store: Any) -> str:
    """The address of this host, as the host of a TCPStore server sees it."""
    own = own_address(innermost(store).port)
    return numeric_address(store) if own == "@" else own


def cut(store: Any) -> None:
    """Have whoever waits for something of this store fail at once, where the store knows how to do that by itself."""
    if (end := getattr(innermost(store), "inprocess_cut", None)) is not None:
        end()
