"""The harness by itself, without the library: it must see every leftover, and never wait longer than its deadline."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from inprocess.stores import serving
from tests.harness import At, Deadline, Exit, Hang, HoldGIL, Kill, Raise, ReservedPort, Stop, Uncopyable, When

from . import targets


def test_reserved_port_is_free_for_torch_and_nobody_else():
    with ReservedPort() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port.number))
        server = serving.serve("127.0.0.1", port.number)
        server.set("key", "value")
        assert server.get("key") == b"value"
        del server


def test_reserved_ports_differ():
    ports = [ReservedPort() for _ in range(50)]
    assert len({port.number for port in ports}) == 50
    for port in ports:
        port.close()


def test_ranks_have_their_environment_and_preloaded_modules(launch):
    (rank,) = launch(targets.preloaded, 1, env={"EXTRA": "x", "LOCAL_RANK": None}).wait()
    assert rank.value["modules"] == ["torch", "tests.ranks.targets", "pytest"]
    assert "EXTRA" in rank.value["variables"]
    assert "LOCAL_RANK" not in rank.value["variables"]


def test_plain_torch_leaves_nothing(launch):
    """Proves that a leftover after a wrapped call is the library's, not torch's."""
    with ReservedPort() as port:
        server = serving.serve("127.0.0.1", port.number)
        env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port.number)}
        assert launch(targets.group_only, 2, env=env).wait().values == [0, 1]
        del server


def test_events_values_and_pids(launch):
    run = launch(targets.unwrapped, 3)
    pids = run.pids
    ranks = run.wait()
    assert [rank.pid for rank in ranks] == pids
    assert [rank.entries(-1) for rank in ranks] == [[(0, 0, 3)], [(0, 1, 3)], [(0, 2, 3)]]
    assert ranks.values == [{"rank": n, "environment": [n, 3]} for n in range(3)]
    assert not os.path.exists(run._folder)


@pytest.mark.parametrize(
    ("fault", "exitcode"),
    [
        (Kill(), -signal.SIGKILL),
        (Kill(signal.SIGTERM), -signal.SIGTERM),
        (Kill(signal.SIGSEGV), -signal.SIGSEGV),
        (Exit(5), 5),
    ],
)
def test_deadly_faults(launch, fault, exitcode):
    ranks = launch(targets.unwrapped, 2, faults={At(rank=1, step=2, call=-1): fault}).wait()
    assert ranks.exitcodes == [0, exitcode]
    assert not ranks[1].done


def test_exceptions_come_back_as_text(launch):
    faults = {At(0, step=0, call=-1): Raise(Uncopyable, "zero"), At(1, step=1, call=-1): Raise(SystemExit)}
    ranks = launch(targets.unwrapped, 2, faults=faults).wait()
    assert ranks.exceptions == ["Uncopyable", "SystemExit"]
    assert ranks[0].message == "zero"
    assert "faults.py" in ranks[0].trace
    assert ranks.exitcodes == [0, 0]


def test_a_fault_waits_for_the_others(launch):
    faults = {At(1, step=1, call=-1): Raise(ValueError, "late", when=When("leave", 2))}
    ranks = launch(targets.unwrapped, 3, faults=faults).wait()
    fault = ranks[1].of("fault")[0]["t"]
    assert all(ranks[n].of("leave")[0]["t"] < fault for n in (0, 2))


def test_leftovers_are_seen(launch):
    with pytest.raises(AssertionError) as caught:
        launch(targets.leave_things, 1, args={"settle": 0.5}).wait()
    text = str(caught.value)
    for word in ("descriptor", "socket", "variable LEFT", "handler of signal 12", "thread", "process"):
        assert f"{word}" in text


def test_escaped_daemon_is_waited_for(launch):
    launch(targets.leave_daemon, 1, args={"seconds": "0.3"}).wait()


def test_escaped_daemon_that_stays_is_killed_and_named(launch):
    run = launch(targets.leave_daemon, 1, args={"seconds": "100"})
    run.wait_event("ended")
    with pytest.raises(AssertionError, match=r"still running: pid \d+: S sleep 100"):
        run.wait(1)


@pytest.mark.parametrize("fault", [Hang("sleep"), Hang("recv"), HoldGIL(), Stop()], ids=repr)
def test_deadline_shows_stacks_and_kills(launch, fault):
    run = launch(targets.unwrapped, 2, faults={At(rank=1, step=1, call=-1): fault})
    run.wait_event("fault")
    start = time.monotonic()
    with pytest.raises(Deadline) as caught:
        run.wait(1)
    text = str(caught.value)
    assert "faults.py" in text, "the stack of the hanging rank"
    assert "exit code -6" in text
    assert time.monotonic() - start < 10
