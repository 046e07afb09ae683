"""Tests of one's own training function: real processes, faults at named steps, and the story of what happened.

::

    from inprocess.testing import At, Kill, Raise

    def test_survives(ranks):
        faults = {At(rank=1, step=3): Kill(), At(rank=0, step=9): Raise(OSError)}
        result = ranks(4).run(train, 20, faults=faults)
        assert result.same_pids and result.world_sizes == [4, 3, 3]

``ranks`` is a fixture of the pytest plugin; without pytest, ``Job(4).run(...)``. Names are imported on first use:
`here`, which stands in training code, brings nothing along.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from inprocess.testing.marks import here

if TYPE_CHECKING:
    from inprocess.testing.command import Command, Missing
    from inprocess.testing.coordinates import At, When
    from inprocess.testing.faults import (
        Exit,
        Fault,
        Hang,
        HoldGIL,
        HostLoss,
        Kill,
        NetworkCut,
        Raise,
        Segfault,
        SlowDown,
        Stop,
        StoreLoss,
        Terminate,
    )
    from inprocess.testing.job import Job
    from inprocess.testing.outcome import Deadline, RankResult
    from inprocess.testing.result import Result
    from inprocess.testing.schedule import random_faults

_HOME = {
    "At": "coordinates",
    "Command": "command",
    "Deadline": "outcome",
    "Exit": "faults",
    "Fault": "faults",
    "Hang": "faults",
    "HoldGIL": "faults",
    "HostLoss": "faults",
    "Job": "job",
    "Kill": "faults",
    "Missing": "command",
    "NetworkCut": "faults",
    "Raise": "faults",
    "RankResult": "outcome",
    "Result": "result",
    "Segfault": "faults",
    "SlowDown": "faults",
    "Stop": "faults",
    "StoreLoss": "faults",
    "Terminate": "faults",
    "When": "coordinates",
    "random_faults": "schedule",
}

__all__ = [
    "At",
    "Command",
    "Deadline",
    "Exit",
    "Fault",
    "Hang",
    "HoldGIL",
    "HostLoss",
    "Job",
    "Kill",
    "Missing",
    "NetworkCut",
    "Raise",
    "RankResult",
    "Result",
    "Segfault",
    "SlowDown",
    "Stop",
    "StoreLoss",
    "Terminate",
    "When",
    "here",
    "random_faults",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'inprocess.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"inprocess.testing.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
