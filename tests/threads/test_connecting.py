"""Connecting to a store's server that is not there yet, or not any more: torch's C++ prints nothing of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inprocess import store
from inprocess.exception import StoreLost
from tests.harness.ports import ReservedPort


def test_where_nothing_listens_torch_is_not_asked(capfd: pytest.CaptureFixture[str]) -> None:
    """Its client would print a C++ stack for each attempt."""
    with ReservedPort() as port, pytest.raises(StoreLost, match=f"nothing listens at 127.0.0.1:{port.number}"):
        store.connect_to("127.0.0.1", port.number, 1.5)
    assert capfd.readouterr().err == ""


def test_a_server_that_comes_later(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    looked, look = threading.Semaphore(0), store._listens

    def listens(*args: Any) -> bool:
        found = look(*args)
        looked.release()
        return found

    monkeypatch.setattr(store, "_listens", listens)
    with ReservedPort() as port, ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(store.connect_to, "127.0.0.1", port.number, 30.0)
        for _ in range(3):
            assert looked.acquire(timeout=20)
        server = store.serve("127.0.0.1", port.number)
        connection = connecting.result(30)
        connection.set("a", "1")
        assert server.get("a") == b"1"
        del connection, server, connecting
    assert "frame #" not in capfd.readouterr().err


def test_a_probe_that_meets_itself_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may choose the very port for the probe that it connects to."""

    class Itself(store.socket.socket):
        def connect_ex(self, where: Any) -> int:
            self.bind(where)
            return super().connect_ex(where)

    with ReservedPort() as port:
        number = port.number
    monkeypatch.setattr(store.socket, "socket", Itself)
    assert not store._listens(store.socket.AF_INET, ("127.0.0.1", number), 1.0)
