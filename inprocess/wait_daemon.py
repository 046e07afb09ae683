"""``python -m inprocess.wait_daemon PIDFILE...``: waits until the monitor processes named in these files have ended.

For batch scripts. A monitor outlives its training process for a moment, to tell the other ranks how it ended; where the
scheduler kills what is left of a job step, such as SLURM, run this as the last command of the step.
"""

from __future__ import annotations

import argparse
import os
import select
import stat
import sys
from collections.abc import Sequence

__all__ = ["main", "wait_daemon"]

#: part of the command line of each monitor process
_PROGRAM = b"inprocess.monitor_main"
#: no process has a larger id
LARGEST = (1 << 31) - 1


def wait_daemon(pidfile: str) -> str:
    """Wait until the monitor process whose id is in ``pidfile`` has ended; no polling.

    Returns:
        what happened, in words. A missing file, and one that names no live monitor process, is not an error:
        monitors remove their file when they end.

    Raises:
        ValueError: the file holds no process id.
        OSError: the file cannot be read.
    """
    try:
        text = _read(pidfile)
    except FileNotFoundError:
        return f"{pidfile} does not exist: the monitor has ended, or was never started"
    if not text.isascii() or not text.isdigit() or int(text) > LARGEST:
        raise ValueError(f"{pidfile} holds {text!r}, which is no process id: name a monitor_process_pidfile")
    pid = int(text)
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return f"the monitor process {pid} has ended already"
    try:
        # looked at after the descriptor was opened: from then on it stands for this process, whatever the number does
        if not _is_monitor(pid):
            return f"the monitor process {pid} has ended already, and its number belongs to another process"
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        ended.poll()
        return f"the monitor process {pid} has ended"
    finally:
        os.close(descriptor)


def _read(pidfile: str) -> str:
    # not through a link, and without waiting for the other end of a pipe that somebody has put there
    descriptor = os.open(pidfile, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{pidfile} is not a regular file")
        return os.read(descriptor, 32).decode("ascii", errors="replace").strip()
    finally:
        os.close(descriptor)


def _is_monitor(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return _PROGRAM in file.read()
    except OSError:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 0, or 1 where a file could not be understood."""
    parser = argparse.ArgumentParser(prog="python -m inprocess.wait_daemon", description=__doc__)
    parser.add_argument("pidfile", nargs="+", metavar="PIDFILE", help="what monitor_process_pidfile names")
    code = 0
    for pidfile in parser.parse_args(arguments).pidfile:
        try:
            print(wait_daemon(pidfile))
        except (OSError, ValueError) as error:
            print(f"wait_daemon: {error}", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
