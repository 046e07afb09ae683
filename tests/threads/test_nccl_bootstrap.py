"""Which connections are taken for those of NCCL's bootstrap, and when; connections of the test's own stand for them."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from inprocess.call import parts
from inprocess.collectives import groups, nccl, nccl_bootstrap
from inprocess.collectives.nccl_bootstrap import Bootstrap
from inprocess.system import procfs
from inprocess.system.heap import heap
from tests.harness.etcd import ETCD, MISSING, EtcdCluster
from tests.threads import neighbours, standins
from tests.threads.neighbours import NEIGHBOURS, in_the_bootstrap

Patch = pytest.MonkeyPatch
LOGGER = "inprocess.collectives.nccl_bootstrap"


@pytest.fixture
def bootstrap(monkeypatch: Patch) -> Iterator[Bootstrap]:
    """One that may end what begins from now on."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    own = Bootstrap()
    own.begin()
    own.allowed = True
    yield own
    own.end()


@pytest.fixture
def pair() -> Iterator[list[int]]:
    """The two ends of one of its connections. The fixtures of a test are made from left to right."""
    descriptors = [end.detach() for end in standins.connection()]
    yield descriptors
    standins.close(descriptors)


# --- what must never be ended -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_what_belongs_to_others_goes_on(name: str) -> None:
    neighbours.check(NEIGHBOURS[name])


@pytest.mark.skipif(not ETCD, reason=MISSING)
def test_etcds_goes_on(tmp_path: Path) -> None:
    cluster = EtcdCluster(tmp_path)
    try:
        neighbours.check(lambda: neighbours.etcd(cluster.endpoints))
    finally:
        cluster.close()


def test_grpcs_goes_on() -> None:
    """In a process of its own: gRPC's threads stay, and forbid forks."""
    pytest.importorskip("grpc", reason="the package grpcio is not installed")
    command = [sys.executable, "-m", "tests.threads.neighbours", "grpc"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "it went on\n", done.stderr


def test_what_was_there_before_the_iteration(pair: list[int], bootstrap: Bootstrap) -> None:
    with in_the_bootstrap():
        assert bootstrap.cut() == 0
    assert all(map(standins.is_open, pair))


def test_pythons_that_were_opened_before_the_function_began(monkeypatch: Patch) -> None:
    """By a hook, after the iteration had begun: the search for Python's sockets does not see what the heap froze."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    heap.begin()
    parts.bootstrap.begin()
    ours, theirs = standins.connection()
    try:
        for part in parts.CORE:
            part.function_begins()
        parts.bootstrap.allowed = True
        with ours, theirs, in_the_bootstrap():
            assert parts.bootstrap.cut() == 0
            assert standins.is_open(ours.fileno())
    finally:
        parts.bootstrap.end()
        heap.end()


def test_a_number_that_was_given_to_another_socket(bootstrap: Bootstrap, pair: list[int], monkeypatch: Patch) -> None:
    """While the library looks, the bootstrap closes its socket, and the program opens one under the same number."""
    inodes = {os.fstat(descriptor).st_ino: descriptor for descriptor in pair}
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def replace(found: dict[int, int]) -> dict[int, int]:
            os.dup2(ours.fileno(), pair[0])
            return found

        monkeypatch.setattr(nccl_bootstrap, "_without_pythons", replace)
        with in_the_bootstrap():
            assert bootstrap.cut() == len(inodes) - 1
        theirs.sendall(b"x")
        assert ours.recv(1) == b"x"


def test_a_default_timeout_of_the_programs_changes_no_socket(bootstrap: Bootstrap) -> None:
    """Python makes a socket that it wraps non-blocking then, for all who have it."""
    ours, theirs = standins.connection()
    descriptor = ours.detach()
    os.set_blocking(descriptor, True)
    socket.setdefaulttimeout(5)
    try:
        with in_the_bootstrap(), theirs:
            assert bootstrap.cut() == 0
        assert os.get_blocking(descriptor)
    finally:
        socket.setdefaulttimeout(None)
        os.close(descriptor)


# --- when it is looked for ----------------------------------------------------------------------------------------


def is_cut(bootstrap: Bootstrap, pair: list[int]) -> bool:
    count = bootstrap.cut()
    assert count in (0, 2)
    assert all(standins.is_open(descriptor) is not bool(count) for descriptor in pair)
    return bool(count)


@pytest.mark.parametrize("name", ["init_process_group", "new_group", "split_group", "_new_process_group_helper"])
def test_while_a_group_is_made(bootstrap: Bootstrap, pair: list[int], name: str) -> None:
    with in_the_bootstrap(name):
        assert is_cut(bootstrap, pair)


def test_not_while_nobody_makes_one(bootstrap: Bootstrap, pair: list[int]) -> None:
    assert not is_cut(bootstrap, pair)


def test_not_where_the_abort_hook_does_not_want_it(bootstrap: Bootstrap, pair: list[int]) -> None:
    bootstrap.allowed = False
    with in_the_bootstrap():
        assert not is_cut(bootstrap, pair)


def test_not_after_the_call(bootstrap: Bootstrap, pair: list[int]) -> None:
    bootstrap.end()
    bootstrap.allowed = True
    with in_the_bootstrap():
        assert not is_cut(bootstrap, pair)


def test_not_where_torch_has_no_nccl(monkeypatch: Patch, pair: list[int]) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    own = Bootstrap()
    own.begin()
    own.allowed = True
    assert not own.is_needed()
    with in_the_bootstrap():
        assert not is_cut(own, pair)


class Group:
    """One that has begun so many collectives."""

    def __init__(self, begun: int | None) -> None:
        self._begun = begun

    def _get_sequence_number_for_group(self) -> int:
        if self._begun is None:
            raise RuntimeError("this backend does not count")
        return self._begun


@pytest.mark.parametrize(
    ("name", "begun", "cut"),
    [
        ("all_reduce", [1], True),
        ("all_reduce", [7], False),
        ("all_reduce", [7, 0], True),
        ("all_reduce", [None], True),
        ("all_reduce", [], True),
        ("isend", [7], True),
        ("batch_isend_irecv", [7], True),
    ],
)
def test_in_a_first_collective(
    bootstrap: Bootstrap, pair: list[int], monkeypatch: Patch, name: str, begun: list[int | None], cut: bool
) -> None:
    """A group makes its communicator with the first; and for each rank it sends to. After the abort none is known."""
    monkeypatch.setattr(groups, "current", lambda: [Group(each) for each in begun])
    monkeypatch.setattr(nccl, "is_used_by", lambda group: True)
    with in_the_bootstrap(name):
        assert is_cut(bootstrap, pair) is cut


@pytest.mark.parametrize(
    ("file", "waits"),
    [("_functional_collectives.py", True), ("../autograd/graph.py", True), ("checkpoint/filesystem.py", False)],
)
def test_code_that_waits_for_other_ranks(bootstrap: Bootstrap, pair: list[int], file: str, waits: bool) -> None:
    """In a backward pass DistributedDataParallel may do its first collective."""
    with in_the_bootstrap("function", file):
        assert is_cut(bootstrap, pair) is waits


def test_in_a_first_collective_of_compiled_code(bootstrap: Bootstrap, pair: list[int], monkeypatch: Patch) -> None:
    """It calls torch's operators, and no function of torch.distributed."""
    monkeypatch.setattr(groups, "current", lambda: [Group(1)])
    monkeypatch.setattr(nccl, "is_used_by", lambda group: True)
    call: Any = standins.inside_torch("__call__", "../_ops.py")

    class Operator:
        def __init__(self, name: str) -> None:
            self._name = name

        def __call__(self) -> bool:
            return is_cut(bootstrap, pair)

    assert not call(Operator("aten::add"))
    assert call(Operator("_c10d_functional::all_reduce"))


# --- what is ended ------------------------------------------------------------------------------------------------


def test_a_listener_and_only_once(bootstrap: Bootstrap, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0's thread accepts until that; and what was ended is not counted again while it is still open."""
    descriptor = standins.listener().detach()
    errors: list[str] = []

    def accept() -> None:
        """Spinning, as NCCL's root does."""
        while not errors:
            standins.LIBC.accept(descriptor, None, None)
            if standins.last_error() != "EAGAIN":
                errors.append(standins.last_error())

    thread = threading.Thread(target=accept)
    thread.start()
    with in_the_bootstrap(), caplog.at_level(logging.INFO, LOGGER):
        assert [bootstrap.cut(), bootstrap.cut()] == [1, 0]
    thread.join(20)
    os.close(descriptor)
    assert errors == ["EINVAL"]
    assert [record.message.split()[-1] for record in caplog.records] == ["1"]


def test_a_connection_that_is_still_being_made(bootstrap: Bootstrap) -> None:
    """To a host that does not answer: the queue of its listener is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        visitors = [socket.socket() for _ in range(4)]
        for each in visitors:
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.connect_ex(server.getsockname())
        descriptors = [each.detach() for each in visitors]
        with in_the_bootstrap():
            assert bootstrap.cut() == 4
        standins.close(descriptors)


@pytest.mark.parametrize("what", ["/syscall", "/fdinfo/"])
def test_where_the_kernel_does_not_tell_nothing_is_ended(
    bootstrap: Bootstrap, pair: list[int], monkeypatch: Patch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    read = procfs.read

    def refuse(path: str) -> str:
        if what in path:
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(procfs, "read", refuse)
    with in_the_bootstrap(), select.epoll(), caplog.at_level(logging.WARNING, LOGGER):
        assert not is_cut(bootstrap, pair)
        assert not is_cut(bootstrap, pair)
    assert len(caplog.records) == 1
    assert "cannot be found ([Errno 13] Permission denied)" in caplog.text or "Permission denied" in caplog.text


def test_threads_that_nccl_leaves_are_counted(
    bootstrap: Bootstrap, pair: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Two of a communicator whose bootstrap failed; a thread that Python does not know stands for them."""
    with standins.native_thread(), caplog.at_level(logging.INFO, LOGGER):
        with in_the_bootstrap():
            assert is_cut(bootstrap, pair)
        bootstrap.begin()
        bootstrap.end()
    assert "1 threads of NCCL stay: the creation of their communicators was interrupted" in caplog.text


def test_a_thread_of_pythons_that_ends_is_not_taken_for_nccls(
    bootstrap: Bootstrap, pair: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: Patch
) -> None:
    """It leaves Python's table first, and the process some time later."""
    with in_the_bootstrap(), caplog.at_level(logging.INFO, LOGGER):
        assert is_cut(bootstrap, pair)
        others = [thread for thread in threading.enumerate() if "init_process_group" not in thread.name]
        monkeypatch.setattr(threading, "enumerate", lambda: others)
        bootstrap.begin()
        bootstrap.end()
    assert "threads of NCCL stay" not in caplog.text
