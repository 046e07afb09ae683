"""The kinds of faults: what is done, and what the report of it is to say."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inprocess import RankShouldRestart, RestartAbort
from inprocess.testing.faults import Fault, Segfault, SlowDown
from tests.harness import At, Exit, Hang, HoldGIL, HostLoss, Kill, KillTogether, Raise, Stop
from tests.harness.launch import ALONE, BEATING, HASTY, KILLING, PATIENT

from .places import full_disk, limit_of_version_1, limit_of_version_2
from .training import Deadlock, Greed, OnHangingDisk, OtherCollective, ReturnsEarly, SkippedCollective, Spin

__all__ = ["KINDS", "Kind", "Told"]


@dataclass(frozen=True)
class Told:
    """What one incident is to say: the first of these ranks, and all of them with those in ``also``."""

    ranks: frozenset[int | None]
    classes: frozenset[str]


def told(ranks: int | Collection[int | None], *classes: str) -> Told:
    return Told(frozenset({ranks} if isinstance(ranks, int) else ranks), frozenset(classes))


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Args:
        faults: places of the schedule, and what happens there.
        incidents: what the report is to say, one by one.
        gone: ranks that do not come back, whose processes may end in any way.
        ends: the whole job ends.
        lossy: events are lost; a report that says so, and names nobody else, is right.
        place: what the machine has to provide.
        on_ranks: called in each rank first.
        leaves_files: torch does, in the temporary directory: its handler of SIGCHLD raises while it makes some.
    """

    faults: Mapping[Any, Fault]
    incidents: tuple[Told, ...]
    gone: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=lambda: PATIENT)
    args: Mapping[str, Any] = field(default_factory=dict)
    size: int = 3
    ends: bool = False
    lossy: bool = False
    place: Callable[[Path, int], AbstractContextManager[Any]] | None = None
    on_ranks: Callable[[int], None] | None = None
    leaves_files: bool = False


def on_one(fault: Fault, kind: str, rank: int = 1, gone: bool = False, **more: Any) -> Kind:
    """A fault of one rank in its fourth step."""
    return Kind({At(rank, step=3): fault}, (told(rank, kind),), (rank,) if gone else (), **more)


KINDS: dict[str, Kind] = {
    "exception": on_one(Raise(ValueError), "exception"),
    **{
        f"exception, barrier in {name}": on_one(Raise(ValueError), "exception", args={"clean_up": name})
        for name in ("finally", "__exit__", "generator", "except")
    },
    "exception beside another, barrier in finally": on_one(
        Raise(ValueError), "exception", args={"clean_up": "another"}
    ),
    "CancelledError": on_one(Raise(asyncio.CancelledError), "exception"),
    "MemoryError": on_one(Raise(MemoryError), "oom"),
    "CUDA out of memory": on_one(Raise(RuntimeError, "CUDA out of memory. Tried to allocate 2.00 GiB"), "oom", 2),
    "error of a GPU": on_one(Raise(RuntimeError, "CUDA error: uncorrectable ECC error encountered"), "gpu", 2),
    "SIGKILL": on_one(Kill(), "signal", gone=True),
    "rank 0 is killed": on_one(Kill(), "signal", 0, gone=True),
    "SIGSEGV": on_one(Segfault(), "signal", gone=True),
    "SIGTERM": on_one(Kill(signal.SIGTERM), "preemption", 2, gone=True),
    "os._exit": on_one(Exit(), "exit", gone=True),
    "sys.exit": on_one(Raise(SystemExit), "exit", gone=True),
    "KeyboardInterrupt": on_one(Raise(KeyboardInterrupt), "signal", gone=True),
    "RestartAbort": on_one(Raise(RestartAbort), "request", gone=True),
    "RankShouldRestart": on_one(Raise(RankShouldRestart), "request"),
    "SIGSTOP": on_one(Stop(), "stopped", gone=True, options=KILLING),
    "holds the interpreter lock": on_one(HoldGIL(), "gil_hang", gone=True, options=KILLING),
    "sleeps": on_one(Hang("sleep"), "hang", options=HASTY),
    "endless loop": on_one(Spin(), "hang", 2, options=HASTY),
    "deadlock of two threads": on_one(Deadlock(), "hang", options=HASTY),
    "another collective": on_one(OtherCollective(), "collective", options=HASTY),
    "a collective skipped": on_one(SkippedCollective(), "collective", options=HASTY),
    "returns early": on_one(ReturnsEarly(), "collective", options=HASTY),
    "returns early, and closes": on_one(ReturnsEarly(closes=True), "collective", options=HASTY),
    "loader worker dies": Kind(
        {}, (told(1, "input"),), options=HASTY, args={"loader": 1, "harm": "dies"}, leaves_files=True
    ),
    "loader worker is late and dies": Kind(
        {}, (told(1, "input"),), options=HASTY, args={"loader": 1, "harm": "is late and dies"}
    ),
    "loader worker hangs": Kind({}, (told(1, "input"),), options=HASTY, args={"loader": 1, "harm": "hangs"}),
    "memory limit, cgroup v1": on_one(Greed(), "oom", gone=True, place=limit_of_version_1),
    "memory limit, cgroup v2": on_one(Greed(), "oom", gone=True, place=limit_of_version_2),
    "host lost": on_one(HostLoss(), "host_lost", gone=True, options=BEATING),
    "host of the store lost": Kind(
        {At(0, step=3): HostLoss()}, (told((0, None), "store_lost", "host_lost"),), (0,), ALONE, ends=True
    ),
    "two raise": Kind({At(rank, step=3): Raise() for rank in (0, 2)}, (told((0, 2), "exception"),)),
    "two are killed": Kind(
        {At(rank, step=3): KillTogether(2) for rank in (1, 2)}, (told((1, 2), "signal"),), (1, 2), size=4
    ),
    "a fault during a restart": Kind(
        {At(1, step=3): Raise(), At(2, 1, step="rank_assignment"): Kill()},
        (told(1, "exception"), told(2, "signal")),
        (2,),
    ),
    "slow rank": Kind({At(1, step=3): SlowDown(0.2, 3)}, ()),
    "full disk": on_one(Kill(), "signal", gone=True, place=full_disk, lossy=True),
    "disk that hangs": on_one(Kill(), "signal", gone=True, on_ranks=OnHangingDisk(), lossy=True),
}
