"""What the restarts of the doctor's own job are shown beside: rows of ``docs/performance.md``; a test compares them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EXCEPTION", "KILL", "MACHINE", "STOP", "Figure"]

#: on which they were measured
MACHINE = "two cores, 4 ranks, Gloo"


@dataclass(frozen=True)
class Figure:
    """A row of the tables: 4 ranks, the others in an all-reduce, from the fault to the entry of the function."""

    #: name of the row
    row: str
    #: median (seconds)
    median: float


EXCEPTION = Figure("4 ranks, in an all-reduce", 0.0144)
KILL = Figure("SIGKILL of rank 1, in an all-reduce", 0.0268)
STOP = Figure("SIGSTOP of rank 1 for ever, in an all-reduce", 0.0114)
