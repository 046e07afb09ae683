"""Where the stores listen: on one address where the user says so, on loopback where MASTER_ADDR is, else everywhere."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest

from inprocess.call import base_store
from inprocess.call.launch_variables import Launch
from inprocess.exception import OptionError
from inprocess.failover.standby import Standby
from inprocess.monitor.configuration import MonitorConfig
from inprocess.options import Options
from inprocess.protocol import verbs
from inprocess.protocol.messages import FailoverOutcome, Verdict
from inprocess.stores import connecting, serving
from inprocess.stores import tcp as store
from inprocess.stores.driver import execute
from inprocess.stores.iteration import IterationServers
from inprocess.stores.spec import StoreSpec

V6 = socket.has_ipv6 and socket.has_dualstack_ipv6()
#: an address of this machine that is not loopback is not needed: all of 127/8 is local, and each its own address
HERE, ELSEWHERE = "127.0.0.2", "127.0.0.3"
Serve = Callable[..., Any]


def answers(address: str, port: int) -> bool:
    """Whether somebody listens there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        return probe.connect_ex((address, port)) == 0


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve like the library; the servers go with the test."""
    servers: list[Any] = []

    def start(host: str, bind: str = "") -> Any:
        servers.append(serving.serve(host, 0, bind))
        return servers[-1]

    yield start
    servers.clear()


def works(address: str, port: int) -> bool:
    connection = store.TCPStore(address, port, timeout=timedelta(seconds=20))
    connection.set("key", "value")
    return bool(connection.get("key") == b"value")


def test_one_address_and_no_other(serve: Serve) -> None:
    server = serve("10.1.2.3", HERE)
    assert works(HERE, server.port)
    assert not any(answers(other, server.port) for other in (ELSEWHERE, "127.0.0.1"))
    assert not V6 or not answers("::1", server.port)


@pytest.mark.skipif(not V6, reason="no IPv6 here")
def test_all_addresses_where_ipv6_is_switched_off(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """By sysctl: a socket may listen on ``::``, and there is no ``::1`` at which torch could reach it."""

    class Socket(socket.socket):
        def bind(self, address: Any) -> None:
            if address[0] == "::1":
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            super().bind(address)

    monkeypatch.setattr(serving.socket, "socket", Socket)
    server = serve("10.1.2.3")
    assert server.host == "127.0.0.1" and works("127.0.0.1", server.port)


@pytest.mark.skipif(not V6, reason="no IPv6 here")
def test_one_address_of_ipv6(serve: Serve) -> None:
    server = serve("10.1.2.3", "::1")
    assert works("::1", server.port)
    assert not answers("127.0.0.1", server.port)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", HERE, "127.2"])
def test_loopback_is_not_left(serve: Serve, host: str) -> None:
    """In 127/8 only the one address that MASTER_ADDR means."""
    server = serve(host)
    meant = socket.gethostbyname(host)
    assert works(meant, server.port)
    assert not answers(ELSEWHERE, server.port)


@pytest.mark.parametrize("bind", ["", "0.0.0.0"])
def test_all_interfaces(serve: Serve, bind: str) -> None:
    server = serve("10.1.2.3", bind)
    assert works(ELSEWHERE, server.port)
    assert works("127.0.0.1", server.port)


def names(monkeypatch: pytest.MonkeyPatch, table: dict[str, str]) -> None:
    """Host names as another machine's /etc/hosts has them."""
    getaddrinfo = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **kw: getaddrinfo(_numeric(host, kw, table), *a, **kw))


def _numeric(host: str, options: dict[str, Any], table: dict[str, str]) -> str:
    return host if options.get("flags") == socket.AI_NUMERICHOST else table.get(host, host)


def test_a_machine_whose_own_name_is_loopback_serves_the_others_too(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian writes ``127.0.1.1 name`` into /etc/hosts; the others have another address for that name."""
    names(monkeypatch, {"node-1": "127.0.1.1"})
    server = serve("node-1")
    assert answers(ELSEWHERE, server.port)


def test_a_name_that_the_own_ranks_look_up_elsewhere_is_an_error(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, {"node-1": "127.0.1.1"})
    with pytest.raises(
        OptionError, match=r"bind='10\.0\.0\.5' is 10\.0\.0\.5, but .* at 127\.0\.1\.1.*Set MASTER_ADDR"
    ):
        serve("node-1", "10.0.0.5")


@pytest.mark.parametrize(
    ("bind", "words"),
    [
        ("192.0.2.1", "bind='192.0.2.1' is no address of this machine"),
        ("a..b", "bind='a..b' is no address and no name"),
    ],
)
def test_addresses_that_cannot_be_bound(serve: Serve, bind: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        serve("10.1.2.3", bind)


def test_the_option() -> None:
    options = Options.build(store_kwargs={"bind": "10.0.0.5"})
    assert base_store.bind(options, serves=True) == "10.0.0.5"
    assert base_store.bind(Options.build(), serves=False) == ""
    with pytest.raises(OptionError, match="torchrun's agent serves the store"):
        base_store.bind(options, serves=False)
    with pytest.raises(OptionError, match="bind=5 must be"):
        base_store.bind(Options.build(store_kwargs={"bind": 5}), serves=True)
    mine = Options.build(store_factory=store.FileStore, store_kwargs={"file_name": "/x", "bind": "1"})
    assert base_store.bind(mine, serves=False) == "", "another store's own argument"


def test_the_address_of_a_monitor_without_the_base_store_is_the_only_one_it_uses(serve: Serve) -> None:
    """The iterations' stores beside torchrun's agent: published under one address, bound to that."""
    server = IterationServers(HERE, "10.1.2.3", "")._new()
    assert answers(HERE, server.port) and not answers(ELSEWHERE, server.port)
    del server


def unresolved(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The name server does not answer just now."""
    getaddrinfo = socket.getaddrinfo

    def ask(host: str, *args: Any, **options: Any) -> Any:
        if host == name:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return getaddrinfo(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", ask)


def published(iteration: int, base: Any) -> int:
    """The port."""
    return int(execute(verbs.await_rendezvous(iteration), base).removeprefix("@:"))


def test_a_restart_while_the_name_server_does_not_answer(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of the stores looks its name up once: their end would be that of the job."""
    names(monkeypatch, {"node-1": "127.0.0.1"})
    base, servers = store.PrefixStore("call", serve("127.0.0.1")), IterationServers("@", "node-1", "")
    servers.offer(0, base)
    unresolved(monkeypatch, "node-1")
    for iteration in (1, 2):
        servers.offer(iteration, base)
        assert works("127.0.0.1", published(iteration, base))


def test_a_host_that_stands_by_while_the_name_server_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, {"node-1": "127.0.0.1"})
    config = MonitorConfig(member=0, roster=(0, 1), store="", serve_host="node-1")
    standby = Standby(config, config.membership(), StoreSpec(), Mock())
    unresolved(monkeypatch, "node-1")
    try:
        assert works("127.0.0.1", standby._serve(Verdict(FailoverOutcome.GO, ((0, 1),))))
    finally:
        standby.server.close()


def test_a_store_that_cannot_be_made_ahead_of_a_restart(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base, servers = store.PrefixStore("call", serve("127.0.0.1")), IterationServers("@", "127.0.0.1", "")
    new, may = servers._new, iter((True, False))

    def scarce() -> Any:
        if next(may, True):
            return new()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(servers, "_new", scarce)
    servers.offer(0, base)
    assert works("127.0.0.1", published(0, base))
    servers.make_ahead()
    assert "no store can be made ahead of a restart: too many open files" in caplog.text
    assert not servers.has_spare
    servers.make_ahead()
    assert servers.has_spare, "it is tried again"
    ahead = servers._spare[0].port
    servers.offer(1, base)
    assert published(1, base) == ahead and not servers.has_spare, "none is made in a restart"
    assert works("127.0.0.1", published(1, base)) and published(1, base) != published(0, base)


def test_launch_is_not_needed_for_binding() -> None:
    """The option says nothing to ranks that do not serve."""
    launch = Launch(rank=1, world_size=2, host="10.0.0.1", port=29500, agent_store=False, attempt="0")
    spec = base_store._tcp_spec(Options.build(store_kwargs={"bind": "10.0.0.5"}), _job(launch))
    assert (spec.host, spec.port) == ("10.0.0.1", 29500)


def _job(launch: Launch) -> Any:
    from inprocess.call.job import Job

    return Job(launch, (0, 1), 0, 2)


@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".local", "no such host"])
def test_a_master_addr_that_is_no_name_is_an_error_that_shows_it(host: str) -> None:
    with pytest.raises(TimeoutError, match=f"no store at {host}:29500"):
        connecting.connect(StoreSpec(host=host, port=29500), 0.05)
