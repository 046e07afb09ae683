"""Names of hosts, and the addresses they stand for."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Any

from inprocess.exception import RestartError, TimeoutError
from inprocess.system import clock, descriptors
from inprocess.system.interpreter import sleep_with_progress
from inprocess.system.logs import get_logger

__all__ = [
    "NAME_PAUSE",
    "address_towards",
    "addresses_of",
    "await_name",
    "is_any",
    "is_loopback",
    "is_numeric",
    "lookup",
    "name_or_address",
    "numeric",
]

log = get_logger(__name__)
#: pause between two attempts to resolve a name (seconds): first, and at most
NAME_PAUSE = (0.1, 2.0)


def await_name(host: str, seconds: float) -> None:
    """Wait until a name of MASTER_ADDR resolves: in Kubernetes it may not do so yet when a process starts.

    Raises TimeoutError after ``seconds``, RestartError where this process may open nothing more.
    """
    deadline, pause = clock.monotonic() + seconds, NAME_PAUSE[0]
    while True:
        try:
            lookup(host, 0)
            return
        except OSError as error:
            if shortage := descriptors.shortage(error):
                raise RestartError(f"MASTER_ADDR={host!r} cannot be looked up: {shortage}") from None
            if clock.monotonic() >= deadline:
                raise TimeoutError(
                    f"MASTER_ADDR={host!r} does not resolve on this host within {seconds:g} s: {error.strerror}. Set "
                    "it to a name or an address of rank 0's host that this host can resolve; in Kubernetes, a headless "
                    "service with publishNotReadyAddresses has it before the pods are ready."
                ) from None
            if pause == NAME_PAUSE[0]:
                log.warning("MASTER_ADDR=%r does not resolve yet (%s); trying for %g s", host, error.strerror, seconds)
        sleep_with_progress(min(pause, max(0.0, deadline - clock.monotonic())))
        pause = min(2 * pause, NAME_PAUSE[1])


def addresses_of(host: str) -> list[str]:
    return [numeric(where) for _, _, where in lookup(host, 0)]


def numeric(where: tuple[Any, ...]) -> str:
    """The address of a host, as text, in what `lookup` or a socket gives.

    ``fe80::1%eth0`` where it is link-local, since nobody reaches it without the interface; and IPv4 as such where it
    comes as IPv6, ``::ffff:10.0.0.1``: a connection has the one or the other.
    """
    address = str(where[0])
    if len(where) == 4 and where[3]:
        return f"{address}%{socket.if_indextoname(where[3])}"
    mapped = address.removeprefix("::ffff:")
    return address if ":" in mapped else mapped


def address_towards(host: str) -> str:
    """That of this machine on the route to a host, by which the host can answer. Raises OSError where there is none."""
    family, _, where = lookup(host, 9)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # sends nothing
        return numeric(probe.getsockname())


def name_or_address(name: str, towards: str) -> str:
    """A name of this machine that others are to use; where it does not even resolve here, the address on the route
    ``towards`` a host that they know. The name again where there is no such route either."""
    try:
        lookup(name, 0)
        return name
    except OSError as error:
        if descriptors.shortage(error):
            raise
        with contextlib.suppress(OSError):
            address = address_towards(towards)
            log.warning("the name of this host, %r, does not resolve (%s): using %s", name, error.strerror, address)
            return address
        return name


def lookup(host: str, port: int) -> list[tuple[socket.AddressFamily, int, Any]]:
    """Where a connection to host and port goes: (family, kind, address) each.

    A socket that is given a pair of host and port forgets the interface of a link-local address; so give it this one.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # "a..b", or a label of more than 63 characters
        raise socket.gaierror(socket.EAI_NONAME, "not a host name") from None
    return [(family, kind, where) for family, kind, _, _, where in infos]


def is_numeric(host: str) -> bool:
    try:
        socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    return True


def is_any(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_unspecified


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
