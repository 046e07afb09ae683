"""A node's part in the rendezvous, with a stand-in for torch's handler and its store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from inprocess.launcher import meeting
from inprocess.launcher.generation import Generation
from inprocess.launcher.meeting import NodeRendezvous


class Silent:
    """The store of a launcher that was stopped: it neither answers nor refuses. Also the handler's part of it."""

    def __init__(self) -> None:
        self.ends = threading.Event()
        self.asked: list[str] = []
        self._came = threading.Semaphore(0)

    def __getattr__(self, name: str) -> Callable[..., bool]:
        def wait(*_: object) -> bool:
            self.asked.append(name)
            self._came.release()
            self.ends.wait()
            if name != "stop_heartbeats":
                raise RuntimeError("the store is gone")
            return True

        return wait

    def is_asked(self) -> bool:
        """Wait for the next question."""
        return self._came.acquire(timeout=30)


@pytest.fixture
def silent() -> Iterator[Silent]:
    made = Silent()
    yield made
    made.ends.set()


def node(store: Any, interval: float = 0.1, patience: float = 15.0, shutdown: Callable[[], object] = bool) -> Any:
    """The first of two nodes, after they have met."""
    handler = SimpleNamespace(
        get_backend=lambda: "c10d",
        num_nodes_waiting=lambda: 0,
        shutdown=shutdown,
        _stop_heartbeats=getattr(store, "stop_heartbeats", lambda: None),
    )
    made: Any = NodeRendezvous(
        lambda: handler,  # type: ignore[arg-type, return-value]
        endpoint=None,
        towards="localhost",
        nodes=(1, 2),
        size=1,
        local_addr=None,
        master_addr=None,
        preferred_rank=-1,
        join=True,
        interval=interval,
        patience=patience,
        join_timeout=30.0,
    )
    made._root, made._met = store, Generation(None, 0, 2, 0, "127.0.0.1", 1)
    return made


SAYS: dict[str, Callable[[Any], object]] = {
    "left": lambda node: node.say_left(),
    "done": lambda node: node.say_done(),
    "over": lambda node: node.say_over("why"),
    "restart": lambda node: node.want_restart("why"),
    "open": lambda node: node.open(),
    "close": lambda node: node.close(shutdown=True),
}


@pytest.mark.parametrize("says", SAYS.values(), ids=SAYS)
def test_nobody_waits_for_a_store_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, silent: Silent, says: Callable[[Any], object]
) -> None:
    monkeypatch.setattr(meeting, "ANSWER_S", 0.1)
    one = node(silent, shutdown=silent.shutdown)
    says(one)
    assert one.lost and silent.is_asked() and silent.is_asked()
    assert silent.asked[1] == "stop_heartbeats"  # torch's, which may take as long
    says(one)
    one.close(shutdown=True)
    assert len(silent.asked) == 2  # it is not asked again


def test_signs_of_life_come_more_often_than_the_workers_are_looked_at() -> None:
    """With --monitor-interval 3600 each of two healthy nodes counted as lost."""
    store = HashStore()
    one = node(store, interval=3600.0)
    one.settle(0)
    try:
        store.wait([f"alive/{one._me}"])
    finally:
        one.rest()
