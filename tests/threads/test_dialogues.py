"""Random dialogues with each of the library's servers: who talks nonsense ends nothing but its own connection, and no
error of ours comes of it. `nox -s fuzz` has many more of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inprocess.failover.arbiter_server import ArbiterServer
from inprocess.failover.rules import Arbiter
from inprocess.live import tree
from inprocess.live.http import _Served
from inprocess.protocol.messages import dump
from inprocess.reports import endpoint
from inprocess.system.server import Server
from tests.unit import hostile
from tests.unit.hostile import fuzz

#: a ceiling, not a duration (seconds)
SOON = 20.0
KEY = "0123"
#: what a server must never have to say
Errors = list[str]


def _line(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


numbers = st.just(1) | hostile.numbers | hostile.json_values
hellos = st.fixed_dictionaries(
    {"hello": hostile.numbers | hostile.json_values, "key": st.sampled_from((KEY, "", 7)), "n": numbers}
)
votes = hostile.votes.map(dump) | hostile.anything.map(lambda raw: raw.decode(errors="replace"))
messages = (
    hellos
    | st.builds(lambda text, number: {"vote": text, "n": number}, votes, numbers)
    | st.builds(
        lambda name, value, number: {name: value, "n": number},
        st.sampled_from(("ping", "elsewhere", "completed")),
        hostile.json_values,
        numbers,
    )
)
lines = messages.map(_line) | hostile.damaged(messages.map(_line)) | hostile.anything
#: mostly of one that has the key, so that what follows is listened to
arbiter_dialogues = st.builds(
    lambda known, said: [*([_line({"hello": 3, "key": KEY, "n": 1})] if known else []), *said],
    st.booleans(),
    st.lists(lines, max_size=6),
)

words = (
    st.sampled_from(("GET", "POST", "get", "", "HEAD")),
    st.sampled_from(("/metrics", "/status", "/", "//[", "*", "/m?name[]=x")),
)
names = st.sampled_from(("Accept", "Accept-Encoding", "Authorization", "Content-Length", "Host", "Transfer-Encoding"))
values = st.sampled_from(
    ("text/plain;version=x", "application/openmetrics-text; version=9.9.9", "gzip", "Bearer ", "-1", "chunked")
)
headers = st.lists(
    st.builds(lambda name, value: f"{name}: {value}\r\n", names, values | st.text(max_size=9)), max_size=4
)
requests = st.builds(
    lambda method, path, version, more: f"{method} {path} {version}\r\n{''.join(more)}\r\n".encode(),
    *words,
    st.sampled_from(("HTTP/1.0", "HTTP/1.1", "HTTP/2", "HTTP/x.y", "")),
    headers,
)
http_dialogues = st.lists(requests | hostile.damaged(requests) | hostile.anything, min_size=1, max_size=3)


def talk(where: tuple[str, int], pieces: list[bytes]) -> None:
    """Say all of it, and wait for the end."""
    with socket.create_connection(where, SOON) as stranger, contextlib.suppress(ConnectionError):
        with contextlib.suppress(OSError):  # it has been sent away
            for piece in pieces:
                stranger.sendall(piece)
            stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass


def asked(where: tuple[str, int], said: bytes) -> bytes:
    """The first that is answered."""
    with socket.create_connection(where, SOON) as member:
        member.sendall(said)
        return member.recv(100)


def dialogues(
    server: Server[Any], kinds: st.SearchStrategy[list[bytes]], is_well: Callable[[tuple[str, int]], bool]
) -> None:
    """With a server that runs already. What it says is an error of ours."""
    said: Errors = []
    server.say = said.append  # type: ignore[method-assign]
    where = ("127.0.0.1", server.port)

    @fuzz
    @given(kinds)
    def all_of_them(pieces: list[bytes]) -> None:
        talk(where, pieces)
        assert (is_well(where), said) == (True, [])

    all_of_them()


def test_arbiter() -> None:
    listener, arbiter = socket.create_server(("127.0.0.1", 0)), Arbiter(60.0, 60.0)
    server = ArbiterServer(listener, 2, arbiter, lambda: None, lambda verdict: 29500, lambda slot: None, lambda: None)
    server.key = KEY
    server.start()
    server.lost()
    with contextlib.closing(server):
        hello = _line({"hello": 1, "key": KEY, "n": 1})
        dialogues(server, arbiter_dialogues, lambda where: asked(where, hello) == b'{"ok": true, "n": 1}\n')


def test_state() -> None:
    record = tree.take({"n": torch.zeros(3)})
    with _Served(record, record.header(), "127.0.0.1") as served:
        get = f"GET / HTTP/1.0\r\nAuthorization: Bearer {served.token}\r\n\r\n".encode()
        dialogues(served._server, http_dialogues, lambda where: asked(where, get).startswith(b"HTTP/1.0 200 OK"))


def test_metrics(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    answers = endpoint._answers(endpoint.Snapshot(str(tmp_path)))
    server = endpoint._Server(endpoint._listener("127.0.0.1", 0), "inprocess-metrics", answers)
    server.start()
    gets = itertools.cycle((b"GET /metrics HTTP/1.0\r\n\r\n", b"GET /status HTTP/1.0\r\n\r\n"))
    with contextlib.closing(server):
        dialogues(server, http_dialogues, lambda where: asked(where, next(gets)).startswith(b"HTTP/1.0 200 OK"))
