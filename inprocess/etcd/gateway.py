"""HTTP to the gateway of one member of an etcd cluster: questions over a connection that is kept, and watches.

By the standard library: a restart asks some twenty questions on each rank, and with a general HTTP client each of them
costs a millisecond of a core, more than the network and etcd take.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import urllib.parse
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from inprocess.system.descriptors import await_readable

__all__ = ["NO_ANSWER", "Gateway", "Refused", "Stream"]

#: no whole answer came: refused, reset, silent for too long, cut short, or no answer that a gateway gives
NO_ANSWER = (OSError, http.client.HTTPException, ValueError)
#: those of gRPC
CODES = range(17)


class Refused(Exception):
    """The gateway answers with an error, or a proxy in front of it does."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text.strip() or f"HTTP status {status}")
        self.code, self.status = self._code(text), status

    @staticmethod
    def _code(text: str) -> int | None:
        """gRPC's; the HTTP status that goes with it depends on etcd's version. None: it is not etcd that answers."""
        try:
            answer = json.loads(text)
        except ValueError:
            return None
        if not isinstance(answer, dict):
            return None
        inner = answer.get("error")  # of a stream, as the renewal of a lease is one; else a text
        code = inner.get("grpc_code", inner.get("code")) if isinstance(inner, dict) else answer.get("code")
        return code if code in CODES else None


class Gateway:
    """One member. Questions of several threads are put one after the other; a watch has a connection for itself.

    Args:
        address: of its client port.
        connecting: how long a connection may take to be made (seconds).
        answering: how long an answer is waited for (seconds).
        tls: says, for each connection, whom to trust and how to show who asks; None: plain HTTP.
    """

    def __init__(
        self,
        address: urllib.parse.SplitResult,
        connecting: float,
        answering: float,
        tls: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        self._host, self._port = address.hostname or "", address.port or 2379
        self.name = f"{address.scheme}://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"
        #: what a user got by logging in
        self.token = ""
        self._connecting, self._answering, self._tls = connecting, answering, tls
        self._lock = threading.Lock()
        #: the connection that is kept, between two questions
        self._kept: list[http.client.HTTPConnection] = []
        # no __del__: in a reference cycle the socket may be finalized first, and warn
        weakref.finalize(self, _close, self._kept).atexit = False

    def post(self, path: str, body: Any) -> Any:
        """The answer to one question. Raises Refused, or one of NO_ANSWER."""
        with self._lock:
            connection = self._kept.pop() if self._kept else None
            if connection is None or _has_ended(connection):
                connection = self._connect()
            try:
                response = self._send(connection, path, body, self._answering)
                text = response.read()
            except BaseException:  # whose answer would be taken for that of the next question
                connection.close()
                raise
            self._kept.append(connection)
        if response.status != http.client.OK:
            raise Refused(text.decode(errors="replace"), response.status)
        return json.loads(text)

    @contextlib.contextmanager
    def stream(
        self, path: str, body: Any, seconds: float, tell: Callable[[socket.socket | None], None]
    ) -> Iterator[Stream]:
        """The answers to one question as they come. Each raises one of NO_ANSWER after ``seconds``.

        ``tell`` is told the socket before the question is put, and None before the socket is closed.
        """
        connection, response = self._connect(), None
        try:
            tell(used := connection.sock)
            response = self._send(connection, path, body, max(seconds, 0.001))
            yield Stream(used.fileno(), response)
        finally:
            tell(None)
            if response is not None:
                response.close()
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        connection = (
            http.client.HTTPConnection(self._host, self._port, timeout=self._connecting)
            if self._tls is None
            else http.client.HTTPSConnection(self._host, self._port, timeout=self._connecting, context=self._tls())
        )
        connection.connect()
        return connection

    def _send(
        self, connection: http.client.HTTPConnection, path: str, body: Any, seconds: float
    ) -> http.client.HTTPResponse:
        if connection.sock is None:  # the answer before said that it is the last one
            connection.connect()
        connection.sock.settimeout(seconds)
        headers = {"Authorization": self.token} if self.token else {}
        connection.request("POST", f"/v3{path}", json.dumps(body).encode(), headers)
        return connection.getresponse()


def _close(connections: list[http.client.HTTPConnection]) -> None:
    while connections:
        connections.pop().close()


def _has_ended(connection: http.client.HTTPConnection) -> bool:
    """Between two questions nothing comes but the end of the connection."""
    if connection.sock is None or not await_readable(connection.sock.fileno(), 0.0):
        return False
    connection.close()
    return True


class Stream:
    """What comes in answer to one question: one line of JSON after the other."""

    def __init__(self, descriptor: int, response: http.client.HTTPResponse) -> None:
        self._descriptor, self._response = descriptor, response

    def __iter__(self) -> Iterator[Any]:
        rest = b""
        while chunk := self._response.read1():
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (json.loads(line) for line in lines if line.strip())

    def comes_within(self, seconds: float) -> bool:
        """Whether something arrives. What was received with the line before does not count."""
        return await_readable(self._descriptor, seconds)
