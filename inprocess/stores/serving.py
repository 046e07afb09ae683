"""Serving a base store, or an iteration's own."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.metadata
import os
import socket
from dataclasses import dataclass
from typing import Any

import torch.distributed  # noqa: F401  (registers the module below; a stub in the monitor process)
from torch._C._distributed_c10d import TCPStore as _TCPStore

from inprocess.exception import OptionError
from inprocess.stores.addresses import addresses_of, is_any, is_loopback, is_numeric
from inprocess.stores.connections import send_again_soon
from inprocess.stores.raw import with_libuv_or_without
from inprocess.system import descriptors
from inprocess.system.errors import first_line

__all__ = ["Place", "PortTaken", "listen", "place_of", "serve", "serve_at"]


class PortTaken(OptionError):
    """Somebody else listens there."""


@dataclass(frozen=True)
class Place:
    """An address of this machine at which a store is served."""

    family: socket.AddressFamily
    #: numeric
    address: str
    #: how the user wrote it; empty: the library has chosen it
    bind: str


def place_of(host: str, bind: str = "") -> Place:
    """Where `serve` listens with these arguments. Raises OptionError.

    Whoever serves again keeps it: in the middle of a restart the name may not resolve.
    """
    family, address = _bound_to(bind, host) if bind else _bind_address(host)
    return Place(family, address, bind)


def serve(host: str, port: int, bind: str = "") -> Any:
    """A TCPStore server on ``port`` (0: any free one; read ``.port``). Raises PortTaken, OptionError.

    Args:
        host: by which the others know this machine. Where it is a loopback address, or ``localhost``, the server is
            reachable from this machine only.
        port: see above.
        bind: listen on this local address only; empty: on all, or loopback, as ``host`` says.
    """
    return serve_at(place_of(host, bind), port)


def serve_at(place: Place, port: int = 0) -> Any:
    """As `serve`."""
    listener = listen(place, port)
    number = listener.getsockname()[1]
    local = _loopback(place.family) if is_any(place.address) else place.address
    descriptor = listener.detach()  # TCPStore owns it from here on
    try:
        return with_libuv_or_without(
            lambda libuv: _TCPStore(
                local, number, is_master=True, wait_for_workers=False, master_listen_fd=descriptor, use_libuv=libuv
            )
        )
    except TypeError as error:
        os.close(descriptor)
        version = importlib.metadata.version("torch")
        raise OptionError(
            f"torch {version} cannot serve a store on a socket that is given to it ({first_line(error)}): install a "
            "version that the library was run with, see docs/versions.md"
        ) from None


def _loopback(family: socket.AddressFamily) -> str:
    """At which a socket is reached that listens on all addresses. Where IPv6 is switched off by sysctl, a socket may
    listen on ``::``, but there is no ``::1``."""
    if family == socket.AF_INET6:
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind(("::1", 0))
            return "::1"
    return "127.0.0.1"


def listen(place: Place, port: int = 0) -> socket.socket:
    """A socket, reachable as a store is that `serve_at` starts with these arguments."""
    family, address, bind = place.family, place.address, place.bind
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        send_again_soon(listener)  # the connections it accepts are like it
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(socket.getaddrinfo(address, port, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4])
        listener.listen(4096)
    except OSError as error:
        listener.close()
        if bind and error.errno == errno.EADDRNOTAVAIL:
            raise OptionError(f"store_kwargs: bind={bind!r} is no address of this machine, which serves it") from None
        raise (PortTaken if error.errno == errno.EADDRINUSE else OptionError)(
            f"MASTER_PORT={port} (or port in store_kwargs): cannot listen on {address}:{port}: {error.strerror}. "
            "Another job or program uses this port (choose another one on every rank), or two processes of this job "
            "have the same RANK."
        ) from None
    return listener


def _bind_address(host: str) -> tuple[socket.AddressFamily, str]:
    addresses = _known_here(host)
    # a machine's own name is often 127.0.1.1 on itself, and another address for the others
    if all(map(is_loopback, addresses)) and (is_numeric(host) or "localhost" in host):
        v4 = [address for address in addresses if ":" not in address]
        return (socket.AF_INET, v4[0]) if v4 else (socket.AF_INET6, addresses[0])
    return (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")


def _bound_to(bind: str, host: str) -> tuple[socket.AddressFamily, str]:
    """The one address that ``bind`` names. The ranks of this machine must be able to reach it as ``host``."""
    try:
        address = addresses_of(bind)[0]
    except OSError as error:
        raise OptionError(
            f"store_kwargs: bind={bind!r} is no address and no name of one: {error.strerror}. Set it to that of an "
            "interface of this machine, or leave it out"
        ) from None
    if not is_any(address):
        here = _known_here(host)
        if all(map(is_loopback, here)) and address not in here:
            raise OptionError(
                f"store_kwargs: bind={bind!r} is {address}, but the ranks of this machine look for the store at "
                f"{here[0]}: that is what MASTER_ADDR={host!r} means here. Set MASTER_ADDR, or host_name in "
                f"store_kwargs, to {address} on every rank."
            )
    return (socket.AF_INET6 if ":" in address else socket.AF_INET), address


def _known_here(host: str) -> list[str]:
    try:
        return addresses_of(host)
    except OSError as error:
        if descriptors.shortage(error):
            raise
        raise OptionError(
            f"the host name {host!r}, by which others are to find a store of this machine, does not resolve here: "
            f"{error.strerror}. Use an address in its place: for inprocess run with --local-addr on this node, else in "
            "MASTER_ADDR or as host_name in store_kwargs on every rank"
        ) from None
