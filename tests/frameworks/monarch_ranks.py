"""The actor of `monarch_driver`. Not in its main module, which Monarch pickles by value."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from monarch.actor import Actor, endpoint

import inprocess
from tests.frameworks import actor_ranks


def begin(environ: dict[str, str]) -> None:
    """In the rank's process, which is not to outlive the actor."""
    os.environ.update(environ)
    threading.Thread(target=_end_with_the_actor, daemon=True).start()


def _end_with_the_actor() -> None:
    actor = multiprocessing.parent_process()
    assert actor is not None
    actor.join()
    os._exit(1)


class Worker(Actor):
    """An endpoint runs in a thread of the actor's process, and a rank needs the main one: it gets a process."""

    @endpoint
    def run(self, rank: int, port: int, fault: str) -> dict[str, Any]:
        environ = actor_ranks.environ_of(rank, port, f"monarch-{port}")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), begin, (environ,)) as pool:
            return pool.submit(actor_ranks.run, fault).result()

    @endpoint
    def run_here(self) -> str:
        try:
            inprocess.Wrapper()(actor_ranks.train)("raise 0")
        except inprocess.RestartError as error:
            return str(error)
        return ""
