"""Our own tests on the ground of `inprocess.testing`: functions that say where they are, and more faults.

    run = launch(targets.steps, 4, faults={At(rank=1, iteration=0, step=2): Raise(ValueError, "x")})
    ranks = run.wait(deadline=30)

`launch` is the fixture of tests/conftest.py; `Run.wait` checks leftovers and the invariants I2, I4 and I5 by itself.
"""

from inprocess.testing import Exit, Hang, HoldGIL, HostLoss, Kill, Stop
from inprocess.testing.coordinates import When
from inprocess.testing.faults import Fault, KillTogether, SlowDown
from inprocess.testing.outcome import Deadline, RankResult, Ranks
from inprocess.testing.ports import ReservedPort
from inprocess.testing.server import start_server

from .faults import At, Fork, KillMonitor, Raise, Swallow, Uncopyable, Unpicklable
from .launch import Run

__all__ = [
    "At",
    "Deadline",
    "Exit",
    "Fault",
    "Fork",
    "Hang",
    "HoldGIL",
    "Kill",
    "HostLoss",
    "KillMonitor",
    "KillTogether",
    "Raise",
    "RankResult",
    "Ranks",
    "ReservedPort",
    "Run",
    "SlowDown",
    "Stop",
    "Swallow",
    "Uncopyable",
    "Unpicklable",
    "When",
    "start_server",
]
