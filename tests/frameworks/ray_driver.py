"""A program for Ray: three actors, each a rank; where one is killed, a new actor takes its place, unless it is
lost. Prints a report."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray

from tests.frameworks import actor_ranks
from tests.frameworks.actor_ranks import WORLD_SIZE


@ray.remote(num_cpus=1, max_concurrency=1)
class Worker:
    """An actor's methods run in the main thread of its process, unless it is asynchronous or threaded."""

    def pid(self) -> int:
        return os.getpid()

    def run(self, rank: int, port: int, fault: str) -> dict[str, Any]:
        job = f"ray-{ray.get_runtime_context().get_job_id()}"
        os.environ.update(actor_ranks.environ_of(rank, port, job))
        return actor_ranks.run(fault)


def main(fault: str, port: int) -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    workers = [Worker.remote() for _ in range(WORLD_SIZE)]
    before = ray.get([worker.pid.remote() for worker in workers])
    running = {worker.run.remote(rank, port, fault): rank for rank, worker in enumerate(workers)}
    found: dict[int, Any] = {}
    replaced = []
    while running:
        (done,), _ = ray.wait(list(running), num_returns=1)
        rank = running.pop(done)
        try:
            found[rank] = ray.get(done)
        except ray.exceptions.RayActorError:
            if fault.startswith("lose"):
                continue
            replaced.append(rank)
            workers.append(Worker.remote())
            running[workers[-1].run.remote(rank, port, fault)] = rank
    print(
        json.dumps({"before": before, "found": [found.get(rank) for rank in range(WORLD_SIZE)], "replaced": replaced})
    )
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
