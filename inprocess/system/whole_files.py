"""Small files that are replaced as a whole, and read with a bound: nobody sees half of one, or follows a link."""

from __future__ import annotations

import contextlib
import os
import stat

__all__ = ["open_regular", "read", "replace"]


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
