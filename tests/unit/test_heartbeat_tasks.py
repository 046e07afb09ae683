"""What the thread that sends heartbeats does between two of them."""

from __future__ import annotations

import pytest

from inprocess.monitor import heartbeat_tasks as module
from inprocess.monitor.heartbeat_tasks import HeartbeatTasks
from inprocess.protocol.ops import Add, Pause, Set, Verb


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 0.0, 0.5, 1.0])
    monkeypatch.setattr(module.clock, "monotonic", lambda: next(moments))


def beats() -> Verb[str]:
    assert (yield Add("beat", 1)) == 7
    assert (yield Pause(1.0)) is None
    yield Add("beat", 1)
    return "over"


def interrupt() -> Verb[None]:
    assert (yield Set("outcome", "x")) is None


def test_what_is_asked_is_done_within_a_pause() -> None:
    tasks = HeartbeatTasks()
    tasks.ask(interrupt())
    verb = tasks.within(beats())
    assert next(verb) == Add("beat", 1)
    assert verb.send(7) == Set("outcome", "x")
    tasks.ask(interrupt())
    assert verb.send(None) == Set("outcome", "x")
    assert verb.send(None) == Add("beat", 1)
    with pytest.raises(StopIteration) as end:
        verb.send(8)
    assert end.value.value == "over"
