"""Stores: connecting, serving, carrying out a verb's operations. The only file that calls a torch Store.

Public classes (``TCPStore``, ``FileStore``, ``PrefixStore``) are torch's own with two methods more; any other torch
Store with ``set, get, add, compare_set, wait, check, multi_get, delete_key`` works too. ``EtcdStore`` is in a file of
its own and imported with its first use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import importlib
import importlib.metadata
import ipaddress
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed  # noqa: F401  (registers the module below; a stub in the monitor process)
from torch._C._distributed_c10d import FileStore as _FileStore
from torch._C._distributed_c10d import PrefixStore as _PrefixStore
from torch._C._distributed_c10d import TCPStore as _TCPStore

from inprocess import clock, descriptors, procfs, strict_json
from inprocess.exception import OptionError, RestartError, StoreLost, TimeoutError
from inprocess.interpreter import pass_time
from inprocess.logs import get_logger
from inprocess.names import ask_briefly
from inprocess.protocol.messages import Entry
from inprocess.protocol.ops import Add, Claim, Delete, Exist, Now, Op, Pause, Read, ReadAll, Set, Verb, Wait

__all__ = [
    "BarrierError",
    "BarrierTimeout",
    "EtcdStore",
    "FileStore",
    "PrefixStore",
    "Seat",
    "StoreMixin",
    "StoreSpec",
    "TCPStore",
    "await_name",
    "connect",
    "drive",
    "listen",
    "own_address",
    "serve",
]

if TYPE_CHECKING:
    from inprocess.etcd_store import EtcdStore
else:

    def __getattr__(name: str) -> Any:
        if name == "EtcdStore":
            return importlib.import_module("inprocess.etcd_store").EtcdStore
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


T = TypeVar("T")
log = get_logger(__name__)
#: torch passes milliseconds to poll() as a C int, so a longer wait is made of several
LONGEST_WAIT = 20 * 24 * 3600.0
#: pause between two attempts to reach a server that is not up yet (seconds): first, and at most
RETRY = (0.005, 0.1)
#: pause between two attempts to resolve a name (seconds): first, and at most
NAME_PAUSE = (0.1, 2.0)
#: the first attempt to connect (seconds), which outlasts a name server that does not answer, each is twice as long as
#: the one before; and where a job begins, as the processes of its hosts all start then, and a server may answer late:
#: torch prints a C++ stack for one that fails
ATTEMPT, FIRST_ATTEMPT = 1.5, 5.0
#: how often it is looked meanwhile whether the call has ended (seconds)
LOOK = 0.25
#: socket options that Python has no names for
TCP_THIN_LINEAR_TIMEOUTS, TCP_RTO_MAX_MS = 16, 44
#: the longest wait without a look where nobody may wake us (seconds), see the end of this file
LOOK_AGAIN = 10.0
_ABSENT = "\0absent"
_LOST = "Its host is gone, or cannot be reached from here"
_MODULE_AND_NAME = re.compile(r"[\w.]+:\w+")


class StoreMixin:
    """What the library adds to torch's stores. Method names are our own: torch's Store grows methods of its own."""

    def inprocess_read(self, key: str) -> bytes | None:
        """What ``key`` holds, or None where it is absent; never waits."""
        return _read(self, key)

    def inprocess_claim(self, key: str, value: str) -> bytes:
        """Write ``value`` where ``key`` is absent; answers what it holds afterwards."""
        return _claim(self, Claim(key, value))


#: the established API's words for what is raised where the other ranks do not come in time
BarrierError = BarrierTimeout = TimeoutError


class TCPStore(StoreMixin, _TCPStore):
    """A client of a torch TCPStore server, which the process with ``RANK`` 0 becomes where nobody has the port yet.

    A Wrapper that is given this class needs no such server: its own lives in a monitor process.

    Args:
        host_name: default: the environment variable ``MASTER_ADDR``.
        port: default: ``MASTER_PORT``.
        world_size: number of clients, with `wait_for_workers`; default: ``WORLD_SIZE``.
        timeout: for operations that wait; default 300 s.
        wait_for_workers: return once all clients are there; default False, as whoever needs a key waits for it.
        multi_tenant: several servers in this process may share the port; default False.
        use_libuv: the kind of server; default True, and False where torch was built without libuv.
        is_master: serve as well; default: as above.
    """

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        timeout: timedelta = timedelta(seconds=300),
        wait_for_workers: bool = False,
        multi_tenant: bool = False,
        use_libuv: bool = True,
        *,
        is_master: bool | None = None,
    ) -> None:
        host = os.environ["MASTER_ADDR"] if host_name is None else host_name
        number = int(os.environ["MASTER_PORT"]) if port is None else port
        if world_size is None and wait_for_workers:
            world_size = int(os.environ["WORLD_SIZE"])
        make = functools.partial(super().__init__, host, number, world_size, timeout=timeout, multi_tenant=multi_tenant)

        def connect(serves: bool) -> None:
            _with_libuv_or_without(
                lambda libuv: make(is_master=serves, wait_for_workers=wait_for_workers, use_libuv=libuv and use_libuv)
            )

        if is_master is not None or os.environ.get("RANK") != "0":
            connect(bool(is_master))
            return
        try:
            connect(True)
        except RuntimeError:  # somebody else serves there
            connect(False)


class FileStore(StoreMixin, _FileStore):
    """A store in one file on a file system that all ranks share. Slow (it polls); for where no port may be opened.

    Args:
        file_name: the file; a fresh one for each job.
        world_size: number of processes, the last of which removes the file; default: it stays.
        timeout: for operations that wait; default 300 s.
    """

    def __init__(self, file_name: str, world_size: int = -1, timeout: timedelta = timedelta(seconds=300)) -> None:
        super().__init__(file_name, world_size)
        self.set_timeout(timeout)


class PrefixStore(StoreMixin, _PrefixStore):
    """A view of another store in which each key has a prefix: a text, or the number of an iteration."""

    def __init__(self, prefix: str | int, store: Any) -> None:
        super().__init__(str(prefix), store)
        # torch keeps the part of it that is C++; of a class that is written in Python that is nothing
        self._kept = store


@dataclasses.dataclass(frozen=True)
class Seat:
    """A process's place in its job, for a store that outlives jobs and so has to tell them apart.

    A store class that has ``inprocess_enter(kwargs, seat, timeout)`` is asked before each call for the arguments of
    this job's connections, and whether the call begins with this process; otherwise it joins a call that runs.
    """

    #: its rank while everybody is there
    rank: int
    #: tells this process apart from another one that claims the same rank
    me: str
    #: sets one attempt of a launcher that restarts whole jobs apart from the next
    attempt: str
    #: whether it comes with the others, or later
    entry: Entry
    #: the ranks with which the call begins, as far as this process knows
    members: Callable[[], Sequence[int]]
    #: names, each unique in the job: of this process in the last call in which it took part, and of all that took part
    #: until its end; empty where there was none
    last: Callable[[], tuple[str, Sequence[str]]]


@dataclasses.dataclass(frozen=True)
class StoreSpec:
    """How to reach the base store; travels to the monitor process as JSON."""

    #: ``module:name`` of a store class, or empty for a TCPStore at host and port
    factory: str = ""
    #: keyword arguments of the factory; JSON values only
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 0
    #: put before each key
    prefix: str = ""
    #: a server that holds this key is the one of an earlier call and about to go; empty: any server will do
    stale_key: str = ""
    #: a connection over which nothing comes back for so long is lost (seconds); 0: the kernel's own patience, minutes
    silence: float = 0.0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StoreSpec:
        """What `to_json` wrote. It names what is imported and called, so it never comes out of a store: the training
        process hands it to the monitor it started, in memory that both inherit.

        Raises:
            ValueError: it is no JSON object, or ``factory`` is not ``module:name``.
            TypeError: a field is unknown.
        """
        data = strict_json.parse(text)
        if not isinstance(data, dict):
            raise ValueError("how to reach the store is a JSON object")
        spec = cls(**data)
        if spec.factory and not _MODULE_AND_NAME.fullmatch(spec.factory):
            raise ValueError(f"factory={spec.factory!r} is not module:name")
        return spec

    def __str__(self) -> str:
        # names alone: a value may be a password
        return f"{self.factory}({', '.join(self.kwargs)})" if self.factory else f"{self.host}:{self.port}"


# --- connecting and serving ---------------------------------------------------------------------------------------


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
    """What `connect` answers, over a connection to the base store that is there already."""
    return PrefixStore(spec.prefix, base) if spec.prefix else base


def _connect_tcp(spec: StoreSpec, timeout: float, stopped: threading.Event) -> Any:
    deadline = clock.monotonic() + timeout
    while True:
        address = _await_server(spec, deadline, timeout, stopped)
        base = connect_to(address, spec.port, timeout, stopped, FIRST_ATTEMPT)
        if spec.silence:
            _limit_silence(address, spec.port, spec.silence)
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
    address: str, port: int, timeout: float, stopped: threading.Event | None = None, attempt: float = ATTEMPT
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
        while not done.wait(max(0.0, min(LOOK, deadline - clock.monotonic()))):
            if stopped.is_set() or clock.monotonic() >= deadline:
                break
    finally:
        if not done.is_set():
            given_up.set()
            shut_connections(address, port)
    if given_up.is_set():
        done.wait(5.0)
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
            raise StoreLost(f"nothing listens at {address}:{port}. {_LOST}")
        pause = min(pause * 1.5, RETRY[1])


def _listens(family: int, where: Any, seconds: float) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(min(2.0, seconds))
        # where nobody listens on a port that may be chosen automatically, a probe can meet itself
        return probe.connect_ex(where) == 0 and probe.getsockname() != probe.getpeername()


def _limit_silence(address: str, port: int, seconds: float) -> None:
    """Have the kernel give up connections to a server that cannot be reached, also those that only wait.

    Otherwise a host that is cut off would not learn of it: who sends waits a quarter of an hour for an answer, and who
    only waits does so for ever.
    """
    for descriptor, peer in connections():
        if peer == (address, port) and (copy := procfs.copy_of(descriptor)) is not None:
            with copy, contextlib.suppress(OSError):
                copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1e3))
                copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds / 3)))
                copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(seconds / 8)))
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                _send_again_soon(copy)


def _send_again_soon(connection: socket.socket) -> None:
    """Have the kernel send what was lost again after a second at most; it would double the time again and again.

    Over a wire that loses three packets of ten, a heartbeat would now and then be minutes late. Old kernels refuse.
    """
    for option, value in ((TCP_THIN_LINEAR_TIMEOUTS, 1), (TCP_RTO_MAX_MS, 1000)):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def shut_connections(address: str, port: int) -> int:
    """Shut down this process' connections to a server: whoever is blocked on one gets an error. Answers how many."""
    found = [descriptor for descriptor, peer in connections() if peer == (address, port)]
    for descriptor in found:
        shut(descriptor)
    return len(found)


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
    return str(address[0]).removeprefix("::ffff:"), int(address[1])


def shut(descriptor: int) -> None:
    """Shut a connection down in both directions; the descriptor stays open, for its owner to close."""
    if (copy := procfs.copy_of(descriptor)) is not None:
        with copy, contextlib.suppress(OSError):
            copy.shutdown(socket.SHUT_RDWR)


def _await_server(spec: StoreSpec, deadline: float, timeout: float, stopped: threading.Event) -> str:
    """The numeric address at which the server answers; tries every address the name has, IPv6 and IPv4."""
    host, port, pause, reason = spec.host, spec.port, RETRY[0], "the server of the call before is still there"
    while clock.monotonic() < deadline:
        try:
            for family, _, where in _lookup(host, port):
                if _listens(family, where, max(0.01, deadline - clock.monotonic())):
                    return str(where[0])
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


def await_name(host: str, seconds: float) -> None:
    """Wait until a name of MASTER_ADDR resolves: in Kubernetes it may not do so yet when a process starts.

    Raises TimeoutError after ``seconds``, RestartError where this process may open nothing more.
    """
    deadline, pause = clock.monotonic() + seconds, NAME_PAUSE[0]
    while True:
        try:
            _lookup(host, 0)
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
        pass_time(min(pause, max(0.0, deadline - clock.monotonic())))
        pause = min(2 * pause, NAME_PAUSE[1])


def serve(host: str, port: int, bind: str = "") -> Any:
    """A TCPStore server on ``port`` (0: any free one; read ``.port``). Raises OptionError where the port is taken.

    Args:
        host: by which the others know this machine. Where it is a loopback address, or ``localhost``, the server is
            reachable from this machine only.
        port: see above.
        bind: listen on this local address only; empty: on all, or loopback, as ``host`` says.
    """
    family, address, listener = _open(host, port, bind)
    number = listener.getsockname()[1]
    local = address if not _is_any(address) else "127.0.0.1" if family == socket.AF_INET else "::1"
    descriptor = listener.detach()  # TCPStore owns it from here on
    try:
        return _with_libuv_or_without(
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


def listen(host: str, bind: str = "") -> socket.socket:
    """A socket on any free port, reachable as a store would be that `serve` starts with these arguments."""
    return _open(host, 0, bind)[2]


def _open(host: str, port: int, bind: str) -> tuple[socket.AddressFamily, str, socket.socket]:
    family, address = _bound_to(bind, host) if bind else _bind_address(host)
    return family, address, _listen(family, address, port, bind)


def _listen(family: socket.AddressFamily, address: str, port: int, bind: str) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _send_again_soon(listener)  # the connections it accepts are like it
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(socket.getaddrinfo(address, port, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4])
        listener.listen(4096)
    except OSError as error:
        listener.close()
        if bind and error.errno == errno.EADDRNOTAVAIL:
            raise OptionError(f"store_kwargs: bind={bind!r} is no address of this machine, which serves it") from None
        raise OptionError(
            f"MASTER_PORT={port} (or port in store_kwargs): cannot listen on {address}:{port}: {error.strerror}. "
            "Another job or program uses this port (choose another one on every rank), or two processes of this job "
            "have the same RANK."
        ) from None
    return listener


def _bind_address(host: str) -> tuple[socket.AddressFamily, str]:
    addresses = _addresses(host)
    # a machine's own name is often 127.0.1.1 on itself, and another address for the others
    if all(map(_is_loopback, addresses)) and (_is_numeric(host) or "localhost" in host):
        v4 = [address for address in addresses if ":" not in address]
        return (socket.AF_INET, v4[0]) if v4 else (socket.AF_INET6, addresses[0])
    return (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")


def _bound_to(bind: str, host: str) -> tuple[socket.AddressFamily, str]:
    """The one address that ``bind`` names. The ranks of this machine must be able to reach it as ``host``."""
    try:
        address = _addresses(bind)[0]
    except OSError as error:
        raise OptionError(f"store_kwargs: bind={bind!r} is no address and no name of one: {error.strerror}") from None
    if not _is_any(address):
        here = _addresses(host)
        if all(map(_is_loopback, here)) and address not in here:
            raise OptionError(
                f"store_kwargs: bind={bind!r} is {address}, but the ranks of this machine look for the store at "
                f"{here[0]}: that is what MASTER_ADDR={host!r} means here. Set MASTER_ADDR, or host_name in "
                f"store_kwargs, to {address} on every rank."
            )
    return (socket.AF_INET6 if ":" in address else socket.AF_INET), address


def _addresses(host: str) -> list[str]:
    return [str(where[0]) for _, _, where in _lookup(host, 0)]


def _lookup(host: str, port: int) -> list[tuple[socket.AddressFamily, int, Any]]:
    """Where a connection to host and port goes: (family, kind, address) each."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # "a..b", or a label of more than 63 characters
        raise socket.gaierror(socket.EAI_NONAME, "not a host name") from None
    return [(family, kind, where) for family, kind, _, _, where in infos]


def _is_numeric(host: str) -> bool:
    try:
        socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    return True


def _is_any(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_unspecified


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


# --- carrying out verbs -------------------------------------------------------------------------------------------


def drive(verb: Verb[T], store: Any, stopped: threading.Event | None = None) -> T:
    """Carry out a verb's operations one by one and return its result.

    ``stopped`` ends pauses and, between two operations, the verb: it then raises StoreLost. So does a server that is
    gone.
    """
    execute = _executor(store, stopped or threading.Event())
    try:
        op = next(verb)
        while True:
            answer = execute(op)
            if stopped is not None and stopped.is_set():
                verb.close()
                raise StoreLost("stopped between two store operations")
            op = verb.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _executor(store: Any, stopped: threading.Event) -> Callable[[Op], Any]:
    def execute(op: Op) -> Any:
        match op:
            case Wait():
                return _wait(store, op)
            case Pause():
                return stopped.wait(op.seconds)
            case Now():
                return clock.monotonic()
        try:
            return _ACTIONS[type(op)](store, op)
        except RuntimeError as error:  # torch's DistError and its kin; ours are none
            # a TCPStore's server closes the connection on which something else than a number is to be added to
            hint = ", or the key does not hold a number" if isinstance(op, Add) else ""
            raise StoreLost(f"the store failed in {op}: {first_line(error)}. {_LOST}{hint}") from None

    return execute


def _read(store: Any, key: str) -> bytes | None:
    # one round trip: a compare-and-set that expects what is never there answers the value, or what it expected
    found = store.compare_set(key, _ABSENT, _ABSENT)
    return None if found == _ABSENT.encode() else bytes(found)


def _claim(store: Any, op: Claim) -> bytes:
    found = bytes(store.compare_set(op.key, op.instead, op.value))
    if found == op.value.encode() and op.awaited and not op.instead and not _uses_libuv(store):
        store.set(op.key, op.value)  # wakes who waits
    return found


_ACTIONS: dict[type, Callable[[Any, Any], Any]] = {
    Set: lambda store, op: store.set(op.key, op.value),
    Add: lambda store, op: store.add(op.key, op.amount),
    Claim: _claim,
    Read: lambda store, op: _read(store, op.key),
    ReadAll: lambda store, op: store.multi_get(list(op.keys)),
    Exist: lambda store, op: store.check(list(op.keys)),
    Delete: lambda store, op: store.delete_key(op.key),
}


def _wait(store: Any, op: Wait) -> bytes | None:
    longest = LONGEST_WAIT if _uses_libuv(store) else LOOK_AGAIN
    remaining = float("inf") if op.timeout is None else op.timeout
    while True:
        patience = min(remaining, longest)
        begin = clock.monotonic()
        try:
            # get waits too, and gives the interpreter lock up once instead of twice
            store.set_timeout(timedelta(seconds=patience))
            if found := bytes(store.get(op.key)):
                return found
            # torch's server also wakes us where somebody reads the key with a compare-and-set, and it is not there yet
            patience = min(patience, clock.monotonic() - begin)
        except RuntimeError as error:
            if not _is_timeout(error) and not (clock.monotonic() - begin >= patience and _answers(store)):
                raise StoreLost(
                    f"the store failed while waiting for {op.key!r}: {first_line(error)}. {_LOST}"
                ) from None
        remaining -= patience
        if remaining <= 0:
            return None


def _is_timeout(error: RuntimeError) -> bool:
    """torch has no class of its own for it; where its words change, the clock and the store itself tell."""
    return "timeout" in str(error).lower() or "timed out" in str(error).lower()


def _answers(store: Any) -> bool:
    try:
        return store.check([_ABSENT]) is not None
    except RuntimeError:
        return False


def first_line(error: BaseException) -> str:
    """What an error says, or what it is where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def numeric_address(store: Any) -> str:
    """The address at which a connection reaches the TCPStore server."""
    return str(_innermost(store).host)


def address_towards(store: Any) -> str:
    """The address of this host, as the host of a TCPStore server sees it."""
    own = own_address(_innermost(store).port)
    return numeric_address(store) if own == "@" else own


def cut(store: Any) -> None:
    """Have whoever waits for something of this store fail at once, where the store knows how to do that by itself."""
    if (end := getattr(_innermost(store), "inprocess_cut", None)) is not None:
        end()


def _innermost(store: Any) -> Any:
    """The store itself, without the views that put a prefix before its keys."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


# --- the two kinds of TCPStore servers ----------------------------------------------------------------------------

# torch has two, with libuv and without. The second is served where the environment variable USE_LIBUV is 0, torch's own
# switch, and where torch was built without libuv (Debian's). Its compare_set wakes nobody who waits for the key, so the
# one whose value was taken sets it once more; and since it may die in between, who waits looks again now and then.

_built_with_libuv = True


def _with_libuv_or_without(make: Callable[[bool], T]) -> T:
    """Make a store of the kind that is served here. torch says only then that it was built without libuv."""
    global _built_with_libuv
    libuv = _built_with_libuv and os.environ.get("USE_LIBUV", "1") == "1"
    try:
        return make(libuv)
    except RuntimeError as error:
        if not libuv or "libuv" not in str(error):
            raise
    _built_with_libuv = False
    return make(False)


def _uses_libuv(store: Any) -> bool:
    return bool(getattr(_innermost(store), "libuvBackend", True))
