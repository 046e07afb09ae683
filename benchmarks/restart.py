"""One fault in one job: from the fault to the function's entry on the last rank, and to the new group's all-reduce.

``python -m benchmarks.restart --library inprocess --fault raise --where allreduce`` prints one line of JSON. Times are
in milliseconds; the phases of the restart, as the last rank went through them, add up to the whole.

With ``--body training`` the function is a training, in a process with a million objects (``benchmarks.work``). Its
first optimizer step then stands for the new group's all-reduce, and the others wait in the backward pass of a step.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import queue
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks import libraries
from benchmarks.job import Job, Mark, free_port, last, mark, output
from benchmarks.plan import PHASES
from benchmarks.work import OBJECTS, Training, heap

FAULTS = ("raise", "kill", "host", "stop", "release", "gil")
WHERE = ("loop", "allreduce", "sleep", "queue")
BODIES = ("empty", "training")
#: the others have certainly begun to wait (seconds)
SETTLE = 0.3
#: how long the others wait in sleep and queue (seconds)
LONG = 600.0
#: for faults that only time reveals; the libraries' own defaults are half a minute and more
TIMEOUTS = {
    "soft_timeout": 1.0,
    "hard_timeout": 2.0,
    "heartbeat_timeout": 1.0,
    "heartbeat_interval": 0.1,
    "monitor_thread_interval": 0.5,
    "monitor_process_interval": 0.1,
    "progress_watchdog_interval": 0.1,
}
#: options that make a case of their own
CASE = ("library", "setting", "world_size", "spares", "fault", "where", "victim", "body")


def parser() -> argparse.ArgumentParser:
    parser = libraries.parser(__doc__, "inprocess", "nvrx", "torchrun")
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--spares", type=int, choices=(0, 1), default=0, help="how many of them wait as hot spares")
    parser.add_argument("--fault", choices=FAULTS, default="raise")
    parser.add_argument("--where", choices=WHERE, default="loop", help="what the others do meanwhile")
    parser.add_argument("--victim", type=int, default=1)
    parser.add_argument("--body", choices=BODIES, default="empty", help="what the function does")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds until the attempt is given up")
    parser.add_argument("--serve", action="store_true", help="measure once for every line of arguments on stdin")
    parser.add_argument("--in-rank", action="store_true", help=argparse.SUPPRESS)
    return parser


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """``arguments``: default: those of the program. Exits where they do not fit together."""
    options = parser().parse_args(arguments)
    if options.setting in ("tree", "warm") and (options.library != "inprocess" or not options.spares):
        parser().error(f"--setting {options.setting} needs --library inprocess and --spares 1: a reserve")
    return options


# --- inside a rank ------------------------------------------------------------------------------------------------


def main(options: argparse.Namespace, rank: int) -> None:
    """A rank's life under a library that restarts inside the process."""
    timed = options.fault in ("stop", "release", "gil", "host")
    active = options.world_size - options.spares if options.spares else 0
    kept = before(options.body)
    train = libraries.wrap(
        options.library,
        options.setting,
        rank,
        lambda call: body(options, call.rank, call.iteration),
        TIMEOUTS if timed else {},
        active,
        lambda state: warm_up(options),
    )
    mark("call", rank, 0)
    train()
    del kept


def before(kind: str) -> object:
    """What the program does before the call; the caller keeps what it answers."""
    if kind == "empty":
        return None
    torch.set_num_threads(1)
    return heap(OBJECTS)


def body(options: argparse.Namespace, rank: int, iteration: int) -> None:
    """The function that is restarted."""
    mark("entry", rank, iteration)
    libraries.init_process_group(options.library, iteration)
    work = work_of(options.body)
    work.first()
    mark("reduced", rank, iteration)
    if iteration == 0:
        work.second()
        if rank == options.victim:
            time.sleep(SETTLE)
            fail(options.fault, rank)
        idle(options.where, work)
    del work  # before the group: as its last owner a model would end it with Python's lock held
    dist.destroy_process_group()


def warm_up(options: argparse.Namespace) -> None:
    """What a reserve does meanwhile: the function's first step, in a group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    work = work_of(options.body)
    work.first()
    del work
    dist.destroy_process_group()


class Empty:
    """A function that does nothing."""

    def __init__(self) -> None:
        self._number = torch.ones(1)

    def first(self) -> None:
        """Something that takes all ranks."""
        dist.all_reduce(self._number)

    def second(self) -> None:
        """What all ranks do before the fault."""

    def compute(self) -> None:
        """Without the other ranks, for ever."""
        while True:
            pass

    def wait(self) -> None:
        """For the rank that fails."""
        dist.all_reduce(self._number)


class Steps:
    """A training: a step, and another one that stops between its forward and its backward pass."""

    def __init__(self) -> None:
        self._training = Training(torch.device("cpu"))
        self._batches = self._training.batches()

    def first(self) -> None:
        self._training.learn(self._training.loss(next(self._batches)))

    def second(self) -> None:
        self._words = next(self._batches)
        # its forward pass is a collective, since DistributedDataParallel arranges its buckets anew: nobody may miss it
        self._loss = self._training.loss(self._words)

    def compute(self) -> None:
        with torch.no_grad():  # as in an evaluation: there are no collectives
            while True:
                self._training.loss(self._words)

    def wait(self) -> None:
        self._training.learn(self._loss)


def work_of(kind: str) -> Empty | Steps:
    """What the function does, in the process group that is there."""
    return Steps() if kind == "training" else Empty()


def fail(fault: str, rank: int) -> None:
    mark("fault", rank, 0)
    if fault == "raise":
        raise RuntimeError("injected by the benchmark")
    if fault == "host":
        for child in psutil.Process().children():
            child.kill()
    if fault == "gil":
        ctypes.PyDLL(None).sleep(int(LONG))
    os.kill(os.getpid(), signal.SIGSTOP if fault in ("stop", "release") else signal.SIGKILL)
    time.sleep(LONG)  # a stopped rank that was released goes on here


def idle(where: str, work: Empty | Steps) -> None:
    if where == "loop":
        work.compute()
    elif where == "allreduce":
        work.wait()
    elif where == "sleep":
        time.sleep(LONG)
    else:
        queue.Queue[int]().get()


# --- outside ------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the job once."""
    everybody = set(range(options.world_size))
    stays = options.fault in ("raise", "release") or options.library == "torchrun"
    # a spare takes the place of the victim
    going_on = everybody if stays else everybody - {options.victim}

    with Job(options.world_size) as job:
        start(job, options)
        job.wait(lambda marks: last(marks, "reduced", 1, going_on) is not None, options.limit, Release(job, options))
        job.let_end()
        return evaluate(options, job, going_on)


class Release:
    """Lets a stopped rank go on as soon as the others have noticed that it is silent."""

    def __init__(self, job: Job, options: argparse.Namespace) -> None:
        self._job, self._victim = job, options.victim
        self._waiting = options.fault == "release"

    def __call__(self, found: Mark) -> None:
        if self._waiting and found.name == "aborted" and found.rank != self._victim:
            self._waiting = False
            self._job.marks.append(Mark("released", self._victim, 0, time.monotonic_ns()))
            os.kill(self._job.pids[self._victim], signal.SIGCONT)


def start(job: Job, options: argparse.Namespace) -> None:
    if options.library == "torchrun":
        job.torchrun("benchmarks.restart", restarts=1)
    else:
        job.start(lambda rank: main(options, rank), free_port(), peer_store=options.library == "nvrx")


def evaluate(options: argparse.Namespace, job: Job, going_on: set[int]) -> dict[str, Any]:
    """What was measured, or why nothing could be."""
    marks = job.marks
    result = {name: getattr(options, name) for name in CASE}
    fault = last(marks, "fault", 0, {options.victim})
    entry, reduced = (last(marks, name, 1, going_on) for name in ("entry", "reduced"))
    killed = sorted(rank for rank in going_on if job.codes.get(rank, 0) < 0)
    if fault is None or entry is None or reduced is None or killed:
        return result | {"values": {}, "note": explain(options.limit, job, going_on, killed)}
    begin = detection(options, marks, fault)
    active = set(range(options.world_size - options.spares))
    values = {
        "startup": (last(marks, "entry", 0, active) or 0) - (last(marks, "call", 0, active) or 0),
        "detect": begin - fault,
        "entry": entry - begin,
        "reduced": reduced - begin,
        "group": reduced - entry,
    }
    phases = split(marks, begin) if options.library != "torchrun" else {}
    return result | {
        "values": {name: in_ms(value) for name, value in values.items()},
        "phases": {name: in_ms(value) for name, value in phases.items()},
        "note": "",
    }


def detection(options: argparse.Namespace, marks: Sequence[Mark], fault: int) -> int:
    """From when on a restart is possible: the fault, or the moment at which a silent rank was given up or came back."""
    names = {"stop": "ended", "gil": "ended", "release": "released", "host": "abort"}
    wanted = names.get(options.fault)
    found = [mark.t for mark in marks if mark.name == wanted and (mark.rank == options.victim or wanted == "abort")]
    return min(found, default=fault)


def split(marks: Sequence[Mark], begin: int) -> dict[str, int]:
    """How long each phase took; it ends when the last rank is through."""
    phases: dict[str, int] = {}
    for phase, end_mark in PHASES.items():
        times = [found.t for found in marks if (found.name, found.iteration) == end_mark]
        end = max(times, default=begin)
        phases[phase] = max(end - begin, 0)
        begin = max(end, begin)
    return phases


def explain(limit: float, job: Job, going_on: set[int], killed: list[int]) -> str:
    """In plain words, for the table."""
    if killed:
        return f"kills healthy ranks {killed}"
    texts = [str(found.fields["text"]) for found in job.marks if found.name == "raised"]
    missing = sorted(rank for rank in going_on if last(job.marks, "reduced", 1, {rank}) is None)
    if any(rank in job.codes for rank in missing):
        return f"ranks {missing} end with an error" + (f" ({texts[0].partition(':')[0]})" if texts else "")
    return f"ranks {missing} do not go on within {limit:g} s"


def in_ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 3)


def run() -> None:
    options = parsed()
    if options.serve:
        for line in sys.stdin:
            output(**measure(parsed(shlex.split(line))))
    elif options.in_rank:
        rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        kept = before(options.body)
        mark("call", rank, attempt)
        body(options, rank, attempt)
        del kept
    else:
        output(**measure(options))


if __name__ == "__main__":
    run()
