"""The library's TCPStore and `EtcdStore` side by side: an operation, and a restart. `python -m benchmarks.stores`

Needs etcd (a cluster of one member is started on loopback) and the test extra. Prints two tables with medians; the
stores take turns, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from inprocess.store import EtcdStore
from inprocess.stores import serving
from inprocess.stores import tcp as store
from tests.harness import At, Kill, Raise, Run
from tests.harness.etcd import EtcdCluster
from tests.harness.launch import PATIENT
from tests.ranks import targets

RANKS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1000)
    parser.add_argument("--restarts", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cluster = EtcdCluster(Path(folder))
        try:
            table("one operation (ms)", operations(cluster, options.operations))
            table("a restart (ms)", restarts(cluster, options.restarts))
        finally:
            cluster.close()


def table(title: str, rows: Mapping[str, tuple[list[float], list[float]]]) -> None:
    """Medians in milliseconds."""
    print(f"| {title} | TCPStore | EtcdStore |\n| --- | --- | --- |")
    for name, times in rows.items():
        print(f"| {name} | " + " | ".join(f"{statistics.median(each) * 1e3:.2f}" for each in times) + " |")
    print(flush=True)


# --- one operation ------------------------------------------------------------------------------------------------


def operations(cluster: EtcdCluster, count: int) -> dict[str, tuple[list[float], list[float]]]:
    server = serving.serve("127.0.0.1", 0)
    makes: tuple[Callable[[], Any], ...] = (
        lambda: store.TCPStore("127.0.0.1", server.port),
        lambda: EtcdStore(cluster.endpoints, "operations"),
    )
    measured = [measure(make, count) for make in makes]
    return {name: (measured[0][name], measured[1][name]) for name in measured[0]}


def measure(make: Callable[[], Any], count: int) -> dict[str, list[float]]:
    connection, other = make(), make()
    actions: dict[str, Callable[[int], Any]] = {
        "set": lambda n: connection.set(f"set{n % 10}", "value"),
        "read": lambda n: connection.inprocess_read("set0"),
        "claim": lambda n: connection.inprocess_claim(f"claim{n}", "value"),
        "add": lambda n: connection.add("count", 1),
    }
    times = {name: [timed(action, n) for n in range(count)] for name, action in actions.items()}
    times["a set that wakes a waiter"] = [woken(connection, other, n) for n in range(count // 10)]
    return times


def timed(action: Callable[[int], Any], number: int) -> float:
    begin = time.monotonic()
    action(number)
    return time.monotonic() - begin


def woken(connection: Any, other: Any, number: int) -> float:
    """From before the set until the waiter has the value."""
    ends: list[float] = []

    def wait() -> None:
        other.set_timeout(timedelta(seconds=20))
        other.get(f"wake{number}")
        ends.append(time.monotonic())

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.02)  # it waits by now
    begin = time.monotonic()
    connection.set(f"wake{number}", "value")
    waiter.join()
    return ends[0] - begin


# --- a restart ----------------------------------------------------------------------------------------------------


def restarts(cluster: EtcdCluster, count: int) -> dict[str, tuple[list[float], list[float]]]:
    """From the fault to the entry of the function on the last rank; the others are in an all-reduce."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for name, fault in {"one of 4 ranks raises": Raise(), "one of 4 ranks is killed": Kill()}.items():
        found[name] = ([], [])
        for number in range(count):
            through = {"endpoints": cluster.endpoints, "namespace": f"{name} {number}"}
            etcd = {"store_factory": EtcdStore, "store_kwargs": through}
            for times, options in zip(found[name], ({}, etcd), strict=True):
                times.append(restart(fault, dict(PATIENT) | options))
    return found


def restart(fault: Any, options: Mapping[str, Any]) -> float:
    run = Run(targets.run_train, RANKS, faults={At(1, step=1): fault}, wrapper=options)
    try:
        run.wait_event("enter", iteration=1, count=RANKS - isinstance(fault, Kill))
        events = [event for rank in run.ranks for event in rank.events]
    finally:
        run.close()
    struck = next(event["t"] for event in events if event["event"] == "fault")
    return max(event["t"] for event in events if event["event"] == "enter" and event["iteration"] == 1) - struck


if __name__ == "__main__":
    main()
