"""Whose constructor gives up early: that of a store which the main thread makes while its standstill counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from inprocess.collectives import store_clients
from inprocess.collectives.store_clients import DEFAULT, StoreClients


class Store:
    """As torch's."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = DEFAULT,
        wait_for_workers: bool = True,
    ) -> None:
        self.host_name, self.wait_for_workers = host_name, wait_for_workers
        self.connecting = self.timeout = timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float | None]]:
    """What the main thread may take now; 20 s."""
    monkeypatch.setattr(store_clients.bindings, "TCPStore", Store)
    before, seconds, own = Store.__init__, list[float | None]([20.0]), StoreClients()
    own.begin(lambda: seconds[0])
    yield seconds
    own.end()
    assert Store.__init__ is before


@pytest.mark.parametrize(
    ("seconds", "given", "connecting"),
    [
        (20.0, {}, 16.0),
        (20.0, {"timeout": timedelta(seconds=90)}, 16.0),
        (20.0, {"timeout": timedelta(seconds=3)}, 3.0),
        (2.0, {}, 1.0),
        (None, {}, 300.0),
    ],
)
def test_how_long_it_connects(
    allowed: list[float | None], seconds: float | None, given: dict[str, Any], connecting: float
) -> None:
    """Afterwards it waits for keys as long as was said."""
    allowed[0] = seconds
    store = Store("host", 1, None, False, **given, wait_for_workers=False)
    assert store.connecting == timedelta(seconds=connecting)
    assert store.timeout == given.get("timeout", DEFAULT)
    assert (store.host_name, store.wait_for_workers) == ("host", False)


def test_other_threads_take_their_time(allowed: list[float | None]) -> None:
    """As those of this library, which may wait longer for a store than the function may stand still."""
    found: list[Store] = []
    thread = threading.Thread(target=lambda: found.append(Store("host", 1)))
    thread.start()
    thread.join()
    assert found[0].connecting == DEFAULT


def test_torch_says_what_is_wrong(allowed: list[float | None]) -> None:
    with pytest.raises(TypeError, match="host_name"):
        Store(port=1)  # type: ignore[call-arg]
    assert Store("host", 1, timeout=None).connecting is None  # type: ignore[arg-type]
