"""How long the other replicas of torchft need until they go on without one that was killed.

What is timed: each replica is one process (a replica group of world size 1) that repeats quorum, about two
milliseconds of Python work, an all-reduce on Gloo and the vote to commit. After ``--steps`` committed steps of all
replicas together, the victim takes part in one more quorum and sends itself SIGKILL where the others go into the
all-reduce. ``reduced`` runs from the kill until the last survivor has committed its first step whose all-reduce
result is that of all survivors.

torchft does not call a function again: the failed step is not committed, and the loop goes on with the next quorum. So
this compares with a restart up to the new group's first all-reduce, and with nothing before that.

``python -m benchmarks.torchft_restart --world-size 4 --victim 1 --tuned`` prints one line of JSON, the last one. It
needs torch and torchft alone, in an environment of their own. Steps that failed before the kill are in the note, so
``--steps 200`` also shows whether a setting is too tight for an undisturbed run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

#: Python work of a step (seconds)
WORK = 0.002
#: required by torchft; a larger one would make it wait for survivors that hang in the broken all-reduce
MIN_REPLICAS = 1
PR_SET_PDEATHSIG = 1


class Failed(Exception):
    """There is no figure; the message says why."""


@dataclass(frozen=True)
class Setting:
    """Arguments beyond the required ones."""

    lighthouse: dict[str, int] = field(default_factory=dict)
    manager: dict[str, timedelta] = field(default_factory=dict)
    group: dict[str, timedelta] = field(default_factory=dict)


SETTINGS = {
    "default": Setting(),
    # with a margin: beside a busy process 7 of 500 steps failed with timeouts of 20 ms, 2 with 50 ms, and in one run
    # none with 30 ms.
    # The heartbeat timeout removes the victim; the group's ends the all-reduce where no connection to the victim broke.
    # With a join timeout of 10 ms the replicas did not always find together at the start.
    "tuned": Setting(
        lighthouse={"heartbeat_timeout_ms": 100, "join_timeout_ms": 50, "quorum_tick_ms": 2},
        manager={"heartbeat_interval": timedelta(milliseconds=5)},
        group={"timeout": timedelta(milliseconds=100)},
    ),
}


@dataclass(frozen=True)
class Plan:
    """What every replica is told."""

    world_size: int
    victim: int
    steps: int
    setting: Setting
    lighthouse: str

    def mean(self, replicas: int) -> float:
        """All-reduce result of all replicas or of the survivors; replica ``i`` contributes ``2**i``."""
        total = 2**self.world_size - 1
        return (total if replicas == self.world_size else total - 2**self.victim) / replicas


# --- inside a replica ---------------------------------------------------------------------------------------------


def make_manager(plan: Plan, store: TCPStore) -> Manager:
    weights = {"weight": torch.zeros(8)}
    return Manager(
        pg=ProcessGroupGloo(**plan.setting.group),
        load_state_dict=weights.update,
        state_dict=lambda: weights,
        min_replica_size=MIN_REPLICAS,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=plan.lighthouse,
        hostname="127.0.0.1",
        **plan.setting.manager,
    )


def work() -> None:
    end = time.monotonic() + WORK
    while time.monotonic() < end:
        sum(range(100))


def step(manager: Manager, index: int, end: Connection | None = None) -> float:
    """The all-reduce result, NaN if it was not committed. With ``end``, the kill in place of the all-reduce."""
    manager.start_quorum()
    work()
    if end is not None:
        manager.wait_quorum()
        end.send(time.monotonic_ns())
        os.kill(os.getpid(), signal.SIGKILL)
    value = torch.tensor([float(2**index)])
    manager.allreduce(value).wait()
    return value.item() if manager.should_commit() else math.nan


def replica(index: int, plan: Plan, reports: Connection) -> None:
    """Steps without end. A survivor reports when it has committed without the victim, and when steps failed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.disable()  # tracebacks of the expected errors
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = make_manager(plan, store)
    together = 0
    failed: list[int] = []
    while True:
        ends = index == plan.victim and together >= plan.steps
        result = step(manager, index, reports if ends else None)
        if math.isclose(result, plan.mean(plan.world_size), rel_tol=1e-6):
            together += 1
        elif together and math.isclose(result, plan.mean(plan.world_size - 1), rel_tol=1e-6):
            break
        elif together:
            failed.append(time.monotonic_ns())
    reports.send((time.monotonic_ns(), failed))
    while True:  # until killed: the other survivors still need this one
        step(manager, index)


# --- the parent ---------------------------------------------------------------------------------------------------


def start(plan: Plan, running: list[BaseProcess]) -> list[Connection]:
    """Starts the replicas, adds them to ``running``, and returns where each reports."""
    context = multiprocessing.get_context("spawn")
    receivers = []
    for index in range(plan.world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=replica, args=(index, plan, sender), daemon=True)
        process.start()
        sender.close()
        running.append(process)
        receivers.append(receiver)
    return receivers


def receive(receivers: list[Connection], limit: float, what: str) -> list[Any]:
    """One message from each, within ``limit`` seconds."""
    deadline = time.monotonic() + limit
    messages: dict[Connection, Any] = {}
    while missing := [receiver for receiver in receivers if receiver not in messages]:
        ready = wait(missing, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise Failed(f"{what}: {len(messages)} of {len(receivers)} within {limit:g} s")
        for receiver in ready:
            try:
                messages[receiver] = receiver.recv()
            except EOFError:
                raise Failed(f"{what}: a replica ended by itself") from None
    return [messages[receiver] for receiver in receivers]


def measure(plan: Plan, limit: float) -> tuple[float, str]:
    """Milliseconds from the kill to the last survivor's commit, and a note."""
    running: list[BaseProcess] = []
    try:
        receivers = start(plan, running)
        victim = receivers.pop(plan.victim)
        [killed] = receive([victim], limit, f"victim after {plan.steps} steps of all replicas")
        commits = receive(receivers, limit, "survivors that committed without the victim")
    finally:
        for process in running:
            process.kill()
            process.join()
    if min(moment for moment, _ in commits) < killed:
        raise Failed("the victim was left out of a step before the kill")
    early = max(sum(moment < killed for moment in failed) for _, failed in commits)
    reduced = max(moment for moment, _ in commits) - killed
    return round(reduced / 1e6, 1), f"{early} steps failed before the kill" if early else ""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--victim", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20, help="of all replicas together, before the kill")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds until the kill, and again after it")
    setting = parser.add_mutually_exclusive_group()
    setting.add_argument("--default", dest="setting", action="store_const", const="default", default="default")
    setting.add_argument("--tuned", dest="setting", action="store_const", const="tuned")
    options = parser.parse_args()
    if not 0 <= options.victim < options.world_size or options.world_size < 2:
        parser.error("the victim is one of at least two replicas")
    return options


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the replicas are ended
    # a lost answer of a name server costs 5 s, and torch asks about each peer
    os.environ.update(RES_OPTIONS="attempts:0", TORCH_CPP_LOG_LEVEL="ERROR")
    setting = SETTINGS[options.setting]
    values, note = {}, ""
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=MIN_REPLICAS, **setting.lighthouse)
    try:
        plan = Plan(options.world_size, options.victim, options.steps, setting, lighthouse.address())
        values["reduced"], note = measure(plan, options.limit)
    except (Failed, OSError) as error:
        note = str(error)
    finally:
        lighthouse.shutdown()
    case = {"library": "torchft", "setting": options.setting}
    print(json.dumps(case | {"world_size": plan.world_size, "victim": plan.victim, "values": values, "note": note}))


if __name__ == "__main__":
    main()
