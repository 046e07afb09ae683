"""The socket on which workers reach their launcher: a file in a folder of its own, and who is at the other end."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import struct
import tempfile

from inprocess.system.private_folder import own

__all__ = ["PREFIX", "listen", "peer"]

#: the directory's name begins so, and this is the socket in it
PREFIX, NAME = "inprocess-run-", "control"
_DIRECTORY, _SOCKET = re.compile(rf"{PREFIX}.*"), re.compile(rf"{NAME}(\.new)?")
#: longest path of a Unix socket (bytes, without the zero at its end)
MAX_PATH_BYTES = 107


def listen(backlog: int) -> tuple[str, socket.socket]:
    """(path, socket) in a private directory. Where the usual place has too long a name: in /tmp.

    The socket gets its name once it listens: one of that name that refuses belonged to a launcher that was killed.
    """
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > MAX_PATH_BYTES - len(f"/{PREFIX}12345678/{NAME}.new"):
        parent = "/tmp"
    _sweep(parent)
    directory = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    path = os.path.join(directory, NAME)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"{path}.new")
        listener.listen(backlog)
        listener.setblocking(False)
        os.rename(f"{path}.new", path)
    except BaseException:
        listener.close()
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return path, listener


def _sweep(parent: str) -> None:
    """Remove what launchers of this user left that could not do so themselves."""
    with contextlib.suppress(OSError), own(parent) as folder:
        for name in folder.names(_DIRECTORY):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                folder.below(name, makes=False).close()  # it is this user's
                probe.setblocking(False)
                if probe.connect_ex(os.path.join(parent, name, NAME)) == errno.ECONNREFUSED:
                    folder.remove_below(name, _SOCKET)


def peer(connection: socket.socket) -> int:
    """The process at the other end; -1: it is another user's."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid) if uid == os.geteuid() else -1
