"""Whatever a rank waits for in Gloo, the abort ends it at once and leaves nothing; other sockets are not touched."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from inprocess.collectives import gloo
from inprocess.collectives.dead_connections import dead_connections
from inprocess.collectives.gloo import shutdown_gloo_connections
from inprocess.system import procfs
from tests.threads import abort_ranks
from tests.threads.abort_ranks import Rank, Ranks
from tests.threads.groups import Groups

RELEASED_WITHIN = 5.0  # seconds, a ceiling: the operations' own timeout is 60


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "scenario",
    [
        abort_ranks.all_reduce,
        abort_ranks.unnamed_threads,
        abort_ranks.barrier,
        abort_ranks.receive,
        abort_ranks.asynchronous,
        abort_ranks.sub_groups,
    ],
)
def test_collective_is_released(scenario: Callable[[Rank], None], world_size: int) -> None:
    with Ranks(world_size, scenario) as ranks:
        check_released(ranks)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("scenario", [abort_ranks.initialize, abort_ranks.make_group])
def test_wait_in_the_store_is_released_with_its_server(scenario: Callable[[Rank], None], world_size: int) -> None:
    with Ranks(world_size, scenario, own_servers=True) as ranks:
        check_released(ranks, close_store=True)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("scenario", [abort_ranks.half_connected, abort_ranks.half_connected_sub_group])
def test_wait_for_a_peer_to_connect_is_released(scenario: Callable[[Rank], None], world_size: int) -> None:
    """Who waits and who connects is decided by the port numbers, so it is tried several times."""
    cycles = 5
    with Ranks(world_size, scenario, cycles) as ranks:
        for cycle in range(cycles):
            check_released_once(ranks, cycle, close_store=False)
        check_again(ranks, world_size)


def check_released(ranks: Ranks, close_store: bool = False) -> None:
    check_released_once(ranks, 0, close_store)
    check_again(ranks, len(ranks._processes))


def check_released_once(ranks: Ranks, cycle: int, close_store: bool) -> None:
    ranks.expect("waiting")
    if close_store:
        ranks.close_store(cycle)
    ranks.order()
    released = ranks.expect("released")
    aborted = ranks.expect("aborted")
    ranks.order()
    left = ranks.expect("left")
    for (how, seconds), (_, ladder) in zip(released, aborted, strict=True):
        print(f"released after {seconds * 1e3:.1f} ms, ladder {ladder * 1e3:.1f} ms: {how[:60]}")
    assert max(seconds for _, seconds in released) < RELEASED_WITHIN
    assert all(how != "returned" for how, _ in released[:-1]), "a rank's operation succeeded, so nothing was released"
    assert [threads for (threads, _), _ in left] == [0] * len(left)


def check_again(ranks: Ranks, world_size: int) -> None:
    assert [value for value, _ in ranks.expect("again")] == [world_size] * world_size
    ranks.order()


def test_fifty_cycles_leave_no_threads_and_descriptors() -> None:
    cycles = 50
    with Ranks(2, abort_ranks.all_reduce, cycles) as ranks:
        descriptors = []
        for _ in range(cycles):
            ranks.expect("waiting")
            ranks.order()
            ranks.expect("released")
            ranks.expect("aborted")
            ranks.order()
            left = [value for value, _ in ranks.expect("left")]
            assert [threads for threads, _ in left] == [0, 0]
            descriptors.append([count for _, count in left])
        check_again(ranks, 2)
    # the first cycle opens what the process keeps
    assert descriptors[1] == descriptors[-1]


# --- which sockets ------------------------------------------------------------------------------------------------


def release(groups: Groups) -> tuple[int, float]:
    """Shut down while one rank waits; answers how many connections it were, and the seconds until it was released."""
    work = groups[0].allreduce([torch.ones(1)], dist.AllreduceOptions())
    begin = time.monotonic()
    count = shutdown_gloo_connections()
    with pytest.raises(RuntimeError):
        work.wait()
    seconds = time.monotonic() - begin
    assert seconds < RELEASED_WITHIN
    return count, seconds


def test_both_ends_of_every_connection(groups: Groups) -> None:
    count, seconds = release(groups)
    print(f"released after {seconds * 1e3:.2f} ms")
    assert count in (1, 2)  # both ends are here, but Gloo may close the second on the end of the first
    assert shutdown_gloo_connections() == 0


def test_without_gloo_there_is_nothing_to_do() -> None:
    assert shutdown_gloo_connections(4) == 0


def test_users_socketpair_stays_usable(groups: Groups) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        release(groups)
        ours.sendall(b"ping")
        assert theirs.recv(4) == b"ping"


def test_users_http_connection_stays_open(groups: Groups) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = str(self.client_address[1]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        connection.request("GET", "/")
        first = connection.getresponse().read()
        release(groups)
        connection.request("GET", "/")
        assert connection.getresponse().read() == first  # the same port: the same connection
        connection.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_users_epoll_loop_goes_on(groups: Groups) -> None:
    """A thread of the program waits on an epoll instance of its own, as Gloo's does."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    got: list[bytes] = []

    def loop() -> None:
        with select.epoll() as epoll:
            epoll.register(server, select.EPOLLIN)
            while not got:
                epoll.poll()
                got.append(server.recv(10))

    thread = threading.Thread(target=loop)
    thread.start()
    with listener, client, server:
        release(groups)
        client.sendall(b"still here")
        thread.join(10)
        assert got == [b"still here"]


def test_number_that_was_given_to_another_file_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between looking and shutting down, Gloo closes its socket and the program opens one under the same number."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inode = os.fstat(ours.fileno()).st_ino
        monkeypatch.setattr(gloo, "_gloo_descriptors", lambda: iter([(ours.fileno(), inode + 1)]))
        assert shutdown_gloo_connections() == 0
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"
        monkeypatch.setattr(gloo, "_gloo_descriptors", lambda: iter([(ours.fileno(), inode)]))
        assert shutdown_gloo_connections() == 1
        assert ours.recv(1) == b""


def test_connections_stay_open_for_the_peers_until_all_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo closes its descriptor when it is told; the peer must not see that while it may still be writing."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with theirs:
        descriptor = (ours.fileno(), os.fstat(ours.fileno()).st_ino)
        monkeypatch.setattr(gloo, "_gloo_descriptors", lambda: iter([descriptor]))
        dead_connections.begin()
        assert shutdown_gloo_connections() == 1
        ours.close()
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        dead_connections.end()
        assert theirs.recv(1) == b""


def test_closed_and_strange_descriptors_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file:
        inode = os.fstat(file.fileno()).st_ino
        monkeypatch.setattr(gloo, "_gloo_descriptors", lambda: iter([(file.fileno(), inode), (1_000_000, 1)]))
        assert shutdown_gloo_connections() == 0


def test_unreadable_proc_is_explained(
    groups: Groups, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = procfs.read
    gloo._warn_of_timeouts.cache_clear()

    def refuse(path: str) -> str:
        if "/fdinfo/" in path or path.endswith("/syscall"):
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(procfs, "read", refuse)
    with caplog.at_level(logging.WARNING, "inprocess.collectives.gloo"):
        assert shutdown_gloo_connections() == 0
        assert shutdown_gloo_connections() == 0
    assert caplog.text.count("A pending Gloo collective") == 1


def test_listening_socket_is_never_shut(groups: Groups) -> None:
    """Gloo ends the process when accepting fails."""
    release(groups)
    listening = 0
    for descriptor, inode in gloo._gloo_descriptors():
        connection = procfs.copy_of(descriptor, inode)
        with connection or contextlib.nullcontext():
            if connection is not None and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening += 1
                socket.create_connection(connection.getsockname()).close()
    assert listening == 2
