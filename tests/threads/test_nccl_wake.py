"""NCCL's service threads are woken: a thread of the test's own in poll, a datagram socket with that name."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from inprocess.abort import AbortTorchDistributed, AbortTransformerEngine
from inprocess.collectives import nccl, nccl_wake
from inprocess.compose import Compose
from inprocess.state import FrozenState
from inprocess.system import clock, logs, procfs
from tests.threads import standins

Patch = pytest.MonkeyPatch
LOGGER = "inprocess.collectives.nccl_wake"
STATE = FrozenState(rank=0, world_size=1, initial_rank=0, initial_world_size=1)


@pytest.fixture(autouse=True)
def said_nothing() -> Iterator[None]:
    logs.once.cache_clear()
    yield
    logs.once.cache_clear()


@pytest.mark.parametrize("call", ["poll", "ppoll"])
@pytest.mark.parametrize("family", ["127.0.0.1", "::1"])
def test_a_thread_that_polls_is_woken(call: str, family: str) -> None:
    kind = socket.AF_INET6 if ":" in family else socket.AF_INET
    with socket.create_server((family, 0), family=kind) as server:
        server.setblocking(False)
        with standins.polling(server.fileno(), milliseconds=500, call=call) as thread:
            nccl_wake.until(thread.over.wait)
        assert thread.woken
        server.accept()[0].close()


def test_on_another_architecture(monkeypatch: Patch) -> None:
    """The numbers of aarch64, which has no poll."""
    read = procfs.read

    def translated(path: str) -> str:
        return read(path).replace("271 ", "73 ", 1) if path.endswith("syscall") else read(path)

    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(procfs, "read", translated)
    with standins.listener() as server, standins.polling(server.fileno(), call="ppoll") as thread:
        assert nccl_wake.wake() == 1
        assert thread.over.wait(10)
    assert thread.woken


def unix() -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(f"\0/tmp/listener-{os.getpid()}")
    made.listen()
    made.setblocking(False)
    return made


@contextlib.contextmanager
def connected() -> Iterator[socket.socket]:
    ours, theirs = standins.connection()
    with ours, theirs:
        yield ours


@pytest.mark.parametrize(
    ("entries", "milliseconds", "make"),
    [
        (64, 500, standins.listener),
        (65, 499, standins.listener),
        (65, 60_000, standins.listener),
        (65, 500, lambda: standins.listener(blocking=True)),
        (65, 500, unix),
        (65, 500, connected),
    ],
    ids=["few descriptors", "another time", "long", "it blocks", "of another family", "it does not listen"],
)
def test_others_are_left_alone(
    entries: int, milliseconds: int, make: Callable[[], AbstractContextManager[socket.socket]]
) -> None:
    with make() as last, standins.polling(last.fileno(), entries, milliseconds):
        assert nccl_wake.wake() == 0


def test_a_descriptor_that_is_closed_or_none() -> None:
    with standins.polling(-1):
        assert nccl_wake.wake() == 0
    assert not nccl_wake._connect_to(1_000_000)


def bound(name: bytes, kind: int = socket.SOCK_DGRAM) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, kind)
    made.bind(name)
    made.setblocking(False)
    return made


@pytest.mark.parametrize("padding", [0, 108], ids=["as it is", "as NCCL binds it"])
@pytest.mark.parametrize("abstract", [True, False])
def test_a_datagram_socket_of_that_name(abstract: bool, padding: int, tmp_path: Path) -> None:
    """NCCL binds an abstract name, with the whole of the address: the rest is zeros, and part of the name."""
    folder = b"\0tmp" if abstract else os.fsencode(tmp_path)
    number = os.getpid()
    with (
        bound((folder + b"/nccl-socket-%d-1f" % number).ljust(padding if abstract else 0, b"\0")) as theirs,
        bound(folder + b"/socket-%d" % number) as other,
    ):
        assert nccl_wake.wake() == 1
        assert theirs.recv(8) == b"\0"
        with pytest.raises(BlockingIOError):
            other.recv(8)


def test_a_listener_of_that_name_is_left_alone() -> None:
    with bound(b"\0tmp/nccl-socket-%d-2f" % os.getpid(), socket.SOCK_STREAM) as theirs:
        theirs.listen()
        assert not list(nccl_wake._datagram_names())


def test_another_processs_is_not_spoken_to() -> None:
    """The kernel lists the names of all processes."""
    reader, writer = os.pipe()
    ready_reader, ready = os.pipe()
    child = os.fork()
    if not child:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as theirs:
            theirs.bind(f"\0tmp/nccl-socket-{os.getpid()}-2".ljust(108, "\0"))
            os.write(ready, b"x")
            os.read(reader, 1)
            theirs.setblocking(False)
            try:
                theirs.recv(8)
            except BlockingIOError:
                os._exit(0)
            os._exit(1)
    os.read(ready_reader, 1)
    spoken_to = nccl_wake.wake()
    os.write(writer, b"x")
    assert os.waitpid(child, 0)[1] == 0
    standins.close([reader, writer, ready_reader, ready])
    assert spoken_to == 0


def refuse(path: str) -> str:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("what", "value", "words"),
    [
        ("inprocess.collectives.nccl_wake.procfs.platform.machine", lambda: "riscv64", "riscv64"),
        ("inprocess.collectives.nccl_wake.procfs.read", refuse, "Permission denied"),
    ],
)
def test_where_the_kernel_does_not_tell_it_is_said_once(
    monkeypatch: Patch, caplog: pytest.LogCaptureFixture, what: str, value: Any, words: str
) -> None:
    monkeypatch.setattr(what, value)
    with standins.listener() as server, standins.polling(server.fileno()), caplog.at_level(logging.INFO, LOGGER):
        assert [nccl_wake.wake(), nccl_wake.wake()] == [0, 0]
    assert caplog.text.count("NCCL's service threads cannot be found") == 1
    assert words in caplog.text
    assert "nccl_wake=False" in caplog.text


def test_it_ends_also_where_an_abort_does_not(monkeypatch: Patch) -> None:
    now = [0.0]

    def never(seconds: float) -> bool:
        now[0] += seconds
        return False

    looks: list[float] = []
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    monkeypatch.setattr(nccl_wake, "wake", lambda: looks.append(now[0]))
    nccl_wake.until(never)
    assert looks[0] == nccl_wake.FIRST_PAUSE_S
    assert nccl_wake.WAKE_LIMIT_S - 2 * nccl_wake.MAX_PAUSE_S < looks[-1] < nccl_wake.WAKE_LIMIT_S


# --- in the ladder ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wake", "used", "woken"), [(True, True, True), (False, True, False), (True, False, False)])
def test_beside_the_aborts(group: None, monkeypatch: Patch, wake: bool, used: bool, woken: bool) -> None:
    """An abort that waits for its thread, as NCCL's does; only where NCCL is in use, and the user wants it."""
    monkeypatch.setattr(nccl, "is_used_by", lambda group: used)
    with standins.listener() as server, standins.polling(server.fileno()) as thread:
        monkeypatch.setattr(dist.ProcessGroup, "abort", lambda group: thread.over.wait(30 if woken else 0.2))
        AbortTorchDistributed(nccl_wake=wake)(STATE)
    assert thread.woken is woken


# --- beside the program's own shutdown ----------------------------------------------------------------------------


def test_a_shutdown_wakes_only_who_waits_for_datagrams() -> None:
    """The other thread is told by NCCL itself, and would wait for what the connection has to say."""
    over = threading.Event()
    with (
        bound((b"\0tmp/nccl-socket-%d-3f" % os.getpid()).ljust(108, b"\0")) as theirs,
        standins.listener() as server,
        standins.polling(server.fileno()) as thread,
    ):
        theirs.settimeout(30)
        waker = threading.Thread(target=nccl_wake.beside_shutdown, args=(over.wait,))
        waker.start()
        assert theirs.recv(8) == b"\0"
        over.set()
        waker.join(30)
    assert not thread.woken


def test_a_long_shutdown_is_no_flood_of_messages(monkeypatch: Patch) -> None:
    now = [0.0]

    def never(seconds: float) -> bool:
        now[0] += seconds
        return False

    sent: list[float] = []
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    monkeypatch.setattr(nccl_wake, "wake_receivers", lambda: sent.append(now[0]))
    nccl_wake.beside_shutdown(never)
    assert len(sent) < 10


@pytest.mark.parametrize(
    ("hook", "wanted"),
    [
        (AbortTorchDistributed(), True),
        (AbortTorchDistributed(nccl_wake=False), False),
        (Compose(AbortTransformerEngine(), AbortTorchDistributed()), True),
        (Compose(AbortTransformerEngine(), AbortTorchDistributed(nccl_wake=False)), False),
        (lambda state: state, False),
        (None, False),
    ],
)
def test_whether_it_is_wanted(hook: Any, wanted: bool) -> None:
    assert nccl_wake.is_wanted(hook) is wanted
