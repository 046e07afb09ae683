"""States on the way from one rank to another, over HTTP: where the process group should be left alone, or cannot send.

Whoever sends serves the state on a port of its own for as long as it takes, to whoever has the token, which is in the
iteration's store with the address. What is sent is what `transfer` sends: the header and the bytes of each tensor, in
pieces with checksums.
"""

from __future__ import annotations

import hmac
import http.client
import secrets
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from inprocess.exception import LiveStateError
from inprocess.live.transfer import Shown, Wire, checksum, compare, in_one_piece, pieces, view
from inprocess.live.tree import Record
from inprocess.protocol.parsing import load_door
from inprocess.stores.addresses import lookup
from inprocess.stores.connections import address_towards
from inprocess.system.errors import in_words
from inprocess.system.http_server import Exchange, HttpServer
from inprocess.system.interpreter import SLICE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["HttpWire"]

#: of a connection, without any byte (seconds)
SILENCE = 60.0
#: the most that a state holds besides its tensors (bytes)
MAX_HEADER_BYTES = 1 << 32


class HttpWire(Wire):
    """Like `Wire`, but states do not go over the group.

    Args:
        group: of the ranks.
        store: of the iteration; where addresses and tokens are.
    """

    def __init__(self, group: ProcessGroup | None, store: Any) -> None:
        super().__init__(group)
        self._group, self._store = group, store
        self._response: http.client.HTTPResponse | None = None

    def _key(self, source: int, to: int) -> str:
        """By the ranks of the job: groups that recover at the same time share its store."""
        group = self._group
        names = (each if group is None else dist.get_global_rank(group, each) for each in (source, to))
        return "inprocess-live/" + "/".join(map(str, names))

    def send(self, record: Record, header: bytes, to: int) -> None:
        with _Served(record, header, address_towards(self._store)) as served:
            self._store.set(self._key(self.rank, to), f"{served.token}@{served.host}:{served.port}")
            while not served.fetched.wait(SLICE):  # in slices: it is no hang. A receiver that fails interrupts it
                pass
            self._store.delete_key(self._key(self.rank, to))  # should there be another recover()

    def receive_header(self, source: int) -> bytes:
        key = self._key(source, self.rank)
        token, host, port = load_door(self._store.get(key), key)
        connection = http.client.HTTPConnection(host, port, timeout=SILENCE)
        try:
            connection.request("GET", "/", headers={"Authorization": f"Bearer {token}"})
            self._response = connection.getresponse()  # it closes the connection at its end
        except http.client.HTTPException as error:
            connection.close()
            raise LiveStateError(f"rank {source} does not serve its state: {in_words(error)}") from None
        if self._response.status != http.HTTPStatus.OK:
            raise LiveStateError(f"rank {source} does not serve its state: {self._response.reason}")
        size = int.from_bytes(self._read(8, source), "big")
        if size > MAX_HEADER_BYTES:
            raise LiveStateError(
                f"rank {source} announces {size} bytes, more than {MAX_HEADER_BYTES}, before its state"
            )
        return self._read(size, source)

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

        class Answer(Exchange):
            def do_GET(self) -> None:
                given = self.headers.get("Authorization", "")
                if not hmac.compare_digest(given.encode(), f"Bearer {served.token}".encode()):
                    self.send_error(http.HTTPStatus.UNAUTHORIZED, "another token")
                    return
                self.send_response(http.HTTPStatus.OK)
                self.send_header("Content-Type", "application/octet-stream")
                self.end_headers()
                self.is_known, self.content = True, served._whole(record, header)

        family, _, where = lookup(host, 0)[0]
        self._server = HttpServer(socket.create_server(where, family=family), "inprocess-http", Answer)
        self.port = self._server.port

    def _whole(self, record: Record, header: bytes) -> Iterator[bytes | memoryview]:
        yield from _content(record, header)
        self.fetched.set()

    def __enter__(self) -> _Served:
        try:
            self._server.start()
        except BaseException:
            self._server.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Who is in the middle of it gets no more, and nobody is waited for: a stranger may never send a request."""
        self._server.close()


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
