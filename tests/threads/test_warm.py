"""The launcher's side of warm workers, with processes that do what a warm worker should not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inprocess.heartbeats.modules import Modules
from inprocess.launcher import warm
from inprocess.launcher.warm import WarmWorkers

COMMAND = (sys.executable, "-u", "train.py", "--its", "argument")
MODULES = Modules((), (), {})
#: how each of them begins
BEGIN = """
import os, socket, sys
control = socket.socket(fileno=int(sys.argv[1]))
def take():
    control.send(b'{"ready": true}')
    return socket.recv_fds(control, 1 << 16, 2)[:2]
"""
#: it becomes a worker that writes down what it was given
GOOD = BEGIN + "data, (out, err) = take(); control.send(b'taken'); os.write(out, data + control.recv(9)); sys.exit(7)"
BAD = {
    "dies before it answers": "take()",
    # it hears nothing any more when it answers: one that dies later is a worker that has failed
    "dies after it answered": "take(); control.shutdown(socket.SHUT_RD); control.send(b'taken')",
    "says something else": "take(); control.send(b'token'); control.recv(9)",
    "does not answer": "take(); control.recv(9)",
}
ENV = {"PATH": os.environ["PATH"], "RANK": "3", "OMP_NUM_THREADS": "1"}
Begin = Callable[..., WarmWorkers]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Begin]:
    """`begin(program)`: a warm worker that runs this program."""
    made: list[WarmWorkers] = []

    def begin(program: str, number: int | None = 1) -> WarmWorkers:
        monkeypatch.setattr(warm, "CODE", program)
        monkeypatch.setattr(warm, "PAUSE_S", 0.0)
        made.append(WarmWorkers(number, (), (256, 512)))
        assert made[-1].take(COMMAND, ENV, None, None) is None  # the first start is cold
        made[-1].tend(None)
        assert not made[-1]._spares  # nobody knows yet what to import
        made[-1].tend(MODULES)
        return made[-1]

    yield begin
    for workers in made:
        workers.close()


def until(what: Callable[[], object], workers: WarmWorkers) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        workers.tend(MODULES)


def ready(workers: WarmWorkers) -> subprocess.Popen[bytes]:
    until(lambda: workers._spares and workers._spares[0].ready, workers)
    return workers._spares[0].process


def test_it_gets_what_is_its_own(begin: Begin, tmp_path: Path) -> None:
    workers = begin(GOOD)
    process = ready(workers)
    with open(tmp_path / "out", "wb") as out:
        assert workers.take(COMMAND, {**ENV, "RANK": "5", "LOCAL_RANK": "1"}, out, None) is process
    assert process.wait(20) == 7
    assert (tmp_path / "out").read_text() == '{"env": {"RANK": "5", "LOCAL_RANK": "1"}}go'


@pytest.mark.parametrize("what", BAD)
def test_one_that_does_not_become_a_worker(
    begin: Begin, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is ended before the worker is started cold."""
    monkeypatch.setattr(warm, "ANSWER_LIMIT_S", 0.2)
    workers = begin(BEGIN + BAD[what])
    process = ready(workers)
    assert workers.take(COMMAND, ENV, None, None) is None
    assert process.returncode is not None
    assert f"a warm worker (pid {process.pid}) does not answer" in caplog.text


@pytest.mark.parametrize(
    ("command", "env"),
    [
        ((*COMMAND, "more"), ENV),
        (COMMAND, {**ENV, "OMP_NUM_THREADS": "2"}),
        (COMMAND, {name: text for name, text in ENV.items() if name != "OMP_NUM_THREADS"}),
        (COMMAND, {**ENV, "MASTER_PORT": "1"}),
    ],
)
def test_another_start(begin: Begin, command: tuple[str, ...], env: dict[str, str]) -> None:
    """It would have read other variables, so it is of no use for the next one either."""
    workers = begin(GOOD)
    process = ready(workers)
    assert workers.take(command, env, None, None) is None
    assert process.returncode is not None
    assert ready(workers).pid != process.pid


@pytest.mark.parametrize("program", ["", "import sys; sys.exit(3)", BEGIN + "control.send(b'what?')"])
def test_they_end_while_they_import(begin: Begin, program: str, caplog: pytest.LogCaptureFixture) -> None:
    workers = begin(program)
    until(lambda: not workers._number, workers)
    assert "there are no warm workers from now on: 8 in a row" in caplog.text
    assert not workers._spares


def test_a_module_of_preload_that_cannot_be_imported(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, however many warm workers there are. Nobody noticed a wrong name."""
    why = '{"ready": true, "failed": {"my.modle": "ModuleNotFoundError: No module named my"}}'
    workers = begin(BEGIN + f"control.send(b'{why}'); control.recv(9)")
    for _ in range(2):
        ready(workers)
        workers.close()
    told = "--preload my.modle: a warm worker cannot import it: ModuleNotFoundError: No module named my"
    assert caplog.text.count(told) == 1


def test_an_import_that_hangs(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "IMPORT_LIMIT_S", 0.1)
    workers = begin(BEGIN + "control.recv(9)")
    process = workers._spares[0].process
    until(lambda: process.returncode is not None, workers)


def test_one_as_long_as_there_is_memory(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    left = [warm.ROOM_BYTES - 1]
    monkeypatch.setattr(warm.cgroup, "available_memory", lambda: (left[0], "the control group (container)"))
    monkeypatch.setattr(warm, "LOOK_S", 0.0)
    workers = begin(GOOD, None)
    workers.tend(MODULES)
    assert not workers._spares
    assert (
        caplog.text.count("is not started: the control group (container) has 4.0 GiB of memory available, 4 are") == 1
    )
    left[0] = warm.ROOM_BYTES
    workers.tend(MODULES)
    process = ready(workers)
    left[0] = warm.LEAST_BYTES
    workers.tend(MODULES)
    assert process.poll() is None
    left[0] -= 1
    workers.tend(MODULES)
    assert process.returncode is not None and not workers._spares
    assert "is ended: the control group (container) has 2.0 GiB of memory available, 2 are needed" in caplog.text


def test_the_memory_is_looked_at_now_and_then(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []
    monkeypatch.setattr(warm.cgroup, "available_memory", lambda: looks.append(True) or (0, "this host"))
    workers = begin(GOOD, None)
    for _ in range(5):
        workers.tend(MODULES)
    assert len(looks) == 1


def test_a_number_that_was_given_is_kept(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm.cgroup, "available_memory", lambda: (0, "this host"))
    ready(begin(GOOD, 1))


def test_none_can_be_started(begin: Begin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError("no process is left")

    monkeypatch.setattr(subprocess, "Popen", fail)
    workers = begin(GOOD)
    until(lambda: not workers._number, workers)
    assert "there are no warm workers from now on: 8 in a row" in caplog.text


SLOW = """
import socket, sys
from inprocess.system import clock
from inprocess.system.slow_imports import slow_imports
before, finders = (clock.monotonic(), clock.busy()), list(sys.meta_path)
with slow_imports(int(sys.argv[1])):
    import argparse, asyncio, decimal, email.message, fractions, http.client, statistics, unittest, xml.dom.minidom
assert sys.meta_path == finders
took, worked = clock.monotonic() - before[0], clock.busy() - before[1]
print(took / worked)
"""


@pytest.mark.parametrize("alive", [True, False])
def test_imports_in_the_background(alive: bool) -> None:
    """With a share of one processor, and only as long as there is somebody for whom they are."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if not alive:
            ours.close()
        command = [sys.executable, "-c", SLOW, str(theirs.fileno())]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()], timeout=60)
    if alive:
        assert float(found.stdout) > 2
    else:
        assert found.stdout == b""
