"""Where the workers of one node speak to their launcher: a socket that nobody but this user can reach.

What a worker may say is little: that it has a Wrapper, which modules it has imported, that it wants to be watched (and
here is its board), that it asks for something. Each line is a JSON object and carries the key that the worker was
started with; a process can speak for no other rank, and none that was started before can speak for its successor.
Anything else ends the connection. One thread does the talking and never waits for a worker. Whether a worker is overdue
is decided in ``timeouts``.

    worker                                     launcher
    {"key", "say": "wrapped", "own_store"} -->
    {"key", "say": "nobody left"} -->
    {"key", "say": "call over"} -->
    {"key", "say": "modules"} + descriptor -->
    {"key", "say": "watch"} + descriptor -->
                                         <--   {"ok": true, "limits": ...} or {"ok": false, "why": ...}
    {"key", "say": "ask", "action", "reason"} -->
                                         <--   {"ok": true}
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from inprocess.attribution import one_line
from inprocess.heartbeats.board import WatchBoard
from inprocess.heartbeats.messages import ACTIONS, MAX_LINE_BYTES, MAX_REASON_LENGTH
from inprocess.heartbeats.modules import Modules
from inprocess.launcher.control_socket import listen, peer
from inprocess.launcher.ft_config import Settings
from inprocess.monitor.timeouts import Overdue, decide
from inprocess.system import clock, descriptors, environment, strict_json
from inprocess.system.json_lines import send_now
from inprocess.system.logs import get_logger

__all__ = ["ControlServer", "Overdue", "Request"]

log = get_logger("inprocess.launcher")

#: connections that are kept at a time; further ones are closed at once
MAX_CONNECTIONS = 1024
#: requests that nobody has fetched yet; the oldest go
MAX_REQUESTS = 1000
#: read from one connection at a time (bytes)
READ_BYTES = 4096
#: longest wait until everything that workers have sent is read (seconds)
SETTLE_S = 1.0
#: how long the thread leaves the socket alone when no descriptor is free (seconds)
EXHAUSTED_PAUSE_S = 0.1


#: the launcher itself stood still where it looks so many intervals late
STOOD_STILL = 2


@dataclass(frozen=True)
class Request:
    """A worker asks for something."""

    rank: int
    #: "continue", "exclude_this_node" or "shutdown_workload"
    action: str
    #: in the worker's words, on one line
    reason: str


@dataclass(eq=False)
class _Worker:
    rank: int
    key: str
    pid: int = 0
    wrapped: bool = False
    own_store: bool = False
    #: it found nobody to join
    stranded: bool = False
    #: its last call ended with an error on all ranks
    over: bool = False
    #: the connection for which it is watched, and what it shows
    watch: _Connection | None = None
    board: WatchBoard | None = None


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    #: of the process at the other end, as the kernel says
    pid: int
    received: bytes = b""
    fds: list[int] = field(default_factory=list)


class _Refused(Exception):
    """What was said is none of what a worker says."""


class ControlServer:
    """For the launcher's agent on one node; every method may be called from any thread.

    Args:
        settings: the time limits of the workers.
        now: the clock by which workers stamp, in nanoseconds.
        learns: whether workers are to tell which modules they have imported, until one has.

    A worker is known from :meth:`environment` to :meth:`ended`. Leaves nothing behind after :meth:`close`.
    """

    def __init__(
        self, settings: Settings | None = None, now: Callable[[], int] = clock.monotonic_ns, learns: bool = False
    ) -> None:
        self._settings = Settings() if settings is None else settings
        self._learns = learns
        self._now = now
        self._looked, self._awake_since = now(), 0
        #: protects everything that the thread and the callers share
        self._lock = threading.Condition()
        self._workers: dict[int, _Worker] = {}
        self._keys: dict[str, _Worker] = {}
        self._requests: deque[Request] = deque(maxlen=MAX_REQUESTS)
        #: of the first worker that told
        self._modules: Modules | None = None
        #: connections that the thread shall close
        self._over: list[_Connection] = []
        #: passes that callers asked for, and the last of them that is done
        self._asked = self._done = 0
        self._closed = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._path, self._listener = listen(MAX_CONNECTIONS)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._connections: set[_Connection] = set()
        self._thread = threading.Thread(target=self._serve, name="inprocess-control", daemon=True)
        self._thread.start()

    # --- the agent ----------------------------------------------------------------------------------------------

    def environment(self, global_rank: int) -> dict[str, str]:
        """Variables for a worker that is about to be started as this rank. What was known of the rank is forgotten."""
        worker = _Worker(global_rank, secrets.token_hex(16))
        with self._lock:
            self._forget(global_rank)
            self._workers[global_rank] = self._keys[worker.key] = worker
            learns = {environment.LAUNCHER_LEARNS: "1"} if self._learns and self._modules is None else {}
        return {environment.LAUNCHER: self._path, environment.LAUNCHER_KEY: worker.key, **learns}

    def started(self, global_rank: int, pid: int) -> None:
        """The worker runs. It may have spoken already."""
        with self._lock:
            if worker := self._workers.get(global_rank):
                worker.pid = pid

    def ended(self, global_rank: int) -> None:
        """The worker is gone; whoever still has its key can say nothing more."""
        with self._lock:
            self._forget(global_rank)

    def is_wrapped(self, global_rank: int) -> bool:
        """Whether a Wrapper looks after this worker.

        What a worker said before it died counts: waits until all that was sent is read, normally microseconds, at
        most 1 s.
        """
        return self._has_said(global_rank, lambda worker: worker.wrapped)

    def has_own_store(self, global_rank: int) -> bool:
        """Whether this worker is wrapped, and does without the launcher's store; waits as `is_wrapped` does."""
        return self._has_said(global_rank, lambda worker: worker.own_store)

    def is_stranded(self, global_rank: int) -> bool:
        """Whether this worker was to join a job of which nobody is left; waits as `is_wrapped` does."""
        return self._has_said(global_rank, lambda worker: worker.stranded)

    def is_over(self, global_rank: int) -> bool:
        """Whether this worker's call ended with an error on all ranks, and it has made none since; waits likewise."""
        return self._has_said(global_rank, lambda worker: worker.over)

    def _has_said(self, global_rank: int, what: Callable[[_Worker], bool]) -> bool:
        with self._lock:
            self._settle()
            worker = self._workers.get(global_rank)
            return worker is not None and what(worker)

    def modules(self) -> Modules | None:
        """What the first worker had imported that came to a wrapped function; None: none has yet."""
        with self._lock:
            return self._modules

    def overdue(self) -> list[Overdue]:
        """The workers that have taken more time than they may, until they have ended.

        To be called every ``workload_check_interval``. Where the call comes much later the launcher itself stood still,
        perhaps with all its workers: no silence counts then that began before.
        """
        with self._lock:
            now = self._now()
            if now - self._looked > STOOD_STILL * self._settings.workload_check_interval * 1e9 + 1e9:
                self._awake_since = now
            self._looked = now
            if not self._decide(now):
                return []
            self._settle()  # it may have ended its watch, and nobody has read that yet
            return self._decide(now)

    def _decide(self, now: int) -> list[Overdue]:
        shown = {rank: worker.board.seen() for rank, worker in self._workers.items() if worker.board}
        return decide(now, shown, self._awake_since)

    def requests(self) -> list[Request]:
        """What workers have asked for since the last call, oldest first."""
        with self._lock:
            found = list(self._requests)
            self._requests.clear()
            return found

    def close(self) -> None:
        """End the thread and every connection, and remove the socket. More than once is fine."""
        with self._lock:
            if self._closed:
                return
            self._wake()
            self._closed = True
        self._thread.join()
        with self._lock:
            for rank in list(self._workers):
                self._forget(rank)
            for connection in list(self._connections):
                self._drop(connection)
        self._selector.close()
        self._listener.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        shutil.rmtree(os.path.dirname(self._path), ignore_errors=True)

    def _forget(self, rank: int) -> None:
        worker = self._workers.pop(rank, None)
        if worker is None:
            return
        del self._keys[worker.key]
        if worker.watch is not None:
            self._over.append(worker.watch)
        self._unwatch(worker)
        self._wake()

    def _unwatch(self, worker: _Worker) -> None:
        if worker.board is not None:
            worker.board.close()
        worker.board = worker.watch = None

    def _settle(self) -> None:
        """Wait for a whole pass of the thread that begins after this."""
        if self._closed:
            return
        self._asked += 1
        asked = self._asked
        self._wake()
        self._lock.wait_for(lambda: self._done >= asked or self._closed, SETTLE_S)

    def _wake(self) -> None:
        if self._closed:
            return
        with contextlib.suppress(BlockingIOError):  # it is full, so the thread wakes anyway
            os.write(self._wake_write, b"!")

    # --- the thread ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                asked = self._asked
                waiting = asked == self._done
                over, self._over = self._over, []
            for connection in over:
                self._drop(connection)
            found = self._selector.select(None if waiting else 0)
            # new ones last: those that have ended make room for them
            for key, _ in sorted(found, key=lambda each: each[0].fileobj is self._listener):
                self._ready(key)
            with self._lock:
                self._done = asked
                self._lock.notify_all()

    def _ready(self, key: selectors.SelectorKey) -> None:
        if key.data is not None:
            self._read(key.data)
        elif key.fileobj is self._listener:
            self._accept()
        else:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, READ_BYTES)

    def _accept(self) -> None:
        """Take all that wait, and read what they have sent at once: they may be dead already."""
        for _ in range(MAX_CONNECTIONS):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptor is free; the others have to go on
                log.warning("a worker cannot be heard: %s", descriptors.shortage(error) or error)
                threading.Event().wait(EXHAUSTED_PAUSE_S)
                return
            connection = _Connection(accepted, peer(accepted))
            if connection.pid < 0 or len(self._connections) >= MAX_CONNECTIONS:
                accepted.close()
                continue
            accepted.setblocking(False)
            self._connections.add(connection)
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._read(connection)

    def _read(self, connection: _Connection) -> None:
        """At most a line's length, so that none who talks without end keeps the others waiting."""
        for _ in range(MAX_LINE_BYTES // READ_BYTES):
            if connection not in self._connections:
                return
            try:
                data, fds, _, _ = socket.recv_fds(connection.socket, READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            connection.fds += fds
            if not data:
                self._drop(connection)
                return
            connection.received += data
            self._lines(connection)

    def _lines(self, connection: _Connection) -> None:
        *lines, connection.received = connection.received.split(b"\n")
        try:
            for line in lines:
                self._hear(connection, line)
            if len(connection.received) > MAX_LINE_BYTES:
                raise _Refused(f"a line of more than {MAX_LINE_BYTES} bytes")
            if len(connection.fds) > bool(connection.received):
                raise _Refused("it hands over descriptors that nobody asked for")
        except _Refused as error:
            log.warning("process %d does not speak like a worker and is not listened to: %s", connection.pid, error)
            self._drop(connection)
        except Exception:  # an error in here must not leave the other workers without a launcher that listens
            log.exception("what process %d said led to an error", connection.pid)
            self._drop(connection)

    def _hear(self, connection: _Connection, line: bytes) -> None:
        try:
            message = strict_json.parse(line, MAX_LINE_BYTES)
        except ValueError as error:
            raise _Refused(one_line(str(error), 200)) from None
        key, say = (message.get("key"), message.get("say")) if isinstance(message, dict) else (None, None)
        with self._lock:
            worker = self._keys.get(key) if isinstance(key, str) else None
            if worker is None:
                raise _Refused("its key is none of a worker that runs")
            if say == "wrapped":
                worker.wrapped, worker.own_store = True, message.get("own_store") is True
                worker.over = False
            elif say == "nobody left":
                worker.stranded = True
            elif say == "call over":
                worker.over = True
            elif say == "modules":
                told = _modules(connection)
                self._modules = self._modules or told
            elif say == "watch":
                self._answer(connection, self._watch(worker, connection))
            elif say == "ask":
                self._answer(connection, self._ask(worker, message))
            else:
                raise _Refused(f"it says {say!r:.100}")

    def _watch(self, worker: _Worker, connection: _Connection) -> dict[str, Any]:
        if len(connection.fds) != 1:
            raise _Refused("it hands over no board")
        if worker.watch is not None:
            _close(connection.fds)
            return {"ok": False, "why": f"rank {worker.rank} is watched already, process {worker.watch.pid} was first"}
        try:
            worker.board = WatchBoard.attach(connection.fds.pop())
        except ValueError as error:
            raise _Refused(str(error)) from None
        worker.watch = connection
        return {"ok": True, "limits": self._settings.limits().to_json()}

    def _ask(self, worker: _Worker, message: dict[str, Any]) -> dict[str, Any]:
        action, reason = message.get("action"), message.get("reason")
        if action not in ACTIONS or not isinstance(reason, str):
            raise _Refused(f"it asks for {action!r:.100}")
        request = Request(worker.rank, str(action), one_line(reason, MAX_REASON_LENGTH))
        log.warning("rank %d asks for %s: %s", request.rank, request.action, request.reason)
        self._requests.append(request)
        return {"ok": True}

    def _answer(self, connection: _Connection, reply: dict[str, Any]) -> None:
        if not send_now(connection.socket, reply):
            raise _Refused("it does not take its answer")

    def _drop(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        _close(connection.fds)
        with self._lock:
            for worker in self._workers.values():
                if worker.watch is connection:
                    self._unwatch(worker)


def _modules(connection: _Connection) -> Modules:
    try:
        return Modules.read(*connection.fds)
    except (TypeError, ValueError) as error:
        raise _Refused(f"it tells of no modules: {error}") from None
    finally:
        _close(connection.fds)


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
