"""A server in one thread that waits for none of its clients. Strangers among them are few, and have little time.

A client is a stranger until the server says that it is known. A known one may be silent for as long as it likes, and
keeps its place whatever strangers do. While an answer waits to be sent nothing is read: who does not take its answers
gets no more of them.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from inprocess.system import clock, descriptors
from inprocess.system.errors import in_words
from inprocess.system.logs import get_logger

__all__ = ["EXHAUSTED_PAUSE_S", "STRANGERS", "STRANGER_S", "Client", "Server"]

log = get_logger("inprocess.server")
#: strangers at a time: where another one comes, the one that has been there longest goes
STRANGERS = 256
#: how long a client may be a stranger (seconds)
STRANGER_S = 10.0
#: for how long nobody is accepted after descriptors ran out (seconds): a connection stays in the queue, and accept()
#: would fail again at once
EXHAUSTED_PAUSE_S = 0.5
#: read from a client, and about so much sent to it, before others have their turn (bytes)
READ_BYTES, SEND_BYTES = 1 << 16, 1 << 22

Buffer = bytes | memoryview


class Client:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        #: when it is closed, should it still be a stranger (s)
        self.until = math.inf
        #: how the other end has ended: 0 in order, else the number of the error; None: it has not
        self.end: int | None = None
        #: it is closed once all has been sent
        self.is_last = False
        self._waiting: deque[Iterator[Buffer]] = deque()
        self._piece = memoryview(b"")

    def add(self, pieces: Iterable[Buffer]) -> None:
        """To be sent; a piece is asked for when the one before has been."""
        self._waiting.append(iter(pieces))

    def flush(self) -> bool:
        """Send what the connection takes now; whether that was all. Raises BlockingIOError where it takes nothing."""
        budget = SEND_BYTES
        while budget > 0:
            if self._piece:
                count = self.socket.send(self._piece, socket.MSG_NOSIGNAL)
                self._piece, budget = self._piece[count:], budget - count
            elif not self._waiting:
                return True
            elif (piece := next(self._waiting[0], None)) is not None:
                self._piece = memoryview(piece)
            else:
                self._waiting.popleft()
        return False


C = TypeVar("C", bound=Client)


class Server(threading.Thread, Generic[C]):
    """The methods without a body are for those that derive from it; all but `close` and `wake` run in the thread.

    Args:
        listener: where clients come; closed at the end.
        name: of the thread. `run` may be called instead of starting one.
        client: makes one of a connection.
    """

    def __init__(self, listener: socket.socket, name: str, client: type[C]) -> None:
        super().__init__(name=name, daemon=True)
        self._listener, self._client = listener, client
        listener.setblocking(False)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)
        #: all of them, and those that are not known yet; the oldest first
        self.clients: dict[C, None] = {}
        self._strangers: dict[C, None] = {}
        #: when the listener is looked at again; infinite while it is
        self._open_at = math.inf
        self._closing = self._closed = False
        #: kinds of errors that have been told of
        self._told: set[type[Exception]] = set()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    # --- for those that derive from it ----------------------------------------------------------------------------

    def hear(self, client: C, data: bytes) -> bool:
        """Take in what it says; False: it is to be closed."""
        raise NotImplementedError

    def left(self, client: C) -> None:
        """It was closed, for whatever reason but the end of the server."""

    def refuse(self, client: C) -> None:
        """A stranger is about to be closed: it has taken too long, or others came."""

    def turn(self) -> None:
        """All that could be read has been."""

    def turn_at(self) -> float:
        """When `turn` is due, should nobody say anything until then (s)."""
        return math.inf

    def say(self, text: str) -> None:
        """In words: why nobody can come, or an error of ours."""
        log.error("%s: %s", self.name, text)

    # --- in the thread --------------------------------------------------------------------------------------------

    def know(self, client: C) -> None:
        """It is no stranger."""
        self._strangers.pop(client, None)

    def tell(self, client: C, pieces: Iterable[Buffer]) -> None:
        """Send it this; what it says is not read before that is done."""
        client.add(pieces)
        self._selector.modify(client.socket, selectors.EVENT_WRITE, client)

    def run(self) -> None:
        try:
            while not self._closing:
                self._pass()
        finally:
            self._end()

    def _pass(self) -> None:
        overdue = next(iter(self._strangers)).until if self._strangers else math.inf
        wait = min(overdue, self._open_at, self.turn_at()) - clock.monotonic()
        ready = self._selector.select(None if math.isinf(wait) else descriptors.milliseconds(wait) / 1e3)
        # new ones last: whoever has something to say by now does not have to make room for them
        for key, _ in sorted(ready, key=lambda each: each[0].fileobj is self._listener):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data is None:
                os.eventfd_read(self._wake)
            else:
                self._attend(key.data)
        now = clock.monotonic()
        if now >= self._open_at:
            self._open_at = math.inf
            self._selector.register(self._listener, selectors.EVENT_READ)
        while self._strangers and next(iter(self._strangers)).until <= now:
            self._send_away()
        self.turn()

    def _accept(self) -> None:
        try:
            client = self._client(self._listener.accept()[0])
        except OSError as error:  # it has gone again, unless there are too many
            if error.errno in descriptors.EXHAUSTED:
                self._make_room(error)
            return
        client.socket.setblocking(False)
        client.until = clock.monotonic() + STRANGER_S
        self.clients[client] = self._strangers[client] = None
        self._selector.register(client.socket, selectors.EVENT_READ, client)
        self._attend(client)  # mostly it has said already who it is
        if len(self._strangers) > STRANGERS:
            self._send_away()

    def _make_room(self, error: OSError) -> None:
        self._tell_once(OSError, f"nobody can connect: {descriptors.shortage(error) or error.strerror}")
        if self._strangers:
            self._send_away()
            return
        self._selector.unregister(self._listener)
        self._open_at = clock.monotonic() + EXHAUSTED_PAUSE_S

    def _tell_once(self, kind: type[Exception], text: str) -> None:
        """A stranger must not be able to fill a log."""
        if kind not in self._told:
            self._told.add(kind)
            self.say(text)

    def _attend(self, client: C) -> None:
        try:
            goes_on = self._take(client)
        except BlockingIOError:
            return
        except OSError as error:
            client.end, goes_on = error.errno or 0, False
        except Exception as error:  # of ours: the others have to go on
            self._tell_once(type(error), f"a client was closed after an error: {in_words(error)}")
            goes_on = False
        if not goes_on:
            self._drop(client)

    def _take(self, client: C) -> bool:
        """Send on, or read on; False: it is over."""
        if self._selector.get_key(client.socket).events == selectors.EVENT_WRITE:
            if client.flush():
                self._selector.modify(client.socket, selectors.EVENT_READ, client)
                return not client.is_last
            return True
        data = client.socket.recv(READ_BYTES)
        if not data:
            client.end = 0
        return bool(data) and self.hear(client, data)

    def _send_away(self) -> None:
        client = next(iter(self._strangers))
        self.refuse(client)
        self._drop(client)

    def _drop(self, client: C) -> None:
        del self.clients[client]
        self._strangers.pop(client, None)
        self._selector.unregister(client.socket)
        _shut(client.socket)
        self.left(client)

    def _end(self) -> None:
        self._selector.close()
        for client in self.clients:
            _shut(client.socket)
        self._listener.close()

    # --- in any thread --------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have `turn` called soon."""
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Have `run` end soon."""
        self._closing = True
        self.wake()

    def close(self) -> None:
        """End the thread and all connections, as the end of the process would. More than once is fine."""
        if self._closed:
            return
        self._closed = True
        self.stop()
        if self.ident is not None:
            self.join()
        elif self._listener.fileno() >= 0:  # it was never started
            self._end()
        os.close(self._wake)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # also where a forked child has a copy
    connection.close()
