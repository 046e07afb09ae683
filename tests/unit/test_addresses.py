"""Names of hosts that do not resolve: which one it is, what to do, and what stands in for this host's own."""

from __future__ import annotations

import socket
from threading import Event
from typing import Any

import pytest

from inprocess.exception import OptionError
from inprocess.launcher import job
from inprocess.stores import addresses, connecting, serving
from inprocess.stores.spec import StoreSpec
from inprocess.system import clock


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only these resolve, without a name server."""
    known = {"head": "127.0.0.1", "127.0.0.1": "127.0.0.1", "127.0.0.7": "127.0.0.7"}

    def getaddrinfo(host: str, port: Any, *args: Any, **more: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_store_under_a_name_that_does_not_resolve() -> None:
    with pytest.raises(OptionError, match=r"'nosuchhost'.* not known.*--local-addr.*MASTER_ADDR"):
        serving.serve("nosuchhost", 0)
    with pytest.raises(OptionError, match=r"'nosuchhost'.* not known.*--local-addr.*MASTER_ADDR"):
        serving.serve("nosuchhost", 0, bind="127.0.0.1")


def test_bind_that_does_not_resolve() -> None:
    with pytest.raises(OptionError, match=r"bind='nosuchhost' .* not known.*an interface of this machine"):
        serving.serve("head", 0, bind="nosuchhost")


def test_the_name_of_this_host_where_it_resolves(caplog: pytest.LogCaptureFixture) -> None:
    assert addresses.name_or_address("head", "127.0.0.7") == "head"
    assert not caplog.records


def test_the_address_on_the_way_to_the_others_where_it_does_not(caplog: pytest.LogCaptureFixture) -> None:
    assert addresses.name_or_address("nosuchhost", "127.0.0.7") == "127.0.0.1"
    assert "'nosuchhost'" in caplog.text
    assert addresses.name_or_address("nosuchhost", "nor.this") == "nosuchhost"


def test_local_addr_that_does_not_resolve(capsys: pytest.CaptureFixture[str]) -> None:
    job._refuse_unknown(None)
    job._refuse_unknown("head")
    with pytest.raises(SystemExit) as caught:
        job._refuse_unknown("nosuchhost")
    assert caught.value.code == 2
    assert (
        "--local-addr=nosuchhost: does not resolve on this node (Name or service not known)" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("where", "address"),
    [
        (("10.0.0.1", 29500), "10.0.0.1"),
        (("fd00::1", 29500, 0, 0), "fd00::1"),
        (("fe80::1", 29500, 0, socket.if_nametoindex("lo")), "fe80::1%lo"),
        (("::ffff:10.0.0.1", 29500, 0, 0), "10.0.0.1"),
        (("::ffff:0:10.0.0.1", 29500, 0, 0), "::ffff:0:10.0.0.1"),
    ],
)
def test_addresses_that_can_be_used_elsewhere(
    where: tuple[Any, ...], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "lookup", lambda host, port: [(socket.AF_UNSPEC, socket.SOCK_STREAM, where)])
    monkeypatch.setattr(connecting, "_listens", lambda *_: True)
    assert addresses.numeric(where) == address
    assert addresses.addresses_of("head") == [address]
    assert connecting._await_server(StoreSpec(host="head"), clock.monotonic() + 20.0, 20.0, Event()) == address
