"""Real rank processes for tests: started from a forkserver, faults at named steps, one deadline, nothing left behind.

    run = launch(targets.steps, 4, faults={At(rank=1, iteration=0, step=2): Raise(ValueError, "x")})
    ranks = run.wait(deadline=30)

`launch` is the fixture of tests/conftest.py; `Run.wait` checks leftovers and the invariants I2, I4 and I5 by itself.
"""

from .faults import (
    At,
    Exit,
    Fault,
    Fork,
    Hang,
    HoldGIL,
    Kill,
    KillHost,
    KillMonitor,
    KillTogether,
    Raise,
    Slow,
    Stop,
    Swallow,
    Uncopyable,
    Unpicklable,
    When,
)
from .launch import Deadline, RankResult, Ranks, Run, start_server
from .ports import ReservedPort

__all__ = [
    "At",
    "Deadline",
    "Exit",
    "Fault",
    "Fork",
    "Hang",
    "HoldGIL",
    "Kill",
    "KillHost",
    "KillMonitor",
    "KillTogether",
    "Raise",
    "RankResult",
    "Ranks",
    "ReservedPort",
    "Run",
    "Slow",
    "Stop",
    "Swallow",
    "Uncopyable",
    "Unpicklable",
    "When",
    "start_server",
]
