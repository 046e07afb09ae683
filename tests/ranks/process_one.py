"""A rank that says what it does, for tests in which it is process 1 of a process namespace.

process_one.py FIFO HOW; after some steps of iteration 0 initial rank 1 does HOW:

* hold: it holds the interpreter lock in C code, until something is written to the FIFO
* deaf: the same, and the signal that would end it is ignored
* steps: it goes on with steps, as the others do, until it is stopped from outside
* calm: nothing
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import torch
import torch.distributed as dist

import inprocess
from inprocess.system import procfs

FIFO, HOW = sys.argv[1:]
STEPS = 40
INITIAL = int(os.environ["RANK"])


def say(text: str) -> None:
    os.write(1, f"{INITIAL}: {text}\n".encode())


def hold() -> None:
    """Without a signal in between: each system call that one ends begins again."""
    fifo = os.open(FIFO, os.O_RDWR)
    buffer = ctypes.create_string_buffer(1)
    say("holds")
    while ctypes.PyDLL(None).read(fifo, buffer, 1) != 1:
        pass
    os.close(fifo)


def put_signals_out_of_the_way(before: int) -> None:
    for number in range(signal.SIGRTMIN + 8, signal.SIGRTMAX):
        if (procfs.caught_signals() & ~before) >> number - 1 & 1:
            signal.signal(number, signal.SIG_IGN)
            say(f"ignores {number}")


CAUGHT = procfs.caught_signals()


@inprocess.Wrapper(
    soft_timeout=2,
    hard_timeout=3,
    heartbeat_interval=0.2,
    heartbeat_timeout=4,
    monitor_process_interval=0.25,
    progress_watchdog_interval=0.25,
    termination_grace_time=0.5,
    barrier_timeout=30,
    completion_timeout=30,
)
def train(call: inprocess.CallWrapper = None) -> str:
    dist.init_process_group("gloo")
    say(f"enters {call.iteration}")
    step = torch.zeros(1)
    while step.item() < STEPS or (HOW == "steps" and call.iteration == 0):
        call.ping()
        dist.all_reduce(torch.ones(1))
        with call.atomic():
            say(f"atomic {call.iteration}")
        step += 1
        if call.iteration == 0 and INITIAL == 1 and step.item() == 3 and HOW in ("hold", "deaf"):
            if HOW == "deaf":
                put_signals_out_of_the_way(CAUGHT)
            hold()
            with call.atomic():
                say("atomic too late")
    return f"{dist.get_world_size()} ranks"


if __name__ == "__main__":
    say(f"process {os.getpid()}")
    say(f"returned {train()}")
    real_time = signal.SIGRTMIN - 1
    say(f"signals as before: {procfs.caught_signals() >> real_time == CAUGHT >> real_time}")
