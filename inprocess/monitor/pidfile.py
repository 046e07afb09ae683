"""The file that monitor_process_pidfile names, read with care, for another process may have put anything there; and
what /proc says of the process that it names."""

from __future__ import annotations

import os
import stat

__all__ = ["PROGRAM", "is_monitor", "read", "start_time", "stat_fields"]

#: part of the command line of each monitor process
PROGRAM = "inprocess.monitor.program"
#: no process has a larger id
_LARGEST = (1 << 31) - 1


def read(path: str) -> int | None:
    """The process id in the file, None where it is empty.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read, or is no pid file.
    """
    # not through a link, and without waiting for the other end of a pipe that somebody has put there
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        text = os.read(descriptor, 32).strip()
    finally:
        os.close(descriptor)
    if text and (not text.isdigit() or int(text) > _LARGEST):
        raise OSError(f"{path} is not a pid file, it holds something else: {text!r} is no process id")
    return int(text) if text else None


def is_monitor(pid: int) -> bool:
    """Whether this is a live monitor process."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return PROGRAM.encode() in file.read()
    except OSError:
        return False


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the third on; empty where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def start_time(pid: int) -> str:
    """Tells this process from a later one with the same id."""
    fields = stat_fields(pid)
    return fields[19] if fields else ""
