"""Small files that are replaced as a whole, and read with a bound: nobody sees half of one, or follows a link."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable

__all__ = ["open_regular", "put_in_place", "read", "replace"]


def replace(path: str, data: bytes) -> None:
    """In one step, with mode 0600. Only one process may write a path under the same process id. Raises OSError."""
    beside = f"{path}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):  # its writer was killed, or became another program
        os.unlink(beside)
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    finally:
        os.close(fd)


def put_in_place(path: str, write: Callable[[str], object]) -> None:
    """Have ``write`` fill a new file in the same folder, put it on the disk, then in the place of ``path`` in one step.

    ``write`` makes that file, as the user's own: with the mode of any new file. Where something fails, the file is
    removed, and what stood there before stays.
    """
    path = os.path.realpath(path)  # a link stays one
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.new")  # another host may write the same path
    try:
        write(beside)
        _sync(open_regular(beside))
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    _sync(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))


def _sync(fd: int) -> None:
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_regular(path: str) -> int:
    """A descriptor to read from. Raises OSError, also where it is a link, a pipe or a device."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("it is no regular file")
    return fd


def read(path: str, limit: int) -> bytes:
    """The first ``limit`` bytes. Raises OSError."""
    with open(open_regular(path), "rb") as file:
        return file.read(limit)
