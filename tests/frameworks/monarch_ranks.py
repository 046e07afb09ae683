"""What the actors of `monarch_driver` run. Not in its main module, which Monarch pickles by value."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from monarch.actor import Actor, endpoint

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


def begin(environ: dict[str, str]) -> None:
    """In the rank's process, which is not to outlive the actor."""
    os.environ.update(environ)
    threading.Thread(target=_end_with_the_actor, daemon=True).start()


def _end_with_the_actor() -> None:
    actor = multiprocessing.parent_process()
    assert actor is not None
    actor.join()
    os._exit(1)


def run(fault: str) -> dict[str, Any]:
    least = WORLD_SIZE - fault.startswith("lose")
    wait = RetryController(min_world_size=least, wait_for_replacement=120)
    return inprocess.Wrapper(initialize=wait)(train)(fault)


class Worker(Actor):
    """An endpoint runs in a thread of the actor's process, and a rank needs the main one: it gets a process."""

    @endpoint
    def run(self, rank: int, port: int, fault: str) -> dict[str, Any]:
        environ = {"RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE), "INPROCESS_JOB": f"monarch-{port}"}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), begin, (environ,)) as pool:
            return pool.submit(run, fault).result()

    @endpoint
    def run_here(self) -> str:
        try:
            inprocess.Wrapper()(train)("raise 0")
        except inprocess.RestartError as error:
            return str(error)
        return ""
