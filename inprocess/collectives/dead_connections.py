"""Connections of groups that were aborted: closed when the next iteration is decided, and nobody is in the function.

Closing one resets it at the other end, and a peer whose event thread is just writing loses the operation, which then
waits until its timeout. So each rank ends its own reading, keeps a copy, and closes later.
"""

from __future__ import annotations

import os
import socket

__all__ = ["DeadConnections", "dead_connections"]


class DeadConnections:
    """Of one process; a `Part` of a call."""

    def __init__(self) -> None:
        self._active = False
        #: by inode: the abort is repeated until the function was left
        self._connections: dict[int, socket.socket] = {}

    def begin(self) -> None:
        """Close what is kept; keep what comes from now on."""
        self._close()
        self._active = True

    def keep(self, connection: socket.socket) -> None:
        """One that was just shut down."""
        if self._active and (inode := os.fstat(connection.fileno()).st_ino) not in self._connections:
            self._connections[inode] = connection.dup()

    def end(self) -> None:
        """Close what is kept, and keep nothing more."""
        self._active = False
        self._close()

    def _close(self) -> None:
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()


#: one per process
dead_connections = DeadConnections()
