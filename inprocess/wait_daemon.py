"""``python -m inprocess.wait_daemon PIDFILE...``: waits until the monitor processes named in these files have ended.

For batch scripts. A monitor outlives its training process for a moment, to tell the other ranks how it ended; where the
scheduler kills what is left of a job step, such as SLURM, run this as the last command of the step.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from inprocess.monitor.pidfile import is_monitor, read
from inprocess.system.descriptors import await_readable

__all__ = ["main", "wait_daemon"]


def wait_daemon(pidfile: str) -> str:
    """Wait until the monitor process whose id is in ``pidfile`` has ended; no polling.

    Returns:
        what happened, in words. A missing file, and one that names no live monitor process, is not an error:
        monitors remove their file when they end.

    Raises:
        OSError: the file cannot be read, or is no pid file.
    """
    try:
        pid = read(pidfile)
    except FileNotFoundError:
        return f"{pidfile} does not exist: the monitor has ended, or was never started"
    if pid is None:
        raise OSError(f"{pidfile} is empty, it holds no process id: name a monitor_process_pidfile")
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return f"the monitor process {pid} has ended already"
    try:
        # looked at after the descriptor was opened: from then on it stands for this process, whatever the number does
        if not is_monitor(pid):
            return f"the monitor process {pid} has ended already, and its number belongs to another process"
        await_readable(descriptor)
        return f"the monitor process {pid} has ended"
    finally:
        os.close(descriptor)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 0, or 1 where a file could not be understood."""
    parser = argparse.ArgumentParser(prog="python -m inprocess.wait_daemon", description=__doc__)
    parser.add_argument("pidfile", nargs="+", metavar="PIDFILE", help="what monitor_process_pidfile names")
    code = 0
    for pidfile in parser.parse_args(arguments).pidfile:
        try:
            print(wait_daemon(pidfile))
        except OSError as error:
            print(f"wait_daemon: {error}", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
