"""A TCP port that stays ours until a server uses it: bound with SO_REUSEADDR, never listening.

Linux lets a second socket with SO_REUSEADDR bind and listen on such a port (torch's TCPStore sets it), while an
automatic choice of a port (bind to 0, connect) avoids it. So there is no moment in which somebody else can take it.
"""

from __future__ import annotations

import socket
from types import TracebackType


class ReservedPort:
    """Holds one free port of 127.0.0.1; `number` is the port. Use as a context manager or call `close()`."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
