"""Runs of our own tests, and the options that most of them have."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from inprocess.system import procfs
from inprocess.testing import leaks, run, server

from .child import Context, Options

#: what the forkserver imports beside the library
PRELOAD = (
    "pytest",
    "torch.distributed.fsdp",
    "tests.harness.child",
    "tests.ranks.targets",
    "tests.ranks.learning",
    "tests.chaos.training",
)
#: of options that no test is about: far longer than a test runs, so that a slow machine is never a fault
PATIENT: Mapping[str, Any] = {
    "soft_timeout": 40,
    "hard_timeout": 45,
    "heartbeat_timeout": 30,
    "barrier_timeout": 50,
    "completion_timeout": 50,
    "heartbeat_interval": 0.5,
    "monitor_thread_interval": 0.25,
    "monitor_process_interval": 0.25,
    "progress_watchdog_interval": 0.25,
    "termination_grace_time": 0.5,
}
#: for tests of hangs: a rank without progress is noticed after two seconds
HASTY: Mapping[str, Any] = PATIENT | {"soft_timeout": 2, "hard_timeout": 20, "progress_watchdog_interval": 0.1}
#: and killed after five, so a healthy one must never stand still for three
KILLING: Mapping[str, Any] = HASTY | {"hard_timeout": 5}
#: for tests of lost hosts
BEATING: Mapping[str, Any] = PATIENT | {"heartbeat_interval": 0.2, "heartbeat_timeout": 4}
#: and where the job ends with the host of its store
ALONE: Mapping[str, Any] = BEATING | {"standby_stores": 0}


def strangers(known: Collection[int] = ()) -> list[int]:
    """Processes below this one that are neither known, nor below one that is, nor multiprocessing's own, nor dead and
    another one's to reap."""
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        below = [pid for pid in leaks.children_of(waiting.pop()) if pid not in known]
        waiting += below
        found += [pid for pid in below if pid not in server.servers()]
    mine = leaks.children_of(os.getpid())  # afterwards: one whose parent has just ended has come to this process
    return [pid for pid in found if pid in mine or procfs.state_of(pid)["state"] != "Z"]


class Run(run.Run):
    """With the `Context` of our own tests and, where nothing else is given, patient options."""

    def __init__(
        self, target: Callable[[Context], Any], world_size: int, *, wrapper: Options | None = None, **more: Any
    ) -> None:
        super().__init__(target, world_size, wrapper=PATIENT if wrapper is None else wrapper, context=Context, **more)
