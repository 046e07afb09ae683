"""Ranks for the abort tests: plain processes without the library's loop, which wait in torch.distributed until aborted.

The parent hosts the stores and talks to each rank over two pipes: `Ranks.order` lets the abort begin, the ranks report
what they wait for and how they ended.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from inprocess.abort import AbortTorchDistributed
from inprocess.call.parts import Parts
from inprocess.collectives import gloo
from inprocess.collectives.background import FREEING
from inprocess.collectives.gloo import shutdown_gloo_connections
from inprocess.interrupt.gate import MAX_PAUSE_S
from inprocess.state import FrozenState
from inprocess.stores import serving
from inprocess.stores import tcp as store
from inprocess.testing import server

#: of every torch.distributed operation that is to be released (seconds); a test that waited for it has failed
TIMEOUT = datetime.timedelta(seconds=60)
#: for anything a rank is asked (seconds)
CEILING = 40.0


class WatchedStore(dist.Store):
    """Another store, with a function that is called with every key that was got."""

    def __init__(self, store: dist.Store, got: Callable[[str], None]) -> None:
        super().__init__()
        self._store, self._got = store, got

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = bytes(self._store.get(key))
        self._got(key)
        return value

    def wait(self, keys: list[str], timeout: datetime.timedelta = TIMEOUT) -> None:
        self._store.wait(keys, timeout)

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._store.set_timeout(timeout)


class Rank:
    """What a rank's scenario may use."""

    def __init__(self, rank: int, world_size: int, store: dist.Store, results: Connection) -> None:
        self.rank, self.world_size, self.store, self._results = rank, world_size, store, results
        self.last = rank == world_size - 1
        self.aborted = threading.Event()

    def init(self, store: dist.Store | None = None) -> None:
        dist.init_process_group(
            "gloo", store=store or self.store, rank=self.rank, world_size=self.world_size, timeout=TIMEOUT
        )

    def waiting(self) -> None:
        """Tell the parent that what comes next does not end by itself."""
        self._results.send(("waiting", "", 0.0))


def all_reduce(me: Rank) -> None:
    me.init()
    me.waiting()
    if not me.last:
        dist.all_reduce(torch.ones(1))


def unnamed_threads(me: Rank) -> None:
    """As where Gloo does not name its threads."""
    gloo.GLOO_THREAD = "no thread has this name"
    all_reduce(me)


def barrier(me: Rank) -> None:
    me.init()
    me.waiting()
    if not me.last:
        dist.barrier()


def receive(me: Rank) -> None:
    me.init()
    me.waiting()
    if not me.last:
        dist.recv(torch.ones(1), src=me.world_size - 1)


def asynchronous(me: Rank) -> None:
    me.init()
    me.waiting()
    if not me.last:
        works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(20)]
        for work in works:
            work.wait()


def sub_groups(me: Rank) -> None:
    """Each in a group of its own beside the default one; all wait in both."""
    me.init()
    group = dist.new_group(timeout=TIMEOUT)
    dist.all_reduce(torch.ones(1), group=group)
    me.waiting()
    if not me.last:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
        work.wait()


def make_group(me: Rank) -> None:
    me.init()
    me.waiting()
    if not me.last:
        dist.new_group(timeout=TIMEOUT)


def initialize(me: Rank) -> None:
    me.waiting()
    if not me.last:
        me.init()


def half_connected(me: Rank) -> None:
    """The last rank publishes its address but does not connect: each other waits for it, there or in a collective."""
    me.init(WatchedStore(me.store, partial(got_address, me)))
    dist.all_reduce(torch.ones(1))


def half_connected_sub_group(me: Rank) -> None:
    me.init()
    world: Any = dist.distributed_c10d._world  # torch takes the store of the default group
    backend, store = world.pg_map[dist.group.WORLD]
    world.pg_map[dist.group.WORLD] = (backend, WatchedStore(store, partial(got_address, me)))
    group = dist.new_group(timeout=TIMEOUT)
    dist.all_reduce(torch.ones(1), group=group)


def got_address(me: Rank, key: str) -> None:
    """With the last rank's address the others connect to it, or wait for its connection. It has published and stops."""
    address = r"/\d+$" if me.last else rf"/{me.world_size - 1}$"
    if not re.search(address, key):
        return
    me.waiting()
    if me.last:
        me.aborted.wait()
        raise RuntimeError("this rank stopped while its group was being made")


def leftovers() -> tuple[int, int]:
    """Threads of Gloo, and open descriptors, without help from the garbage collector."""
    for thread in threading.enumerate():
        if thread.name == FREEING:  # groups end in the background
            thread.join()
    return _gloo_threads(), len(os.listdir("/proc/self/fd"))


def _gloo_threads() -> int:
    count = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as comm:
            count += comm.read().startswith(("gloo_tcp_loop", "pt_gloo_runloop"))
    return count


@functools.cache  # torch looks the server's name up for every connection, which takes seconds where DNS is slow
def _connect(port: int) -> Any:
    return store.TCPStore("127.0.0.1", port, timeout=TIMEOUT)


def _store(port: int, cycle: int) -> Any:
    return dist.PrefixStore(str(cycle), _connect(port))


def _serve() -> Any:
    return serving.serve("127.0.0.1", 0)


def rank_main(
    rank: int,
    world_size: int,
    ports: list[int],
    scenario: Callable[[Rank], None],
    results: Connection,
    orders: Connection,
) -> None:
    """One rank: the scenario and its abort, once for each store but the last, then a collective over the last one."""
    state = FrozenState(rank=rank, world_size=world_size, initial_rank=rank, initial_world_size=world_size)
    abort = AbortTorchDistributed()
    for cycle, port in enumerate(ports[:-1]):
        me = Rank(rank, world_size, _store(port, cycle), results)
        parts = Parts()
        parts.next_iteration()
        _run_aborted(me, scenario, abort, state, results, orders)
        orders.recv()  # all have left
        parts.call_ended()
        results.send(("left", leftovers(), 0.0))
    me = Rank(rank, world_size, _store(ports[-1], len(ports)), results)
    me.init()
    total = torch.ones(1)
    dist.all_reduce(total)
    results.send(("again", total.item(), 0.0))
    orders.recv()  # all have it: nobody goes while others still need it
    dist.destroy_process_group()


def _run_aborted(
    me: Rank,
    scenario: Callable[[Rank], None],
    abort: AbortTorchDistributed,
    state: FrozenState,
    results: Connection,
    orders: Connection,
) -> None:
    def monitor() -> None:
        orders.recv()
        times.append(time.monotonic())
        abort(state)
        times.append(time.monotonic())
        me.aborted.set()
        while not left.wait(MAX_PAUSE_S):  # as the MonitorThread does: a wait may have begun meanwhile
            shutdown_gloo_connections(state.world_size)

    times: list[float] = []
    left = threading.Event()
    thread = threading.Thread(target=monitor)
    thread.start()
    how = "returned"
    try:
        scenario(me)
    except Exception as error:
        how = f"{type(error).__name__}: {error}"
    end = time.monotonic()
    left.set()
    thread.join()
    abort(state)  # what was made meanwhile
    assert not dist.is_initialized()
    results.send(("released", how, max(end - times[0], 0)))
    results.send(("aborted", "", times[1] - times[0]))


class Ranks:
    """Starts ranks, and reads their reports under one deadline; none is left behind."""

    def __init__(
        self, world_size: int, scenario: Callable[[Rank], None], cycles: int = 1, own_servers: bool = False
    ) -> None:
        server.start_server()
        self._servers = [_serve() for _ in range(cycles if own_servers else 0)]
        self._last_server = _serve()
        context = multiprocessing.get_context("forkserver")
        ports = [server.port for server in self._servers] or [self._last_server.port] * cycles
        ports.append(self._last_server.port)
        self._results, self._orders, self._processes = [], [], []
        for rank in range(world_size):
            ours, results = context.Pipe(duplex=False)
            orders, ours_too = context.Pipe(duplex=False)
            process = context.Process(
                target=rank_main, args=(rank, world_size, ports, scenario, results, orders), daemon=True
            )
            process.start()
            results.close()
            orders.close()
            self._results.append(ours)
            self._orders.append(ours_too)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for process in self._processes:
            if kind is None:
                process.join(CEILING)
            process.kill()
            process.join()
            process.close()
        for connection in self._results + self._orders:
            connection.close()
        self._servers.clear()
        del self._last_server

    def order(self) -> None:
        for connection in self._orders:
            connection.send(None)

    def expect(self, what: str) -> list[tuple[Any, float]]:
        """The next report of each rank: its value, and a time in seconds."""
        deadline = time.monotonic() + CEILING
        reports = []
        for rank, connection in enumerate(self._results):
            assert connection.poll(max(deadline - time.monotonic(), 0)), f"rank {rank} did not come to {what!r}"
            name, value, seconds = connection.recv()
            assert name == what, f"rank {rank}: {name} {value} instead of {what}"
            reports.append((value, seconds))
        return reports

    def close_store(self, cycle: int = 0) -> None:
        """End a cycle's own store server, as its host does when an iteration is interrupted."""
        self._servers[cycle] = None
