"""Faults that strike at given steps, for trying out what a training run survives.

A schedule is text such as ``kill:rank=2,step=60 raise:rank=1,step=120``: KIND:rank=R,step=S, separated by spaces.
R is the rank the process was started with, S the step before which the fault strikes.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass


def _fail() -> None:
    raise RuntimeError("this fault was scheduled")


def _hang() -> None:
    time.sleep(1e6)


STRIKES: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "segv": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(5),
    "sysexit": lambda: sys.exit(6),
    "raise": _fail,
    "hang": _hang,
    "gil": lambda: sum(itertools.repeat(0)),  # a loop in C: no other thread and no signal handler runs Python code
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
SURVIVED = ("raise", "hang")  # the process goes on after these; after all others it is gone


@dataclass(frozen=True)
class Fault:
    kind: str
    rank: int
    step: int

    @property
    def deadly(self) -> bool:
        return self.kind not in SURVIVED

    def __str__(self) -> str:
        return f"{self.kind}:rank={self.rank},step={self.step}"


class Faults:
    """The faults of one process. Each strikes once, also when a restart runs the steps around it again."""

    def __init__(self, faults: Iterable[Fault], initial_rank: int) -> None:
        self.left = [fault for fault in faults if fault.rank == initial_rank]

    def strike(self, step: int) -> None:
        for fault in [each for each in self.left if each.step == step]:
            self.left.remove(fault)
            STRIKES[fault.kind]()


def parse(text: str) -> list[Fault]:
    """The schedule that `text` describes; ValueError names the part that is wrong and the grammar."""
    return [_parse_one(part) for part in text.split()]


def usual(ranks: int, steps: int) -> list[Fault]:
    """One for a training of this size: rank 1 is killed, then rank 0, and the last one raises; each has one at most."""
    faults = [Fault("kill", 1, steps * 30 // 100), Fault("kill", 0, steps * 55 // 100)]
    return [*faults[max(0, 3 - ranks) :], Fault("raise", ranks - 1, steps * 80 // 100)]


def idle(faults: Iterable[Fault], ranks: int, steps: int) -> Fault | None:
    """The first one that would never strike: there is no such rank or step."""
    return next((fault for fault in faults if fault.rank >= ranks or fault.step >= steps), None)


def refuse_idle(parser: argparse.ArgumentParser, faults: Iterable[Fault], ranks: int, steps: int) -> None:
    """End with a usage error that names it, if there is such a one."""
    fault = idle(faults, ranks, steps)
    if fault is not None:
        parser.error(f"--faults: {fault} would never strike with {ranks} ranks and {steps} steps")


def in_words(code: int) -> str:
    """What became of a process that ended with this exit code, as `subprocess` has it."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return "finished" if code == 0 else "ended with an error"


def option(text: str) -> list[Fault]:
    """`parse` as the type of a command line option; ``none`` is the empty schedule."""
    try:
        return [] if text == "none" else parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse_one(part: str) -> Fault:
    found = re.fullmatch(r"(\w+):rank=(\d+),step=(\d+)", part)
    if found and found[1] in STRIKES:
        return Fault(found[1], int(found[2]), int(found[3]))
    raise ValueError(
        f"{part!r} is no fault: write KIND:rank=R,step=S, with a space between two faults; "
        f"KIND is one of {', '.join(STRIKES)}"
    )
