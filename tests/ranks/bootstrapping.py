"""Ranks that make a communicator as NCCL does, as far as sockets go: what `ncclCommInitRank` waits for, in C code.

Rank 0 listens for all; its address goes through the store. Each rank listens for it and for its neighbour, tells rank 0
where, learns where the one after it listens, connects there, and the ranks pass their numbers around. Nothing blocks: a
thread spins on non-blocking sockets of which no Python object knows, while the main thread waits for it in the C
library, where no signal reaches it. A connection that is refused is tried again as NCCL's settings say.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tests.harness.child import Context
from tests.threads.standins import LIBC, inside_torch, last_error

#: how long a rank takes for a step, so that a fault may come between any two (seconds)
SLOW = 0.02
#: when a rank is killed that dies meanwhile (seconds after its begin)
DEATHS = 0.15


class BootstrapError(RuntimeError):
    """A connection ended, or was never made."""


class _Socket:
    """Non-blocking, and known by its number alone. Closed by the thread that made it."""

    def __init__(self, descriptor: int, mine: contextlib.ExitStack) -> None:
        self.descriptor, self._mine = descriptor, mine
        mine.callback(os.close, descriptor)

    @classmethod
    def new(cls, mine: contextlib.ExitStack) -> _Socket:
        return cls(LIBC.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 0), mine)._quick()

    def _quick(self) -> _Socket:
        on = ctypes.c_int(1)
        LIBC.setsockopt(self.descriptor, socket.IPPROTO_TCP, socket.TCP_NODELAY, ctypes.byref(on), 4)
        return self

    def listen(self) -> int:
        LIBC.bind(self.descriptor, _address(0), 16)
        LIBC.listen(self.descriptor, 64)
        found, size = ctypes.create_string_buffer(16), ctypes.c_uint(16)
        LIBC.getsockname(self.descriptor, found, ctypes.byref(size))
        return int.from_bytes(found.raw[2:4], "big")

    def accept(self) -> _Socket:
        descriptor = self._spin(lambda: LIBC.accept4(self.descriptor, None, None, socket.SOCK_NONBLOCK))
        return _Socket(descriptor, self._mine)._quick()

    def send(self, number: int) -> None:
        self._spin(lambda: LIBC.write(self.descriptor, number.to_bytes(4, "big"), 4))

    def receive(self) -> int:
        buffer = ctypes.create_string_buffer(4)
        if self._spin(lambda: LIBC.read(self.descriptor, buffer, 4)) < 4:  # four bytes come as one
            raise BootstrapError("connection closed by remote peer")
        return int.from_bytes(buffer.raw, "big")

    def _spin(self, call: Callable[[], int]) -> int:
        """As NCCL: until it is done, fails, or the communicator is to be aborted, of which nobody tells it."""
        while (result := call()) < 0:
            if (error := last_error()) not in ("EAGAIN", "EINPROGRESS", "EALREADY", "ENOTCONN"):
                raise BootstrapError(error)
            time.sleep(0.001)
        return result


def _connected(port: int, mine: contextlib.ExitStack) -> _Socket:
    times, pause = int(os.environ["NCCL_SOCKET_RETRY_CNT"]), int(os.environ["NCCL_SOCKET_RETRY_SLEEP_MSEC"])
    for attempt in range(times + 1):
        made = _Socket.new(mine)
        error = _connect(made, port)
        if not error:
            return made
        if error != "ECONNREFUSED":
            raise BootstrapError(error)
        time.sleep((attempt + 1) * pause / 1e3)
    raise BootstrapError("connection refused, again and again")


def _connect(made: _Socket, port: int) -> str:
    while LIBC.connect(made.descriptor, _address(port), 16):
        if (error := last_error()) not in ("EINPROGRESS", "EALREADY"):
            return "" if error == "EISCONN" else error
        time.sleep(0.001)
    return ""


def _address(port: int) -> bytes:
    return socket.AF_INET.to_bytes(2, "little") + port.to_bytes(2, "big") + socket.inet_aton("127.0.0.1") + bytes(8)


class _Communicator:
    """One rank's part. ``make`` is what the program calls, in a function of torch's."""

    def __init__(self, rank: int, size: int, store: Any, pauses: random.Random) -> None:
        self._rank, self._size, self._store, self._pauses = rank, size, store, pauses
        self.ranks: list[int] = []
        self._error: BaseException | None = None
        self._over = False
        # all zero: free, and nobody waits
        self._mutex, self._done = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
        LIBC.pthread_mutex_lock(self._mutex)

    def make(self) -> list[int]:
        """The ranks, as they came around. Raises BootstrapError, or what the store raises.

        All of it happens inside one call of the C library, as in torch: an interruption comes before or after it.
        """
        worker = threading.Thread(target=self._work)
        try:
            worker.start()
            # lets the worker begin, and waits for it
            inside_torch("init_process_group")(lambda: LIBC.pthread_cond_wait(self._done, self._mutex))
        finally:
            self._over = True
            LIBC.pthread_mutex_unlock(self._mutex)
        worker.join()
        if self._error is not None:
            raise self._error
        return self.ranks

    def _work(self) -> None:
        LIBC.pthread_mutex_lock(self._mutex)
        try:
            if not self._over:
                self._exchange()
        except Exception as error:
            # no cycle through its traceback: with that, the store would stay open until the next collection, since rank
            # 0's other thread may outlive the call, where it tries to reach a rank that died
            self._error = error.with_traceback(None)
        finally:
            LIBC.pthread_cond_signal(self._done)
            LIBC.pthread_mutex_unlock(self._mutex)

    def _exchange(self) -> None:
        root = self._begin_root() if not self._rank else None
        port = int(self._store.get("root"))  # as the unique id of a communicator is exchanged
        with contextlib.ExitStack() as mine:
            self._go_around(port, mine)
        if root is not None:
            root.join()

    def _begin_root(self) -> threading.Thread:
        mine = contextlib.ExitStack()
        listener = _Socket.new(mine)
        try:
            self._store.set("root", str(listener.listen()))
        except Exception:  # the store is gone
            mine.close()
            raise
        thread = threading.Thread(target=self._serve, args=(listener, mine))
        thread.start()
        return thread

    def _serve(self, listener: _Socket, mine: contextlib.ExitStack) -> None:
        """Rank 0's other thread: learn from all where they listen, and tell each of the one after it. Where it fails,
        the others wait for ever, or fail."""
        with mine, contextlib.suppress(BootstrapError):
            places = {}
            for _ in range(self._size):
                visitor = listener.accept()
                rank = visitor.receive()
                places[rank] = (visitor.receive(), visitor.receive())
            for rank, (answer_at, _) in places.items():
                _connected(answer_at, mine).send(places[(rank + 1) % self._size][1])

    def _go_around(self, root: int, mine: contextlib.ExitStack) -> None:
        self._pause()
        for_root, for_neighbour = _Socket.new(mine), _Socket.new(mine)
        visit = _connected(root, mine)
        self._pause()
        for number in (self._rank, for_root.listen(), for_neighbour.listen()):
            visit.send(number)
        following = _connected(for_root.accept().receive(), mine)
        self._pause()
        before = for_neighbour.accept()
        self.ranks = [self._rank]
        for _ in range(self._size - 1):
            following.send(self.ranks[-1])
            self._pause()
            self.ranks.append(before.receive())

    def _pause(self) -> None:
        time.sleep(self._pauses.uniform(0, SLOW))


class _Nccl:
    """torch's class of this name; no group is of it."""


def run(context: Context) -> Any:
    """As in a torch with NCCL."""
    dist.is_nccl_available = lambda: True  # type: ignore[method-assign]
    dist.ProcessGroupNCCL = _Nccl  # type: ignore[attr-defined,misc]
    before = vars(dist.ProcessGroup)["shutdown"]
    try:
        return context.wrap(_body)()
    finally:
        assert vars(dist.ProcessGroup)["shutdown"] is before


def _body(context: Context, call: Any) -> list[object]:
    assert hasattr(dist.ProcessGroup.shutdown, "__wrapped__")  # for the time of the call
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    chance = random.Random(f"{context.args['seed']}:{rank}:{call.iteration}")
    if call.iteration == 0 and rank == context.args["victim"]:
        if context.args["how"] == "raise":
            time.sleep(chance.uniform(0, DEATHS))
            raise ValueError("before it joined")
        threading.Thread(target=_die, args=(chance.uniform(0, DEATHS),), daemon=True).start()
    context.emit("bootstrapping")
    ranks = _Communicator(rank, size, call.store, chance).make()
    if call.iteration == 0 and context.args["how"] == "kill":
        time.sleep(60)  # the death came late
    assert sorted(ranks) == list(range(size))
    return [call.iteration, rank, size]


def _die(after: float) -> None:
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)
