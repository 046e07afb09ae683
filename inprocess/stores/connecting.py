"""Connecting to a base store: waiting until somebody serves it, within a limit."""

from __future__ import annotations

import importlib
import importlib.metadata
import socket
import threading
from datetime import timedelta
from typing import Any

from inprocess.exception import RestartError, StoreLost, TimeoutError
from inprocess.stores import addresses
from inprocess.stores.connections import limit_silence, shut_awaited
from inprocess.stores.raw import LOST
from inprocess.stores.spec import StoreSpec
from inprocess.stores.tcp import PrefixStore, TCPStore
from inprocess.system import clock, descriptors
from inprocess.system.errors import first_line
from inprocess.system.names import ask_briefly

__all__ = ["ATTEMPT_TIMEOUT_S", "connect", "connect_to", "prefixed"]

#: pause between two attempts to reach a server that is not up yet (seconds): first, and at most
RETRY = (0.005, 0.1)
#: the first attempt to connect (seconds), which outlasts a name server that does not answer, each is twice as long as
#: the one before; and where a job begins, as the processes of its hosts all start then, and a server may answer late:
#: torch prints a C++ stack for one that fails
ATTEMPT_TIMEOUT_S, FIRST_ATTEMPT_TIMEOUT_S = 1.5, 5.0
#: how often it is looked meanwhile whether the call has ended (seconds)
POLL_INTERVAL_S = 0.25
#: how long an attempt whose connection was shut may take to end (seconds)
GIVING_UP_S = 5.0


def connect(spec: StoreSpec, timeout: float, stopped: threading.Event | None = None) -> Any:
    """A connection of its own to the base store, waiting up to ``timeout`` seconds for its server.

    Raises TimeoutError naming the address, or StoreLost where ``stopped`` was set meanwhile.
    """
    if spec.factory:
        module, _, name = spec.factory.partition(":")
        base = getattr(importlib.import_module(module), name)(**spec.kwargs)
    else:
        base = _connect_tcp(spec, timeout, stopped or threading.Event())
    return prefixed(spec, base)


def prefixed(spec: StoreSpec, base: Any) -> Any:
    """What `connect` returns, over a connection to the base store that is there already."""
    return PrefixStore(spec.prefix, base) if spec.prefix else base


def _connect_tcp(spec: StoreSpec, timeout: float, stopped: threading.Event) -> Any:
    deadline = clock.monotonic() + timeout
    while True:
        address = _await_server(spec, deadline, timeout, stopped)
        base = connect_to(address, spec.port, timeout, stopped, FIRST_ATTEMPT_TIMEOUT_S)
        if spec.silence:
            limit_silence(address, spec.port, spec.silence)
        if not spec.stale_key or not _holds(base, spec.stale_key):
            return base
        del base
        stopped.wait(RETRY[0])


def _holds(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:  # it went away just now
        return True


def connect_to(
    address: str, port: int, timeout: float, stopped: threading.Event | None = None, attempt: float = ATTEMPT_TIMEOUT_S
) -> Any:
    """A client of the TCPStore server at a numeric address (torch's own resolver takes 250 to 1,000 ms for some names).

    Raises StoreLost where nothing listens there, where what listens does not answer like a TCPStore (torch itself waits
    for ever then), and where ``stopped`` was set meanwhile; RestartError where this process may open nothing more.
    """
    made: list[Any] = []
    deadline, stopped = clock.monotonic() + timeout, stopped or threading.Event()
    done, given_up = threading.Event(), threading.Event()
    arguments = (made, done, given_up, address, port, timeout, attempt)
    thread = threading.Thread(target=_construct, args=arguments, name="inprocess-connect", daemon=True)
    try:
        thread.start()  # in here: it waits for the thread to run, and may be interrupted then
        # a join that is interrupted takes the thread for one that has ended
        _await(done, deadline, stopped)
    finally:
        if not done.is_set():
            given_up.set()
            # no other one: this rank may have healthy connections to the same server
            shut_awaited(address, port, str(thread.native_id))
    deadline = clock.monotonic() + GIVING_UP_S
    while given_up.is_set() and not done.wait(POLL_INTERVAL_S) and clock.monotonic() < deadline:
        shut_awaited(address, port, str(thread.native_id))  # torch may have tried once more
    if made and not isinstance(made[0], Exception):
        return made[0]
    if stopped.is_set():
        raise StoreLost(f"gave up connecting to the store at {address}:{port}: the call has ended")
    if made and (shortage := descriptors.shortage(made[0])):
        raise RestartError(f"cannot connect to the store at {address}:{port}: {shortage}")
    if made and isinstance(made[0], StoreLost):
        raise made[0]
    reason = first_line(made[0]) if made else f"no answer within {timeout:g} s"
    raise StoreLost(
        f"{address}:{port} accepts connections but does not answer like a TCPStore ({reason}). Another program may be "
        "listening on this port: choose another one on every rank (MASTER_PORT, or port in store_kwargs)."
    )


def _await(done: threading.Event, deadline: float, stopped: threading.Event) -> None:
    """In slices: an interruption arrives between two of them."""
    while not done.wait(max(0.0, min(POLL_INTERVAL_S, deadline - clock.monotonic()))):
        if clock.monotonic() >= deadline or stopped.is_set():
            return


def _construct(
    made: list[Any],
    done: threading.Event,
    given_up: threading.Event,
    address: str,
    port: int,
    timeout: float,
    attempt: float,
) -> None:
    """In short attempts: torch tries again by itself and cannot be told that nobody waits any more."""
    ask_briefly()  # torch looks up the peer's name
    deadline, patience = clock.monotonic() + max(timeout, 1.0), attempt / 2
    while not made:
        begun = clock.monotonic()
        patience = min(2 * patience, max(1.0, deadline - begun))
        try:
            _await_listener(address, port, deadline, given_up)
            begun = clock.monotonic()
            store = TCPStore(address, port, timeout=timedelta(seconds=patience), is_master=False)
            store.set_timeout(timedelta(seconds=max(timeout, 1.0)))
            made.append(store)
        except Exception as error:
            now = clock.monotonic()
            # too soon for a server that is not there: it is there, and no TCPStore
            if given_up.is_set() or now >= deadline or now - begun < patience:
                made.append(error)
    done.set()


def _await_listener(address: str, port: int, deadline: float, given_up: threading.Event) -> None:
    """Until something listens there: where nothing does, torch's client prints a C++ stack each time it tries."""
    pause = RETRY[0]
    where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    while not _listens(where[0], where[4], max(0.01, deadline - clock.monotonic())):
        if given_up.wait(min(pause, max(0.0, deadline - clock.monotonic()))) or clock.monotonic() >= deadline:
            raise StoreLost(f"nothing listens at {address}:{port}. {LOST}")
        pause = min(pause * 1.5, RETRY[1])


def _listens(family: int, where: Any, seconds: float) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(min(2.0, seconds))
        if probe.connect_ex(where) != 0:
            return False
        try:  # where nobody listens on a port that may be chosen automatically, a probe can meet itself
            return bool(probe.getsockname() != probe.getpeername())
        except OSError:  # a server that goes has reset it
            return False


def _await_server(spec: StoreSpec, deadline: float, timeout: float, stopped: threading.Event) -> str:
    """The numeric address at which the server answers; tries every address the name has, IPv6 and IPv4."""
    host, port, pause, reason = spec.host, spec.port, RETRY[0], "the server of the call before is still there"
    while clock.monotonic() < deadline:
        try:
            for family, _, where in addresses.lookup(host, port):
                if _listens(family, where, max(0.01, deadline - clock.monotonic())):
                    return addresses.numeric(where)
            reason = "nothing answers there"
        except OSError as error:  # a name that does not resolve yet (Kubernetes) as much as one that never will
            if shortage := descriptors.shortage(error):
                raise RestartError(f"cannot connect to the store at {host}:{port}: {shortage}") from None
            reason = str(error)
        if stopped.wait(min(pause, max(0.0, deadline - clock.monotonic()))):
            raise StoreLost(f"gave up connecting to the store at {host}:{port}: the call has ended")
        pause = min(pause * 1.5, RETRY[1])
    raise TimeoutError(
        f"no store at {host}:{port} (MASTER_ADDR:MASTER_PORT, or host_name and port in store_kwargs; this host, where "
        f"only the port is given) within {timeout:.3g} s: {reason}. Rank 0 serves it: check that rank 0 was started, "
        "that all ranks have the same address and the port is reachable."
    )
