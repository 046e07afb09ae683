"""States on the way from one rank to another, over HTTP: where the process group should be left alone, or cannot send.

Whoever sends serves the state on a port of its own for as long as it takes, to whoever has the token, which is in the
iteration's store with the address. What is sent is what `transfer` sends: the header and the bytes of each tensor, in
pieces with checksums.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import http.server
import json
import secrets
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from inprocess.exception import LiveStateError
from inprocess.live.transfer import Shown, Wire, checksum, compare, in_one_piece, pieces, view
from inprocess.live.tree import Record
from inprocess.stores.connections import address_towards
from inprocess.system.interpreter import SLICE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["HttpWire"]

#: of a connection, without any byte (seconds)
SILENCE = 60.0


class HttpWire(Wire):
    """Like `Wire`, but states do not go over the group.

    Args:
        group: of the ranks.
        store: of the iteration; where addresses and tokens are.
    """

    def __init__(self, group: ProcessGroup | None, store: Any) -> None:
        super().__init__(group)
        self._store = store
        self._response: http.client.HTTPResponse | None = None

    def send(self, record: Record, header: bytes, to: int) -> None:
        with _Served(record, header, address_towards(self._store)) as served:
            where = json.dumps({"host": served.host, "port": served.port, "token": served.token})
            self._store.set(_key(self.rank, to), where)
            while not served.fetched.wait(SLICE):  # in slices: it is no hang. A receiver that fails interrupts it
                pass
            self._store.delete_key(_key(self.rank, to))  # should there be another recover()

    def receive_header(self, source: int) -> bytes:
        where = json.loads(self._store.get(_key(source, self.rank)))
        connection = http.client.HTTPConnection(where["host"], where["port"], timeout=SILENCE)
        connection.request("GET", "/", headers={"Authorization": f"Bearer {where['token']}"})
        self._response = connection.getresponse()  # it closes the connection at its end
        if self._response.status != http.HTTPStatus.OK:
            raise LiveStateError(f"rank {source} does not serve its state: {self._response.reason}")
        return self._read(int.from_bytes(self._read(8, source), "big"), source)

    def receive(self, record: Record, source: int, what: str) -> None:
        shown, sums = Shown(what, record.bytes), []
        with in_one_piece(record.tensors) as rooms:
            for piece in pieces(rooms):
                room = piece if piece.device.type == "cpu" else torch.empty_like(piece, device="cpu")
                self._read_into(view(room), source)
                if room is not piece:
                    piece.copy_(room)
                sums.append(checksum(room))
                shown.more(room.numel())
            if sums:
                theirs = torch.frombuffer(bytearray(self._read(8 * len(sums), source)), dtype=torch.int64)
                compare(torch.stack(sums), theirs, what)
        assert self._response is not None
        self._response.close()
        self._response = None

    def _read(self, size: int, source: int) -> bytes:
        data = bytearray(size)
        self._read_into(memoryview(data), source)
        return bytes(data)

    def _read_into(self, view: memoryview, source: int) -> None:
        assert self._response is not None
        while view:
            count = self._response.readinto(view)
            if not count:
                raise LiveStateError(f"rank {source} ended in the middle of its state")
            view = view[count:]


class _Served:
    """A server for one state, until it is closed."""

    def __init__(self, record: Record, header: bytes, host: str) -> None:
        self.host, self.token, self.fetched = host, secrets.token_urlsafe(32), threading.Event()
        served = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = SILENCE

            def do_GET(self) -> None:
                given = self.headers.get("Authorization", "")
                if not hmac.compare_digest(given.encode(), f"Bearer {served.token}".encode()):
                    self.send_error(http.HTTPStatus.UNAUTHORIZED, "another token")
                    return
                self.send_response(http.HTTPStatus.OK)
                self.send_header("Content-Type", "application/octet-stream")
                self.end_headers()
                with contextlib.suppress(OSError):  # it has gone
                    for data in _content(record, header):
                        self.wfile.write(data)
                    served.fetched.set()

            def log_message(self, *_: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = False  # they are joined when it is closed

            def process_request(self, request: Any, client_address: Any) -> None:
                served._connections.append(request)
                super().process_request(request, client_address)

        self._connections: list[socket.socket] = []
        self._server = Server((host, 0), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="inprocess-http")
        self._thread.daemon = True

    def __enter__(self) -> _Served:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        # who is in the middle of it gets no more; and nobody's request is waited for, a stranger may never send one
        how = socket.SHUT_RD if self.fetched.is_set() else socket.SHUT_RDWR
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(how)
        self._server.server_close()
        self._thread.join()


def _content(record: Record, header: bytes) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(8, "big")
    yield header
    sums = []
    for piece in pieces(record.tensors):
        data = piece.cpu()
        sums.append(checksum(data))
        yield view(data)
    if sums:
        data = torch.stack(sums)  # has a name: it lives while it is sent
        yield view(data)


def _key(source: int, to: int) -> str:
    return f"inprocess-live/{source}/{to}"
