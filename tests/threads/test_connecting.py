"""Connecting to a store's server that is not there yet, or not any more: torch's C++ prints nothing of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from inprocess.exception import RankShouldRestart, StoreLost
from inprocess.failover import arbiter_client
from inprocess.failover.arbiter_client import ArbiterClient
from inprocess.failover.arbiter_server import ArbiterServer
from inprocess.failover.rules import Arbiter
from inprocess.live import tree
from inprocess.live.http import _Served
from inprocess.protocol import verbs
from inprocess.stores import addresses, connections, serving
from inprocess.stores import connecting as connector
from inprocess.stores.connecting import _listens, connect_to
from inprocess.stores.driver import execute
from inprocess.stores.spec import StoreSpec
from inprocess.system import descriptors, procfs
from inprocess.testing.ports import ReservedPort


def test_where_nothing_listens_torch_is_not_asked(capfd: pytest.CaptureFixture[str]) -> None:
    """Its client would print a C++ stack for each attempt."""
    with ReservedPort() as port, pytest.raises(StoreLost, match=f"nothing listens at 127.0.0.1:{port.number}"):
        connect_to("127.0.0.1", port.number, 1.5)
    assert capfd.readouterr().err == ""


def test_a_server_that_comes_later(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    looked, look = threading.Semaphore(0), _listens

    def listens(*args: Any) -> bool:
        found = look(*args)
        looked.release()
        return found

    monkeypatch.setattr(connector, "_listens", listens)
    with ReservedPort() as port, ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect_to, "127.0.0.1", port.number, 30.0)
        for _ in range(3):
            assert looked.acquire(timeout=20)
        server = serving.serve("127.0.0.1", port.number)
        connection = connecting.result(30)
        connection.set("a", "1")
        assert server.get("a") == b"1"
        del connection, server, connecting
    assert "frame #" not in capfd.readouterr().err


def test_an_attempt_that_is_given_up_cuts_no_connection_but_its_own() -> None:
    """A store that stands still: those that were there before, and those of another attempt, wait on."""
    stopped = threading.Event()
    with contextlib.ExitStack() as closing, ThreadPoolExecutor(1) as pool:
        server = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        where = server.getsockname()

        def accept() -> socket.socket:
            return closing.enter_context(server.accept()[0])

        def connect() -> tuple[socket.socket, socket.socket]:
            return closing.enter_context(socket.create_connection(where)), accept()

        before = connect()
        trying = pool.submit(connect_to, *where, 60.0, stopped)
        probe, attempt = accept(), accept()
        assert probe.recv(1) == b"" and attempt.recv(1), "torch waits for the answer to what it has sent"
        meanwhile = connect()
        stopped.set()
        with pytest.raises(StoreLost, match="gave up connecting"):
            trying.result(20)
        for ours, theirs in (before, meanwhile):
            theirs.sendall(b"x")
            assert ours.recv(1) == b"x"
            ours.sendall(b"y")
            assert theirs.recv(1) == b"y"
        for thread in [thread for thread in threading.enumerate() if thread.name == "inprocess-connect"]:
            thread.join(10)
            assert not thread.is_alive()


def test_where_the_kernel_does_not_tell_for_what_a_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: str) -> list[str]:
        raise procfs.Unknown

    monkeypatch.setattr(procfs, "system_call", unknown)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        stopped = threading.Event()
        trying = pool.submit(connect_to, *server.getsockname(), 60.0, stopped)
        with server.accept()[0], server.accept()[0] as attempt:
            assert attempt.recv(1)
            stopped.set()
            with pytest.raises(StoreLost, match="gave up connecting"):
                trying.result(20)


def test_an_interruption_while_the_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread runs already, and the caller still waits for it to say so: it ends, though nobody takes its result."""
    started: list[threading.Thread] = []

    class Thread(threading.Thread):
        def start(self) -> None:
            super().start()
            started.append(self)
            raise RankShouldRestart

    with ReservedPort() as port:
        monkeypatch.setattr(threading, "Thread", Thread)
        with pytest.raises(RankShouldRestart):
            connect_to("127.0.0.1", port.number, timeout=60.0)
        monkeypatch.undo()
        started[0].join(10)
        assert not started[0].is_alive()


def test_a_probe_that_meets_itself_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may choose the very port for the probe that it connects to."""

    class Itself(socket.socket):
        def connect_ex(self, where: Any) -> int:
            self.bind(where)
            return super().connect_ex(where)

    with ReservedPort() as port:
        number = port.number
    monkeypatch.setattr(socket, "socket", Itself)
    assert not _listens(socket.AF_INET, ("127.0.0.1", number), 1.0)


def test_a_probe_that_is_reset_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of the job before goes just then."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        class Reset(socket.socket):
            def connect_ex(self, where: Any) -> int:
                found = super().connect_ex(where)
                with server.accept()[0] as theirs:
                    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                assert descriptors.await_readable(self.fileno(), 20)
                return found

        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", Reset)
            assert not _listens(server.family, server.getsockname(), 1.0)


#: scope and flags (permanent) of an address in /proc/net/if_inet6
LINK = ("20", "80")


def _link_local() -> str:
    """An address of this machine that is reached only with the name of its interface; empty: there is none."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # no IPv6
        return ""
    found = [(address, name) for address, _, _, scope, flags, name in map(str.split, lines) if (scope, flags) == LINK]
    return f"{ipaddress.IPv6Address(bytes.fromhex(found[0][0]))}%{found[0][1]}" if found else ""


needs_link_local = pytest.mark.skipif(not _link_local(), reason="needs an interface with a link-local address (fe80::)")


@needs_link_local
def test_a_link_local_address_keeps_its_interface() -> None:
    here = _link_local()
    server = serving.serve(here, 0)
    connection = connector.connect(StoreSpec(host=here, port=server.port, silence=5.0), 20)
    assert connections.numeric_address(connection) == here
    assert connections.address_towards(connection) == here and addresses.address_towards(here) == here
    assert connections.shut_connections(here, server.port) == 1


@needs_link_local
def test_what_a_member_serves_at_a_link_local_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arbiter of a standby, and the state of a rank."""
    monkeypatch.setattr(arbiter_client, "CONNECT_TIMEOUT_S", 20.0)
    here = _link_local()
    listener = serving.listen(serving.place_of("10.1.2.3", here))
    server = ArbiterServer(listener, 2, Arbiter(60.0, 60.0), lambda: None, Mock(), Mock(), lambda: None)
    server.start()
    stop, end = os.pipe()
    try:
        contact = ArbiterClient(here, server.port, server.key, stop)
        with contextlib.closing(contact.socket):
            contact.connect(1)
            assert contact.is_made
    finally:
        server.close()
        os.close(stop)
        os.close(end)
    record = tree.take({"n": torch.zeros(3)})
    with _Served(record, record.header(), here) as served, socket.create_connection((here, served.port)):
        pass


def test_ipv4_inside_ipv6_is_the_same_server() -> None:
    """``MASTER_ADDR=::ffff:10.0.0.1``: what looks for connections finds them."""
    server = serving.serve("::ffff:127.0.0.1", 0)
    connection = connector.connect(StoreSpec(host="::ffff:127.0.0.1", port=server.port), 20)
    assert connections.numeric_address(connection) == "127.0.0.1"
    assert connections.shut_connections(connections.numeric_address(connection), server.port)
    with pytest.raises(StoreLost):
        execute(verbs.has_begun(), connection)


def test_a_default_timeout_of_the_programs_changes_no_socket() -> None:
    """At each restart the connections of this process are looked at, also those that are not the library's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        socket.setdefaulttimeout(5)
        try:
            assert ours.fileno() in dict(connections.connections())
            assert os.get_blocking(ours.fileno())
            connections.shut(ours.fileno())
            assert os.get_blocking(ours.fileno())
        finally:
            socket.setdefaulttimeout(None)
        assert theirs.recv(1) == b""


def test_the_programs_locks_on_files_stay(tmp_path: Path) -> None:
    """A process loses them when it closes any descriptor of the file, also a copy."""
    take = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with open(tmp_path / "locked", "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        dict(connections.connections())
        other = subprocess.run([sys.executable, "-c", take, file.name], check=False, capture_output=True, text=True)
    assert "BlockingIOError" in other.stderr


def test_a_socket_that_has_no_address_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python cannot wrap one, such as the kernel's for cryptography."""

    def refuse(**_: object) -> socket.socket:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with socket.create_server(("127.0.0.1", 0)) as server:
        before = os.listdir("/proc/self/fd")
        with monkeypatch.context() as patch:
            patch.setattr(procfs.socket, "socket", refuse)
            assert procfs.copy_of(server.fileno()) is None
        assert os.listdir("/proc/self/fd") == before
