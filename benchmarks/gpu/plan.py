"""What is measured on a GPU, in which sizes, and for how long at most. Only data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

#: how many ranks restart
RANKS = (2, 4)
PARTS = ("restart", "step", "live")
#: seconds that each part may take: when they are over nothing more is begun
BUDGET = {"restart": 250.0, "step": 80.0, "live": 70.0}
QUICK = {"restart": 120.0, "step": 50.0, "live": 30.0}
#: seconds until one attempt is given up
LIMIT = 40.0


@dataclass(frozen=True)
class Timeouts:
    """For faults that only time reveals (seconds). A new NCCL group must be made within the soft one."""

    soft: float
    hard: float
    #: of CudaHealthCheck
    check: float

    def options(self) -> dict[str, Any]:
        """For `Wrapper`."""
        return {
            "soft_timeout": self.soft,
            "hard_timeout": self.hard,
            "monitor_thread_interval": 0.5,
            "monitor_process_interval": 0.1,
            "progress_watchdog_interval": 0.1,
        }


TIMEOUTS = {"cuda": Timeouts(6.0, 8.0, 2.0), "cpu": Timeouts(1.0, 2.0, 1.0)}


@dataclass(frozen=True)
class Phase:
    """A stretch of a restart; ends with a mark of an iteration, on the last rank unless ``first``."""

    name: str
    mark: str
    iteration: int
    first: bool = False
    #: only where it is waited for
    optional: bool = False


#: in their order; the first one begins at the fault
PHASES = (
    Phase("outcome known", "abort", 0, first=True),
    Phase("on all ranks", "abort", 0),
    Phase("abort", "aborted", 0),
    Phase("leave function", "left", 0),
    Phase("health check", "healthy", 0),
    Phase("process ended", "ended", -1, optional=True),
    Phase("end round", "assign", 1),
    Phase("start round", "initialize", 1),
    Phase("check, enter", "entry", 1),
    Phase("init_process_group", "group", 1),
    Phase("first all-reduce", "reduced", 1),
)


@dataclass(frozen=True)
class Case:
    """A fault of one rank while the others wait for it in an all-reduce."""

    name: str
    label: str
    #: whether that rank goes on with the others
    stays: bool = False
    #: phases that are over when a timeout is; without any, all timeouts are the library's own
    waits: tuple[str, ...] = ()


CASES = (
    Case("exception", "exception", stays=True),
    Case("kill", "SIGKILL"),
    Case("poison", "poisoned context"),
    Case("sleep", "sleeping peer", stays=True, waits=("outcome known",)),
    Case("kernel", "endless kernel, waited for", waits=("outcome known", "process ended")),
    Case("check", "endless kernel, found by the health check", waits=("outcome known", "health check")),
)


@dataclass(frozen=True)
class Request:
    """One measurement, as the server is asked for it."""

    part: str
    world_size: int
    #: of a restart
    case: str = ""
    limit: float = LIMIT
    #: size and number of what is repeated, by the part
    sizes: dict[str, Any] = field(default_factory=dict)

    def within(self, seconds: float) -> Request:
        """With what is left of the part's time. A restart is one attempt, all or nothing; of others there are parts."""
        return self if self.part == "restart" else dataclasses.replace(self, limit=min(self.limit, seconds))

    @property
    def key(self) -> str:
        """Its name in the results."""
        words = [self.part, self.case, f"{self.world_size} ranks"]
        if self.part == "live":
            words.append(f"{self.sizes['gigabytes']:g} GB")
        return " ".join(word for word in words if word)


#: of a training step, by device: a transformer of 27 million parameters, or one that a CPU core steps in no time;
#: for how long it is stepped at a time, and how many steps lie between two copies
STEP = {
    "cuda": {"width": 512, "layers": 6, "words": 8192, "batch": 16, "length": 256, "seconds": 1.5, "every": 5},
    "cpu": {"width": 64, "layers": 2, "words": 256, "batch": 4, "length": 32, "seconds": 0.2, "every": 5},
}
#: GB of state, by device
STATES = {"cuda": (1.0, 8.0), "cpu": (0.05, 0.1)}


def requests(kind: str, part: str, quick: bool) -> list[Request]:
    """What a part asks for, in its order: should its time be over, the most important things are there."""
    most = (QUICK if quick else BUDGET)[part]
    if part == "restart":
        fast = [Request(part, ranks, case.name) for ranks in RANKS for case in CASES if not case.waits]
        slow = [Request(part, ranks, case.name) for ranks in RANKS for case in CASES if case.waits]
        return fast + slow if quick else [*fast, *slow, *fast, *fast, *slow, *fast, *fast]
    if part == "step":
        sizes = STEP[kind] | {"turns": 1 if quick else 6}
        return [Request(part, ranks, "", share * most, sizes) for ranks, share in ((1, 0.4), (2, 1.0))]
    sizes = {"rounds": 2 if quick else 5}
    states = list(zip(STATES[kind], (0.3, 1.0), strict=True))[: 1 if quick else None]
    return [Request(part, 2, "", share * most, sizes | {"gigabytes": size}) for size, share in states]
