"""A training that tells whose processes take part in it."""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist

from tests.harness.child import Context


def held(context: Context, call: Any) -> list[Any]:
    """Until the flag is there. Answers the jobs of all that took part, and how many these were."""
    dist.init_process_group("gloo")
    context.emit("at")
    context.emit("settled")
    seen = set()
    while True:
        call.ping()
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, (context.args["job"], os.path.exists(context.args["flag"])))
        seen.update(name for name, _ in names)
        if any(done for _, done in names):
            dist.destroy_process_group()
            return [sorted(seen), len(names)]
        time.sleep(0.05)


def run_held(context: Context) -> Any:
    """It is settled what becomes of a process when it trains, or has ended."""
    try:
        return context.wrap(held)()
    finally:
        context.emit("settled")


def run_held_elsewhere(context: Context) -> Any:
    """Where the processes of another job are not."""
    os.chdir(context.args["folder"])
    return run_held(context)
