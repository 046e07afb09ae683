"""What `ping()` and `atomic()` cost: nanoseconds per call, and of processor time in all threads of the process.

Also, as the unit of what a restart is made of: a round trip to a torch TCPStore server in another process.

``python -m benchmarks.calls --library inprocess`` prints one line of JSON.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from benchmarks import libraries
from benchmarks.job import LIBUV, Job, free_port, mark, output

CALLS = 200_000
ROUND_TRIPS = 3000


def main(options: argparse.Namespace, rank: int) -> None:
    def body(call: libraries.Call) -> None:
        call.ping()  # the first one begins the timeout
        for name, loop in (("ping", ping), ("atomic", atomic)):
            wall, cpu = per_call(loop, call)
            mark(name, rank, 0, wall=wall, cpu=cpu)
        mark("store", rank, 0, wall=round_trip())

    libraries.wrap(options.library, options.setting, rank, body, {})()


def per_call(loop: Callable[[libraries.Call, int], None], call: libraries.Call) -> tuple[float, float]:
    """Nanoseconds per call, with the loop's own share taken off: of time, and of all threads' processor time."""
    loop(call, CALLS // 10)
    bare, bare_cpu = timed(lambda: empty(CALLS))
    full, full_cpu = timed(lambda: loop(call, CALLS))
    return (full - bare) / CALLS, (full_cpu - bare_cpu) / CALLS


def round_trip() -> float:
    """Nanoseconds, the median."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["BENCHMARK_STORE"]), is_master=False, use_libuv=LIBUV)
    took = []
    for _ in range(ROUND_TRIPS):
        begin = time.perf_counter_ns()
        store.add("round-trip", 1)
        took.append(time.perf_counter_ns() - begin)
    return statistics.median(took)


def timed(action: Callable[[], None]) -> tuple[int, int]:
    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    action()
    return time.perf_counter_ns() - wall, time.process_time_ns() - cpu


def empty(count: int) -> None:
    for _ in range(count):
        pass


def ping(call: libraries.Call, count: int) -> None:
    beat = call.ping
    for _ in range(count):
        beat()


def atomic(call: libraries.Call, count: int) -> None:
    section = call.atomic
    for _ in range(count):
        with section():
            pass


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with Job(1) as job:
        job.start(lambda rank: main(options, rank), free_port(), peer_store=True)
        job.wait(lambda marks: any(found.name == "store" for found in marks), 60)
        job.let_end()
        values = {
            f"{found.name}_{kind}": round(value, 1)
            for found in job.marks
            if found.name in ("ping", "atomic", "store")
            for kind, value in found.fields.items()
        }
    return {"library": options.library, "setting": options.setting, "values": values, "note": ""}


if __name__ == "__main__":
    arguments = libraries.parser(__doc__, "inprocess", "nvrx")
    output(**measure(arguments.parse_args()))
