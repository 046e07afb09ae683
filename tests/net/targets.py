"""The functions that ranks on separate hosts run. They go on until the test says so (`Shared.finish`)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from inprocess.monitor.pidfile import PROGRAM
from inprocess.testing import leaks
from inprocess.testing.coordinates import When
from tests.harness.child import Context
from tests.ranks.targets import LONG, place_in_world, wait_until

from .shared import Shared
from .times import ALONE


def run_together(context: Context) -> Any:
    return _run(context, _together)


def run_apart(context: Context) -> Any:
    return _run(context, _apart)


def run_with_a_stopped_monitor(context: Context) -> Any:
    """Rank 1 stops its monitor as soon as there is one."""
    if context.rank != 1:
        return _run(context, _apart)
    stopping = threading.Thread(target=_stop_child)
    stopping.start()
    try:
        return _run(context, _apart)
    finally:
        stopping.join()


def _stop_child() -> None:
    def monitors() -> list[int]:
        return [pid for pid in leaks.children_of(os.getpid()) if PROGRAM in leaks.command_of(pid)]

    wait_until(lambda: bool(monitors()), every=0.001)
    os.kill(monitors()[0], signal.SIGSTOP)


def _run(context: Context, body: Callable[[Context, Any, Shared], Any]) -> Any:
    shared = Shared(context.args["folder"])
    try:
        value = context.wrap(lambda context, call: body(context, call, shared))()
        if context.args.get("leave_together"):  # else the store's host outlives its call, and looks like a leftover
            context.wait_for(When("returned", context.args["world_size"] - 1))
        return value
    finally:
        shared.close()


def at_least_two_without_standbys(context: Context) -> dict[str, Any]:
    from inprocess.initialize import RetryController

    return {**ALONE, "initialize": RetryController(min_world_size=2)}


def _together(context: Context, call: Any, shared: Shared) -> list[int]:
    """Steps with an all-reduce and a checkpoint each, until all have seen that the test wants the end."""
    rank, size = place_in_world()
    dist.init_process_group("gloo", timeout=LONG)
    step = 0
    while not _reduce(rank, size, shared.finishing):
        context.point(step)
        call.ping()
        shared.run(context.rank)
        with call.atomic():
            shared.write(context.rank, call.iteration, step)
        _report(context, step)
        step += 1
    dist.destroy_process_group()
    return [call.iteration, rank, size]


def _reduce(rank: int, size: int, finishing: bool) -> bool:
    """One all-reduce: its sum is right only if exactly the ranks of this iteration take part. Whether one wants to
    end, which all learn in the same step."""
    tensor = torch.tensor([rank + 1, int(finishing)])
    dist.all_reduce(tensor)
    assert tensor[0].item() == size * (size + 1) // 2, f"sum {tensor[0].item()} with {size} ranks"
    return bool(tensor[1].item())


def _apart(context: Context, call: Any, shared: Shared) -> list[int]:
    """Computes in Python and never waits for anybody, so nothing but the library stops it. A checkpoint each
    millisecond."""
    rank, size = place_in_world()
    step, due = 0, 0.0
    shared.run(context.rank)  # also where the test has seen the entry, and wants the end already
    while not shared.finishing:
        shared.run(context.rank)
        if (now := time.monotonic()) >= due:
            with call.atomic():
                shared.write(context.rank, call.iteration, step)
            _report(context, step)
            step, due = step + 1, now + 0.001
    return [call.iteration, rank, size]


def _report(context: Context, step: int) -> None:
    if step == 3:
        context.emit("busy")
