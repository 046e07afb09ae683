"""States over HTTP, in one process: who gets them, and what arrives."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inprocess.exception import BadMessage, LiveStateError
from inprocess.live import http as live_http
from inprocess.live import tree
from inprocess.live.http import HttpWire, _Served
from inprocess.live.tree import Record
from inprocess.system.clock import monotonic
from tests.harness import strangers, streams

#: a ceiling, not a duration (seconds)
SOON = 20.0

STATE = {"model": {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(7)}, "text": "x", "empty": torch.zeros(0)}


class Dictionary:
    """An iteration's store, for one process that plays both ranks."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._data[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._data[key]


class Receiver(HttpWire):
    """Without a process group."""

    rank = 1

    def __init__(self, served: _Served, token: str) -> None:
        self._group, self._store, self._response = None, Dictionary(), None
        self._store.set(self._key(0, 1), f"{token}@{served.host}:{served.port}")


@pytest.fixture
def served() -> Iterator[_Served]:
    record = tree.take(STATE)
    with _Served(record, record.header(), "127.0.0.1") as served:
        yield served


def received(served: _Served, token: str) -> Any:
    wire = Receiver(served, token)
    skeleton = tree.read(wire.receive_header(0))
    room = tree.into({}, skeleton)
    wire.receive(room, 0, "the state")
    return room.tree


def test_all_of_it_arrives(served: _Served) -> None:
    found = received(served, served.token)
    assert found["text"] == "x"
    assert torch.equal(found["model"]["w"], STATE["model"]["w"])  # type: ignore[index]
    assert found["model"]["n"] == 7
    assert found["empty"].numel() == 0
    assert served.fetched.wait(SOON)  # set once all was sent, which may be after it has arrived


def test_a_tensor_that_does_not_lie_in_one_piece(served: _Served) -> None:
    wire = Receiver(served, served.token)
    skeleton = tree.read(wire.receive_header(0))
    mine = torch.zeros(3, 2).t()
    wire.receive(tree.into({"model": {"w": mine}}, skeleton), 0, "the state")
    assert torch.equal(mine, STATE["model"]["w"])  # type: ignore[index]


def test_nobody_else_gets_it(served: _Served) -> None:
    with pytest.raises(LiveStateError, match="rank 0 does not serve its state: another token"):
        received(served, "another")
    assert not served.fetched.is_set()
    connection = http.client.HTTPConnection(served.host, served.port, timeout=10)
    connection.request("GET", "/")
    answer = connection.getresponse()
    assert answer.status == http.client.UNAUTHORIZED
    assert b"model" not in answer.read()
    answer.close()
    connection.close()


def test_an_end_in_the_middle_is_an_error(served: _Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(record: Record, header: bytes) -> Iterator[bytes]:
        yield len(header).to_bytes(8, "big") + header + b"1234"

    monkeypatch.setattr(live_http, "_content", half)
    with pytest.raises(LiveStateError, match="rank 0 ended in the middle of its state"):
        received(served, served.token)


def test_whoever_is_in_the_middle_of_it_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that serves it is interrupted: no thread of it stays, though the other one takes its time."""
    record, under_way = tree.take(STATE), threading.Event()

    def endless(record: Record, header: bytes) -> Iterator[bytes]:
        while True:
            yield bytes(1 << 20)
            under_way.set()

    monkeypatch.setattr(live_http, "_content", endless)
    before = threading.active_count()
    with _Served(record, b"", "127.0.0.1") as served, socket.create_connection((served.host, served.port)) as slow:
        slow.sendall(f"GET / HTTP/1.0\r\nAuthorization: Bearer {served.token}\r\n\r\n".encode())
        slow.recv(1)
        assert under_way.wait(20)
    assert threading.active_count() == before


def test_damage_is_noticed(served: _Served, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = live_http._content

    def damaged(record: Record, header: bytes) -> Iterator[Any]:
        for number, data in enumerate(whole(record, header)):
            yield bytes([data[0] ^ 1]) + bytes(data[1:]) if number == 2 else data

    monkeypatch.setattr(live_http, "_content", damaged)
    with pytest.raises(LiveStateError, match="1 of 2 pieces arrived damaged"):
        received(served, served.token)


def test_a_stranger_that_says_nothing_holds_nobody() -> None:
    """Its request is not waited for when the state has been fetched."""
    record = tree.take(STATE)
    served = _Served(record, record.header(), "127.0.0.1").__enter__()
    with socket.create_connection((served.host, served.port)) as stranger:
        received(served, served.token)
        done = threading.Thread(target=served.__exit__, args=(None, None, None))
        done.start()
        done.join(SOON)
        assert not done.is_alive()
        assert stranger.recv(1) == b""


WRONG = [
    "é@127.0.0.1:1",
    "@127.0.0.1:1",
    "127.0.0.1:1",
    "-",
    "t@127.0.0.1:99999",
    "t@127.0.0.1:0",
    "t@:1",
    "t@a b:1",
    "t@a:1\r\n",
    "[]",
    "[" * 100_000,
    "7",
    '{"host": 7}',
    "x" * 1_000_000,
]


@pytest.mark.parametrize("where", WRONG, ids=[each[:20] for each in WRONG])
def test_an_address_of_somebody_else(served: _Served, where: str) -> None:
    """TypeError, RecursionError and MemoryError, before."""
    wire = Receiver(served, "")
    wire._store.set(wire._key(0, 1), where)
    with pytest.raises(BadMessage, match="store key 'inprocess-live/0/1': ") as error:
        wire.receive_header(0)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n" + b"\xff" * 8, "rank 0 announces 18446744073709551615 bytes, more than"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "rank 0 does not serve its state: BadStatusLine: SSH-2.0"),
        (b"", "rank 0 does not serve its state: RemoteDisconnected"),
    ],
)
def test_another_server_at_that_address(said: bytes, error: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        served = SimpleNamespace(host="127.0.0.1", port=other.getsockname()[1])

        def answer() -> None:
            with other.accept()[0] as caller:
                caller.recv(1 << 16)
                caller.sendall(said)

        answering = threading.Thread(target=answer)
        answering.start()
        wire = Receiver(served, "token")  # type: ignore[arg-type]
        with pytest.raises((LiveStateError, ConnectionError), match=error):
            wire.receive_header(0)
        answering.join(SOON)


def test_strangers_of_every_kind_delay_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is silent, one resets, one says something else, one asks and takes nothing; standard error is full."""
    record = tree.take([torch.zeros(1 << 14) for _ in range(64)])  # of such a size torch starts no threads
    took = []
    for come in (False, True):
        with contextlib.ExitStack() as stack:
            descriptor = stack.enter_context(streams.full())
            monkeypatch.setattr(sys, "stderr", stack.enter_context(os.fdopen(descriptor, "w", closefd=False)))
            begin = monotonic()
            with _Served(record, record.header(), "127.0.0.1") as served:
                if come:
                    where, asks = (served.host, served.port), f"Authorization: Bearer {served.token}\r\n"
                    strangers.surround(stack, where, asks)
                received(served, served.token)
            took.append(monotonic() - begin)
    assert took[1] < took[0] + 1.0


def test_groups_that_recover_at_the_same_time_share_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of one is another process than rank 0 of the other."""
    first, second = object(), object()
    ranks = {first: [0, 1], second: [2, 3]}
    monkeypatch.setattr(live_http.dist, "get_global_rank", lambda group, rank: ranks[group][rank])
    wire = object.__new__(HttpWire)
    keys = []
    for wire._group in (first, second, None):
        keys.append(wire._key(0, 1))
    assert keys == ["inprocess-live/0/1", "inprocess-live/2/3", "inprocess-live/0/1"]
