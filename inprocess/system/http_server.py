"""Answers to HTTP's GET, one for each connection, in a server that waits for nobody; http.server parses requests."""

from __future__ import annotations

import http.server
import io
import itertools
import socket
from collections.abc import Callable, Iterable

from inprocess.system.server import Buffer, Client, Server

__all__ = ["MAX_REQUEST_BYTES", "Exchange", "HttpServer"]

#: longest request, with its headers (bytes)
MAX_REQUEST_BYTES = 1 << 14


class Exchange(http.server.BaseHTTPRequestHandler):
    """One request and its answer, without a socket: what is written to `wfile`, and then the `content`."""

    wfile: io.BytesIO
    #: sent after it, each piece asked for when the one before has gone
    content: Iterable[Buffer] = ()
    #: whether the client keeps its place, see `Server`
    is_known = False

    def __init__(self, request: bytes) -> None:
        self.rfile, self.wfile = io.BytesIO(request), io.BytesIO()
        self.client_address = ("", 0)
        self.handle_one_request()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a stranger could fill the log."""


class Caller(Client):
    """Somebody who has not said everything yet."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.request = b""


class HttpServer(Server[Caller]):
    """See `Server`; ``answer``: makes the exchange of a request."""

    def __init__(self, listener: socket.socket, name: str, answer: Callable[[bytes], Exchange]) -> None:
        super().__init__(listener, name, Caller)
        self._answer = answer

    def hear(self, client: Caller, data: bytes) -> bool:
        client.request += data
        if b"\r\n\r\n" not in client.request:
            return len(client.request) <= MAX_REQUEST_BYTES
        exchange = self._answer(client.request)
        if exchange.is_known:
            self.know(client)
        client.is_last = True
        self.tell(client, itertools.chain([exchange.wfile.getvalue()], exchange.content))
        return True
