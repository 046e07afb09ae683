"""What shall happen in one simulated job: members, reserves, faults. Data, and how a seed becomes such data."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.sim.assignments import ASSIGNMENTS

#: seconds; short, so that a life fits into few heartbeats
HEARTBEAT, HEARTBEAT_TIMEOUT, SOFT_TIMEOUT, HARD_TIMEOUT = 1.0, 6.0, 4.0, 7.0
#: how long a member waits for the founders, and a monitor for the end of a round it speaks in
BARRIER_TIMEOUT = 60.0


@dataclass(frozen=True)
class Kill:
    """Kill at a store operation, before it is sent or after it took effect, or at a time."""

    member: int
    #: training | monitor | host (both; operations are counted in the training process)
    target: str
    #: number of the operation, from 1
    op: int | None = None
    after: bool = False
    time: float = 0.0
    #: count operations from the training process' entry into this phase ...
    phase: str = ""
    #: ... in the first iteration >= this one
    iteration: int = 0


@dataclass(frozen=True)
class Cut:
    """A member's host is not reachable for a while, or in one direction only (what it sends, or what it gets)."""

    member: int
    time: float
    seconds: float
    #: both | out | in
    way: str = "both"


@dataclass(frozen=True)
class Freeze:
    """A member's processes stand still for a while, and then go on as if nothing had been."""

    member: int
    #: training | monitor | host (both)
    target: str
    time: float
    seconds: float


@dataclass(frozen=True)
class Act:
    """What one member's function or hook does, once, in the first iteration >= ``iteration`` in which it gets there."""

    member: int
    what: str
    iteration: int = 0


@dataclass(frozen=True)
class StoreGone:
    """The host of the base store goes down."""

    time: float


Fault = Kill | Cut | Freeze | Act | StoreGone

#: acts that interrupt an iteration and keep the member
RAISES = ("raise", "raise at entry", "initialize raises", "hang")
#: acts after which the member leaves, or is killed
LEAVES = (
    "exit",
    "hang for ever",
    "initialize exits",
    "check raises",
    "finalize raises",
    "recheck raises",
    "assign raises",
)
#: acts that are no fault of their own: the interrupt is swallowed a few times, hooks take long
EXTRAS = ("swallow", "abort is slow", "finalize is slow")


@dataclass(frozen=True)
class Scenario:
    """One simulated job."""

    seed: int
    members: int = 4
    faults: tuple[Fault, ...] = ()
    #: one of ``assignments.ASSIGNMENTS``
    assignment: str = "shift"
    #: the rendezvous address comes from the smallest live member's monitor instead of a host that never fails
    shared_host: bool = False
    #: seconds after the first one at which each member's processes start
    delays: tuple[float, ...] = ()
    #: how long the function takes at most (seconds)
    longest: float = 1.0
    #: members with a slow network and slow hooks
    slow: tuple[int, ...] = ()
    #: the function commits what it has done, inside ``atomic()``, that many times
    commits: int = 1


def random_scenario(seed: int, members: int = 4, faults: int = 3) -> Scenario:
    """The job that belongs to a seed. Later faults prefer later iterations, where they meet a job half way."""
    rng = random.Random(f"scenario {seed}")
    longest = rng.choice((0.05, 0.5, 0.5, 2.0, 15.0))
    chosen = tuple(_random_fault(rng, members, longest, number) for number in range(faults))
    return Scenario(
        seed,
        members,
        chosen,
        assignment=rng.choice(("shift", "shift", "at most 2", "at most 3", *ASSIGNMENTS)),
        shared_host=rng.random() < 0.3,
        delays=tuple(rng.random() * 10.0 for _ in range(members)) if rng.random() < 0.1 else (),
        longest=longest,
        slow=(rng.randrange(members),) if rng.random() < 0.15 else (),
        commits=rng.choice((0, 1, 1, 4)),
    )


#: phases in which a kill is most likely to leave something half done
_DELICATE = ("assign ranks", "wait for the outcome", "abort", "finalize", *("start round", "end round") * 2)


def _random_fault(rng: random.Random, members: int, longest: float, number: int) -> Fault:
    """Fault ``number`` of a job; the first one mostly sets a restart going."""
    if number == 0 and rng.random() < 0.7:
        return Act(rng.randrange(max(1, members // 2)), rng.choice((*RAISES, "exit", "hang for ever")))
    (make,) = rng.choices((_random_kill, _random_act, _random_cut, _random_freeze), (50, 35, 15, 10))
    return make(rng, rng.randrange(members), rng.randint(0, number), longest)


def _random_kill(rng: random.Random, member: int, iteration: int, longest: float) -> Fault:
    target, draw = rng.choices(("training", "monitor", "host"), (6, 2, 3))[0], rng.random()
    if draw < 0.2:
        return Kill(member, target, time=rng.random() * (iteration + 1) * longest)
    if draw < 0.4 or target == "monitor":
        return Kill(member, target, rng.randint(1, 18 * (iteration + 1)), rng.random() < 0.5)
    return Kill(member, target, rng.randint(1, 5), rng.random() < 0.5, phase=rng.choice(_DELICATE), iteration=iteration)


def _random_act(rng: random.Random, member: int, iteration: int, longest: float) -> Fault:
    names = rng.choices((RAISES, LEAVES, EXTRAS, ("limit",)), (10, 6, 3, 1))[0]
    return Act(member, rng.choice(names), iteration)


#: seconds for which a host is away: shorter and longer than the heartbeat timeout
_AWAY = (0.5, 3.0, 9.0, 30.0)


def _random_cut(rng: random.Random, member: int, iteration: int, longest: float) -> Fault:
    if rng.random() < 0.1:
        return StoreGone(rng.random() * 3 * longest)
    way = rng.choice(("both", "both", "out", "in"))
    return Cut(member, rng.random() * (iteration + 1) * longest, rng.choice(_AWAY), way)


def _random_freeze(rng: random.Random, member: int, iteration: int, longest: float) -> Fault:
    target = rng.choice(("training", "monitor", "host"))
    return Freeze(member, target, rng.random() * (iteration + 1) * longest, rng.choice(_AWAY))
