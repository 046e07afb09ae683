"""The user's own files, replaced as a whole: nobody sees half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable

__all__ = ["put_in_place"]

#: bytes of a name that is made longer here; a file system takes 255
LONGEST_NAME = 200


def put_in_place(path: str, write: Callable[[str], object]) -> None:
    """Have ``write`` fill a new file in the same folder, put it on the disk, then in the place of ``path`` in one step.

    ``write`` makes that file, as the user's own: with the mode of any new file. Where something fails, the file is
    removed, and what stood there before stays.
    """
    path = os.path.realpath(path)  # a link stays one
    folder, name = os.path.split(path)
    short = os.fsdecode(os.fsencode(name)[:LONGEST_NAME])
    beside = os.path.join(folder, f".{short}.{secrets.token_hex(8)}.new")  # another host may write the same path
    folder_fd = _open_folder(folder)  # before anything is written: from the moment of the rename nothing may fail
    try:
        write(beside)
        _sync(_open_regular(beside))
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        if folder_fd is not None:
            os.close(folder_fd)
        raise
    if folder_fd is not None:
        with contextlib.suppress(OSError):  # the new file is in place: some file systems can do no more (9p, vboxsf)
            _sync(folder_fd)


def _open_folder(path: str) -> int | None:
    """To put its entries on the disk. None: it may be written, and not read; or `write` will tell what is wrong."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    return None


def _sync(fd: int) -> None:
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_regular(path: str) -> int:
    """A descriptor to read from. Raises OSError, also where it is a link, a pipe or a device."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("it is no regular file")
    return fd
