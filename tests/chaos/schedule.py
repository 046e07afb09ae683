"""What shall happen in one job: ranks, assignment, strikes. Data, and how a seed becomes such data."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.harness import Exit, Fault, Fork, Hang, HoldGIL, Kill, Raise, SlowDown, Swallow, Uncopyable, Unpicklable
from tests.harness.launch import PATIENT

#: seconds; hasty, but a new monitor has to be there before the heartbeats of a killed one are missed, on a busy
#: machine too
SOFT, HARD, HEARTBEAT = 1.5, 3.5, 10.0
OPTIONS = PATIENT | {
    "soft_timeout": SOFT,
    "hard_timeout": HARD,
    "heartbeat_timeout": HEARTBEAT,
    "heartbeat_interval": 0.2,
    "barrier_timeout": 30,
    "completion_timeout": 30,
    "progress_watchdog_interval": 0.1,
}
#: seconds from one moment with faults to the next
PAUSE = (0.1, 0.5)
#: seconds in which faults strike
LONG, SHORT = (8.0, 14.0), (1.5, 2.5)
#: at least so many ranks are spared by deadly faults
MINIMUM = 2
ASSIGNMENTS = ("shift", "gaps", "spares", "even", "pairs", "tree", "older")
#: a stop of the store's host stops all; longer ones are a known limit
HOST_STOP = (0.05, 0.4)


@dataclass(frozen=True)
class Signal:
    """What is done to a rank from outside."""

    signum: int
    #: training | monitor | host (both)
    target: str = "training"
    #: SIGSTOP: SIGCONT comes after so many seconds
    seconds: float = 0.0
    #: not at once, but when some rank reports this event; "" at once
    event: str = ""


@dataclass(frozen=True)
class Strike:
    """One fault."""

    #: seconds after the function was first entered; inside a rank it strikes at the next `place` after that
    at: float
    #: the initial rank
    rank: int
    #: a step of the function, the name of a hook, or "outside"
    place: str
    fault: Fault | Signal

    @property
    def kind(self) -> str:
        """In words, for the table."""
        fault = self.fault
        if isinstance(fault, Signal):
            when = f" at {fault.event!r}" if fault.event else ""
            return f"{signal.Signals(fault.signum).name} to {fault.target}{when}"
        names = (getattr(getattr(fault, "kind", None), "__name__", getattr(fault, "kind", None)),)
        detail = next((str(name) for name in names if name), "")
        if isinstance(fault, Kill):
            detail = signal.Signals(fault.signum).name
        return f"{type(fault).__name__} {detail}".strip() + f" in {self.place}"


@dataclass(frozen=True)
class Job:
    """One training."""

    seed: int
    world_size: int
    assignment: str
    #: seconds after which the training ends
    seconds: float
    strikes: tuple[Strike, ...]
    #: a process that died or left is replaced by a new one, which nothing strikes
    respawn: bool = False
    #: the state is in a LiveState, not in the log
    live: bool = False

    @property
    def host(self) -> str:
        """What is done to the store's host: "" nothing, or the target of a deadly signal."""
        found = [s.fault.target for s in self.strikes if s.rank == 0 and ends_store(s.fault)]
        return found[0] if found else ""

    def active(self, members: int) -> int:
        """How many of so many members call the function."""
        if self.assignment in ("spares", "tree"):
            return min(members, self.world_size - 2)
        return members // 2 * 2 if self.assignment in ("even", "older", "pairs") else members


def ends_store(fault: Fault | Signal) -> bool:
    """Whether it ends the store, if it strikes the store's host."""
    return isinstance(fault, Signal) and fault.signum == signal.SIGKILL and fault.target != "training"


def random_job(seed: int, span: tuple[float, float] = LONG) -> Job:
    """The job that belongs to a seed."""
    rng = random.Random(f"chaos {seed}")
    assignment = rng.choice(ASSIGNMENTS)
    size = rng.choice((4, 6, 8)) if assignment == "pairs" else rng.randint(4, 8)
    seconds = rng.uniform(*span)
    plan = _Plan(rng, size, assignment)
    while plan.now < seconds:
        plan.moment()
    if rng.random() < 0.04:
        plan.end_store()
    respawn, live = rng.random() < 0.5, rng.random() < 0.4
    strikes = [_moved(strike, rng) for strike in plan.strikes] if live else plan.strikes
    return Job(seed, size, assignment, plan.now, tuple(strikes), respawn, live)


def _moved(strike: Strike, rng: random.Random) -> Strike:
    """Some of what strikes in a step strikes in what a LiveState does instead."""
    if strike.place not in STEPS or isinstance(strike.fault, Fork) or rng.random() < 0.4:
        return strike
    # nobody can interrupt a commit: who waits in it is killed
    short = isinstance(strike.fault, Raise | Kill | Exit | SlowDown)
    return replace(strike, place=rng.choice([place for place in LIVE if short or place != "inside"]))


#: events of ranks at which a signal is sent in the middle of a restart
EVENTS = ("leave", "enter", *(f"phase {name}" for name in ("abort", "finalize", "rank_assignment", "initialize")))
DEADLY_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV)
LEAVING = (SystemExit, KeyboardInterrupt)
HOOKS = ("initialize", "health_check", "abort", "finalize", "rank_assignment")
#: between two backward passes of a step, in its commit, before a copy in memory or for the disk, before a rank sends
#: its state or receives one, before a load
LIVE = ("accumulate", "accumulate", "inside", "inside", "copy", "stage", "send", "receive", "load")
STEPS = ("step", "step", "step", "commit", "atomic")


@dataclass
class _Plan:
    """A schedule in the making."""

    rng: random.Random
    size: int
    assignment: str
    now: float = 0.0
    strikes: list[Strike] = field(default_factory=list)
    #: ranks that no deadly fault was planned for
    alive: list[int] = field(default_factory=list)
    #: how often each monitor is killed; five in a minute is the library's own limit
    monitors: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.alive = list(range(self.size))

    def moment(self) -> None:
        """The next moment: one fault, or several at once."""
        self.now += self.rng.uniform(*PAUSE)
        for _ in range(self.rng.choice((1, 1, 1, 1, 2, 3))):
            makers, weights = zip(*_WEIGHTS, strict=True)
            (make,) = self.rng.choices(makers, weights)
            make(self)

    def add(self, place: str, fault: Fault | Signal, rank: int | None = None, early: bool = False) -> None:
        rank = self.rng.choice(self.alive) if rank is None else rank
        self.strikes.append(Strike(-1.0 if early else round(self.now, 3), rank, place, fault))

    def victim(self, spare_host: bool = False) -> int | None:
        """A rank that may die; None where enough have. Its partner dies with it where ranks go in pairs."""
        candidates = [rank for rank in self.alive if rank or not spare_host]
        if not candidates:
            return None
        rank = self.rng.choice(candidates)
        gone = {rank, rank ^ 1} if self.assignment == "pairs" else {rank}
        if len(set(self.alive) - gone) < MINIMUM:
            return None
        self.alive = [rank for rank in self.alive if rank not in gone]
        return rank

    def end_store(self) -> None:
        """The store's host goes down in the end."""
        self.add("outside", Signal(signal.SIGKILL, self.rng.choice(("monitor", "host"))), 0)

    # --- kinds ------------------------------------------------------------------------------------------------

    def raise_one(self) -> None:
        self.add(self.rng.choice(STEPS), Raise(self.rng.choice((ValueError, Uncopyable, Unpicklable))))

    def raise_many(self) -> None:
        for rank in self.rng.sample(self.alive, self.rng.randint(2, len(self.alive))):
            self.add("step", Raise(), rank)

    def twice(self) -> None:
        """Another rank fails in the same step, or in the recovery from the first fault."""
        self.raise_one()
        self.raise_one()
        self.kill_inside()

    def raise_in_hook(self) -> None:
        self.add(self.rng.choice(("initialize", "abort")), Raise())

    def hang(self) -> None:
        self.add("step", Hang(self.rng.choice(Hang.KINDS)))

    def hold(self) -> None:
        self.add("step", HoldGIL(self.rng.uniform(0.05, 0.8)))

    def swallow(self) -> None:
        self.add("step", Swallow(self.rng.randint(1, 2)))

    def fork(self) -> None:
        self.add(self.rng.choice(("step", "atomic")), Fork(kind=self.rng.choice(Fork.KINDS)))

    def slow(self) -> None:
        self.add(self.rng.choice((*HOOKS, "atomic")), SlowDown(self.rng.uniform(0.05, 0.6)))

    def stop(self) -> None:
        self.add("outside", Signal(signal.SIGSTOP, "training", self.rng.uniform(0.05, 2.5), self.event()))

    def stop_host(self) -> None:
        """Shorter than heartbeat_timeout."""
        rank = self.rng.choice(self.alive)
        seconds = self.rng.uniform(*(HOST_STOP if rank == 0 else (0.05, 1.2)))
        target = self.rng.choice(("monitor", "host"))
        self.add("outside", Signal(signal.SIGSTOP, target, seconds, self.event()), rank)

    def kill_monitor(self) -> None:
        rank = self.rng.choice(self.alive)
        self.monitors[rank] = self.monitors.get(rank, 0) + 1
        if rank and self.monitors[rank] <= 3:
            self.add("outside", Signal(signal.SIGKILL, "monitor", event=self.event()), rank)

    def event(self) -> str:
        return self.rng.choice(EVENTS) if self.rng.random() < 0.4 else ""

    # deadly ones

    def kill(self) -> None:
        if (rank := self.victim()) is not None:
            self.add("outside", Signal(self.rng.choice(DEADLY_SIGNALS), event=self.event()), rank)

    def kill_inside(self) -> None:
        if (rank := self.victim()) is not None:
            fault = self.rng.choice((Kill(), Kill(signal.SIGTERM), Kill(signal.SIGSEGV), Exit(5), Exit(0)))
            self.add(self.rng.choice((*STEPS, *HOOKS)), fault, rank, early=self.rng.random() < 0.1)

    def kill_host(self) -> None:
        if (rank := self.victim(spare_host=True)) is not None:
            self.add("outside", Signal(signal.SIGKILL, "host", event=self.event()), rank)

    def leave(self) -> None:
        if (rank := self.victim()) is not None:
            self.add(self.rng.choice(STEPS), Raise(self.rng.choice(LEAVING)), rank)

    def leave_by_hook(self) -> None:
        if (rank := self.victim()) is not None:
            self.add(self.rng.choice(("health_check", "finalize", "rank_assignment")), Raise(), rank)

    def interrupt(self) -> None:
        if (rank := self.victim()) is not None:
            self.add("outside", Signal(signal.SIGINT, event=self.event()), rank)

    def hold_for_ever(self) -> None:
        if (rank := self.victim()) is not None:
            self.add("step", HoldGIL(), rank)

    def stop_long(self) -> None:
        """Longer than hard_timeout or heartbeat_timeout."""
        if (rank := self.victim(spare_host=True)) is not None:
            target = self.rng.choice(("training", "monitor", "host"))
            longest = HARD if target == "training" else HEARTBEAT
            seconds = self.rng.uniform(0.9 * longest, 1.5 * longest)
            self.add("outside", Signal(signal.SIGSTOP, target, seconds, self.event()), rank)


_WEIGHTS: tuple[tuple[Callable[[Any], None], float], ...] = (
    (_Plan.raise_one, 22),
    (_Plan.raise_many, 6),
    (_Plan.twice, 3),
    (_Plan.raise_in_hook, 5),
    (_Plan.hang, 4),
    (_Plan.hold, 4),
    (_Plan.swallow, 3),
    (_Plan.fork, 4),
    (_Plan.slow, 9),
    (_Plan.stop, 7),
    (_Plan.stop_host, 6),
    (_Plan.kill_monitor, 7),
    (_Plan.kill, 3),
    (_Plan.kill_inside, 3),
    (_Plan.kill_host, 1),
    (_Plan.leave, 2),
    (_Plan.leave_by_hook, 1),
    (_Plan.interrupt, 1.5),
    (_Plan.hold_for_ever, 0.7),
    (_Plan.stop_long, 1),
)
