"""A program for Ray: three actors, each a rank; where one is killed, a new actor takes its place, unless it is
lost. Prints a report."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray
import torch
import torch.distributed as dist

import inprocess
from inprocess.initialize import RetryController

WORLD_SIZE, STEPS = 3, 30


def train(fault: str, call: inprocess.CallWrapper = None) -> dict[str, Any]:  # type: ignore[assignment]
    dist.init_process_group("gloo")
    for step in range(STEPS):
        call.ping()
        dist.all_reduce(total := torch.ones(1))
        if step == 10 and call.iteration == 0 and dist.get_rank() == int(fault[-1]):
            if not fault.startswith("raise"):
                os.kill(os.getpid(), 9)
            raise OSError("injected")
    return {"iteration": call.iteration, "sum": total.item(), "pid": os.getpid()}


@ray.remote(num_cpus=1, max_concurrency=1)
class Worker:
    """An actor's methods run in the main thread of its process, unless it is asynchronous or threaded."""

    def pid(self) -> int:
        return os.getpid()

    def run(self, rank: int, port: int, fault: str) -> dict[str, Any]:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ["INPROCESS_JOB"] = f"ray-{ray.get_runtime_context().get_job_id()}"
        least = WORLD_SIZE - fault.startswith("lose")
        wait = RetryController(min_world_size=least, wait_for_replacement=120)
        return inprocess.Wrapper(initialize=wait)(train)(fault)


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
