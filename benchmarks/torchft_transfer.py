"""How fast torchft gives a state to another process: both of its transports. Prints one line of JSON.

``python -m benchmarks.torchft_transfer --gigabytes 1 --rounds 7``, in an environment of its own with torch and torchft.
Two processes on loopback; the receiving one has tensors of the same shapes, which the transport over a process group
fills in place.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.checkpointing.pg_transport import PGTransport
from torchft.process_group import ProcessGroupGloo, reconfigure_with_store

from benchmarks.job import free_port

SIDE = 2048  # as in benchmarks.live
TIMEOUT = timedelta(seconds=60)
#: requests at a time
CHUNKS = 2


def state(count: int) -> dict[str, torch.Tensor]:
    return {f"layer {number}": torch.rand(SIDE, SIDE) for number in range(count)}


def rank(number: int, port: int, count: int, rounds: int, results: Any) -> None:
    logging.disable()  # each transfer is logged in detail
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=number == 0, timeout=TIMEOUT)
    mine = state(count)
    group = ProcessGroupGloo(TIMEOUT)
    reconfigure_with_store(group, f"127.0.0.1:{port}/group", number, 2)
    over_group = PGTransport(group, TIMEOUT, torch.device("cpu"), lambda: mine)
    over_http = HTTPTransport(TIMEOUT, CHUNKS)
    if number == 0:
        store.set("address", over_http.metadata())
    address = store.get("address").decode()
    times: dict[str, list[float]] = {}
    for step in range(rounds):
        for name, transport in (("over a process group", over_group), ("over HTTP", over_http)):
            meet(store, f"{name} {step}", number)
            begin = time.perf_counter()
            if number == 0:
                transport.send_checkpoint([1], step, mine, TIMEOUT)
            else:
                transport.recv_checkpoint(0, address, step, TIMEOUT)
            times.setdefault(name, []).append(time.perf_counter() - begin)
            meet(store, f"{name} {step} is over", number)
            if number == 0:
                transport.disallow_checkpoint()
    over_http.shutdown()
    if number == 1:
        results.send({name: statistics.median(found) for name, found in times.items()})
    meet(store, "the end", number)


def meet(store: TCPStore, name: str, number: int) -> None:
    store.set(f"{name}/{number}", "")
    store.wait([f"{name}/{1 - number}"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results, sender = context.Pipe(duplex=False)
    count = max(1, round(given.gigabytes * 1e9 / (4 * SIDE * SIDE)))
    port = free_port()
    ranks = [context.Process(target=rank, args=(n, port, count, given.rounds, sender)) for n in range(2)]
    for each in ranks:
        each.start()
    sender.close()  # the ranks have it: should both end without a result, there is an EOFError
    print(json.dumps(results.recv()))
    for each in ranks:
        each.join()
