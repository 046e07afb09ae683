"""JSON objects in a stream, one in each line."""

from __future__ import annotations

import json
import socket
from typing import Any

from inprocess.system import strict_json

__all__ = ["MAX_LINE_BYTES", "Lines", "send_now"]

#: the longest line that is waited for (bytes)
MAX_LINE_BYTES = 1 << 16


class Lines:
    """JSON objects out of a stream, one in each line; ``limit``: the longest that is waited for (bytes)."""

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._rest, self._limit = b"", limit

    def take(self, data: bytes) -> list[dict[str, Any]]:
        """The objects that are complete with this piece of the stream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[: self._limit]  # what is longer is no line of ours and will not parse
        return [message for line in lines if isinstance(message := _parsed(line, self._limit), dict)]


def _parsed(line: bytes, limit: int) -> Any:
    try:
        return strict_json.parse(line, limit)
    except ValueError:
        return None


def send_now(connection: socket.socket, message: dict[str, Any]) -> bool:
    """Whether it has gone into the socket's buffer, as a whole: who does not read, or is dead, is not waited for."""
    line = json.dumps(message).encode() + b"\n"
    try:
        return connection.send(line, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT) == len(line)
    except OSError:
        return False
