"""The public store classes as a program makes them by itself: the arguments and the habits of the established API."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from inprocess.stores import tcp as store
from inprocess.testing.ports import ReservedPort

PATIENCE = timedelta(seconds=20)
#: until its standard input ends
SERVE = """
import sys
from inprocess import store
server = store.serve("127.0.0.1", 0)
print(server.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def port() -> Iterator[int]:
    with ReservedPort() as reserved:
        yield reserved.number


def test_the_first_rank_serves(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    first = store.TCPStore()
    monkeypatch.setenv("RANK", "1")
    second = store.TCPStore(None, None, 2, PATIENCE)
    second.set("key", "value")
    assert first.get("key") == b"value"
    assert second.timeout == PATIENCE
    del second  # before its server


def test_the_first_rank_is_a_client_where_somebody_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another process."""
    monkeypatch.setenv("RANK", "0")
    with subprocess.Popen([sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin and server.stdout
        try:
            port = int(server.stdout.readline())
            client = store.TCPStore("127.0.0.1", port, timeout=PATIENCE)
            client.set("key", "value")
            assert client.get("key") == b"value"
            with pytest.raises(RuntimeError):
                store.TCPStore("127.0.0.1", port, timeout=PATIENCE, is_master=True)
            del client
        finally:
            server.stdin.close()


@pytest.mark.parametrize("rank", [None, "1"])
def test_others_wait_for_the_server(
    rank: str | None, port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(RuntimeError):
        store.TCPStore("127.0.0.1", port, timeout=timedelta(milliseconds=50))
    capfd.readouterr()  # torch's stack


def test_wait_for_workers(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has a store before all have."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(store.TCPStore, "127.0.0.1", port, 2, PATIENCE, True, is_master=True)
        client = store.TCPStore("127.0.0.1", port, timeout=PATIENCE, wait_for_workers=True, use_libuv=False)
        client.set("key", "value")
        assert made.result(20).get("key") == b"value"
    del client


def test_a_file_store_by_name(tmp_path: Path) -> None:
    """With a number of processes the last one takes the file away."""
    file = tmp_path / "store"
    first, second = store.FileStore(str(file), 2), store.FileStore(file_name=str(file), world_size=2, timeout=PATIENCE)
    second.set("key", "value")
    assert (first.get("key"), second.timeout) == (b"value", PATIENCE)
    del first, second
    assert not file.exists()


def test_a_prefix_by_number(tmp_path: Path) -> None:
    base = store.FileStore(str(tmp_path / "store"))
    store.PrefixStore(3, base).set("key", "value")
    assert store.PrefixStore("3", base).get("key") == b"value"
