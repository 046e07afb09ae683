"""Connections that a program may have beside NCCL's, and that nobody may end: each is opened, and used once more.

``python -m tests.threads.neighbours grpc`` does so in a process of its own, which has nothing else to lose.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import http.client
import http.server
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from inprocess.collectives.nccl_bootstrap import Bootstrap
from tests.threads import standins

#: uses the connection once more; raises where that is not possible
Use = Callable[[], object]
TIMEOUT = timedelta(seconds=20)


# --- bare sockets -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def detached(keep: Callable[[int], contextlib.AbstractContextManager[object]]) -> Iterator[Use]:
    """A connection as the bootstrap's, of which only the descriptor is known here; ``keep`` says who waits for it."""
    ours, theirs = standins.connection()
    descriptor = ours.detach()
    try:
        with theirs, keep(descriptor):

            def use() -> None:
                theirs.sendall(b"x")
                assert os.read(descriptor, 1) == b"x"
                os.write(descriptor, b"y")
                assert theirs.recv(1) == b"y"

            yield use
    finally:
        os.close(descriptor)


def owned_by_python() -> contextlib.AbstractContextManager[Use]:
    """By an object over another descriptor of the same socket."""
    return detached(lambda descriptor: socket.socket(fileno=os.dup(descriptor)))


def in_epoll() -> contextlib.AbstractContextManager[Use]:
    """As gRPC's, libuv's and the AWS runtime's are."""

    @contextlib.contextmanager
    def keep(descriptor: int) -> Iterator[None]:
        with select.epoll() as epoll:
            epoll.register(descriptor, select.EPOLLERR)
            yield

    return detached(keep)


def in_poll() -> contextlib.AbstractContextManager[Use]:
    """As NCCL's own proxy and RAS have theirs."""
    return detached(lambda descriptor: standins.polling(descriptor, 3, 60_000, events=0))


def blocking() -> contextlib.AbstractContextManager[Use]:
    @contextlib.contextmanager
    def keep(descriptor: int) -> Iterator[None]:
        os.set_blocking(descriptor, True)
        yield

    return detached(keep)


def sends_late() -> contextlib.AbstractContextManager[Use]:
    """Without TCP_NODELAY."""

    @contextlib.contextmanager
    def keep(descriptor: int) -> Iterator[None]:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        yield

    return detached(keep)


@contextlib.contextmanager
def on_all_interfaces() -> Iterator[Use]:
    """A listener."""
    descriptor = standins.listener(host="0.0.0.0").detach()
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            address = ("127.0.0.1", copy.getsockname()[1])

        def use() -> None:
            with socket.create_connection(address), socket.socket(fileno=os.dup(descriptor)) as copy:
                copy.settimeout(10)
                copy.accept()[0].close()

        yield use
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def unix() -> Iterator[Use]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    descriptor = ours.detach()
    with theirs:
        yield lambda: (theirs.sendall(b"x"), os.read(descriptor, 1))
    os.close(descriptor)


# --- what programs use --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def asyncio_streams() -> Iterator[Use]:
    """A server and a client with an open connection, in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(20)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1):
            writer.write(data)
        writer.close()

    async def begin() -> tuple[Any, ...]:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        return server, *await asyncio.open_connection(*server.sockets[0].getsockname())

    async def again(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x")
        assert await reader.read(1) == b"x"

    async def finish(server: asyncio.Server, writer: asyncio.StreamWriter) -> None:
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    server, reader, writer = run(begin())
    yield lambda: run(again(reader, writer))
    run(finish(server, writer))
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(b"x")

    def log_message(self, *args: object) -> None: ...


@contextlib.contextmanager
def http_keep_alive() -> Iterator[Use]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        client = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)

        def use() -> None:
            client.request("GET", "/")
            assert client.getresponse().read() == b"x"

        use()
        first = client.sock

        def again() -> None:
            use()
            assert client.sock is first  # not one that it has made anew

        client.sock.setblocking(True)
        yield again
        client.close()
        server.shutdown()
        thread.join(20)


@contextlib.contextmanager
def tcp_store(use_libuv: bool) -> Iterator[Use]:
    """Its server, in this process, and a client."""
    server = dist.TCPStore("127.0.0.1", 0, 1, True, TIMEOUT, wait_for_workers=False, use_libuv=use_libuv)
    client = dist.TCPStore("127.0.0.1", server.port, 1, False, TIMEOUT, use_libuv=use_libuv)
    yield lambda: (client.set("key", "value"), server.get("key"), client.get("key"))


@contextlib.contextmanager
def gloo() -> Iterator[Use]:
    """Two ranks in this process, connected."""
    store = dist.HashStore()
    groups: list[Any] = [None, None]

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, TIMEOUT)

    def everywhere(action: Callable[[int], object]) -> None:
        threads = [threading.Thread(target=action, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)

    def use() -> None:
        tensors = [torch.ones(1), torch.ones(1)]
        everywhere(lambda rank: groups[rank].allreduce([tensors[rank]]).wait())
        assert [tensor.item() for tensor in tensors] == [2, 2]

    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"):
        everywhere(make)
    use()
    yield use
    groups.clear()


@contextlib.contextmanager
def etcd(endpoints: list[str]) -> Iterator[Use]:
    """A connection of this library's own store."""
    from inprocess.etcd_store import EtcdStore

    store = EtcdStore(endpoints, "neighbours", timeout=20)
    store.set("key", "value")
    yield lambda: store.get("key")


@contextlib.contextmanager
def grpc() -> Iterator[Use]:
    """A server, and a channel with an open connection."""
    import grpc

    def echo(request: bytes, context: object) -> bytes:
        return request

    handler = grpc.method_handlers_generic_handler("test", {"Echo": grpc.unary_unary_rpc_method_handler(echo)})
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    # one that had to connect anew would show: it is not allowed to
    options = [("grpc.enable_retries", 0), ("grpc.initial_reconnect_backoff_ms", 60_000)]
    options += [("grpc.min_reconnect_backoff_ms", 60_000)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        call = channel.unary_unary("/test/Echo")

        def use() -> None:
            assert call(b"x", timeout=20) == b"x"

        use()
        yield use
    server.stop(None).wait()


NEIGHBOURS: dict[str, Callable[[], contextlib.AbstractContextManager[Use]]] = {
    "owned by Python": owned_by_python,
    "in epoll": in_epoll,
    "in poll": in_poll,
    "blocking": blocking,
    "sends late": sends_late,
    "on all interfaces": on_all_interfaces,
    "unix": unix,
    "asyncio": asyncio_streams,
    "HTTP keep-alive": http_keep_alive,
    "TCPStore": functools.partial(tcp_store, True),
    "TCPStore without libuv": functools.partial(tcp_store, False),
    "Gloo": gloo,
}


@contextlib.contextmanager
def in_the_bootstrap(name: str = "init_process_group", file: str = "distributed_c10d.py") -> Iterator[None]:
    """A thread that is inside a function of torch's of this name."""
    begun, over = threading.Event(), threading.Event()
    function: Any = standins.inside_torch(name, file)
    thread = threading.Thread(target=function, args=(lambda: (begun.set(), over.wait(60)),))
    thread.start()
    begun.wait(20)
    try:
        yield
    finally:
        over.set()
        thread.join(20)


def check(neighbour: Callable[[], contextlib.AbstractContextManager[Use]]) -> None:
    """It goes on while a connection of a bootstrap's beside it is ended."""
    bootstrap = Bootstrap()
    with mock.patch.object(dist, "is_nccl_available", lambda: True):
        bootstrap.begin()
    bootstrap.allowed = True
    with neighbour() as use, in_the_bootstrap():
        ours, theirs = (end.detach() for end in standins.connection())
        try:
            use()
            assert bootstrap.cut() == 2
            assert not standins.is_open(ours)
            assert not standins.is_open(theirs)
            use()
            assert bootstrap.cut() == 0
        finally:
            standins.close([ours, theirs])
    bootstrap.end()


if __name__ == "__main__":
    check({"grpc": grpc}[sys.argv[1]])
    print("it went on")
