"""What a rank costs while nothing happens, at default options: processor time, the monitor's memory, store operations.

The wrapped function sleeps. ``python -m benchmarks.idle --library inprocess`` prints one line of JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import psutil

from benchmarks import libraries
from benchmarks.job import Job, free_port, mark, output

RANKS = 2
#: what starting up leaves to be done is over (seconds)
SETTLE = 2.0
SYS_PIDFD_GETFD = 438
#: the clock of another process, see clock_getcpuclockid(3)
CPUCLOCK_SCHED = 2
#: places in Linux' struct tcp_info
BYTES_RECEIVED, DATA_SEGMENTS_IN = 128, 152


def main(options: argparse.Namespace, rank: int) -> None:
    def body(call: libraries.Call) -> None:
        mark("entry", rank, 0)
        time.sleep(SETTLE + options.seconds + 60)  # it is killed when the measurement is done

    libraries.wrap(options.library, options.setting, rank, body, {})()


def processor_time(pid: int) -> float:
    """Seconds that a process has run, threads that have ended included, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED)


def requests(pids: list[int]) -> tuple[int, int]:
    """Data segments and bytes that servers in these processes have received: each request is one segment."""
    segments = size = 0
    for pid in pids:
        ports = {c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        for connection in sockets(pid):
            with connection:
                if connection.getsockname()[1] in ports:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    segments += struct.unpack_from("=I", info, DATA_SEGMENTS_IN)[0]
                    size += struct.unpack_from("=Q", info, BYTES_RECEIVED)[0]
    return segments, size


def sockets(pid: int) -> Iterator[socket.socket]:
    """Copies of the established connections of another process."""
    handle = os.pidfd_open(pid)
    libc = ctypes.CDLL(None, use_errno=True)
    for connection in psutil.Process(pid).net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED:
            copy = libc.syscall(SYS_PIDFD_GETFD, handle, connection.fd, 0)
            if copy >= 0:
                yield socket.socket(fileno=copy)
    os.close(handle)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with Job(RANKS) as job:
        job.start(lambda rank: main(options, rank), free_port())
        job.wait(lambda marks: len([found for found in marks if found.name == "entry"]) == RANKS, 60)
        time.sleep(SETTLE)
        ranks = list(job.pids.values())
        monitors = [child.pid for child in psutil.Process().children(recursive=True) if child.pid not in ranks]
        before = [sum(map(processor_time, pids)) for pids in (ranks, monitors)], requests(ranks + monitors)
        begin = time.monotonic()
        time.sleep(options.seconds)
        took = time.monotonic() - begin
        after = [sum(map(processor_time, pids)) for pids in (ranks, monitors)], requests(ranks + monitors)
        memory = sum(psutil.Process(pid).memory_full_info().uss for pid in monitors) / RANKS / 1e6
    share = [(late - early) / took / RANKS * 100 for early, late in zip(before[0], after[0], strict=True)]
    traffic = [(late - early) / took / RANKS for early, late in zip(before[1], after[1], strict=True)]
    values = {
        "main_percent": round(share[0], 4),
        "monitor_percent": round(share[1], 4),
        "percent": round(sum(share), 4),
        "monitor_mb": round(memory, 1),
        "store_operations": round(traffic[0], 2),
        "store_bytes": round(traffic[1], 1),
    }
    return {"library": options.library, "setting": options.setting, "values": values, "note": ""}


if __name__ == "__main__":
    arguments = libraries.parser(__doc__, "inprocess", "nvrx")
    arguments.add_argument("--seconds", type=float, default=10.0)
    output(**measure(arguments.parse_args()))
