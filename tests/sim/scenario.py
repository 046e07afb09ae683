"""What shall happen in one simulated job: members, reserves, faults. Data, and how a seed becomes such data."""

from __future__ import annotations

import random
from dataclasses import dataclass

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
    op: int | None = None
    after: bool = False
    time: float = 0.0


@dataclass(frozen=True)
class Cut:
    """A member's host is not reachable for a while, or stopped."""

    member: int
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


Fault = Kill | Cut | Act | StoreGone

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
#: acts without a fault of their own: survive the interrupt a few times; both need another fault to show
EXTRAS = ("swallow", "abort is slow")


@dataclass(frozen=True)
class Scenario:
    """One simulated job."""

    seed: int
    members: int = 4
    faults: tuple[Fault, ...] = ()
    #: ranks beyond it are reserves
    max_active: int | None = None
    #: the assignment discards the last rank of an odd number
    even: bool = False
    #: the rendezvous address comes from the smallest live member's monitor instead of a host that never fails
    shared_host: bool = False
    #: seconds after the first one at which each member's processes start
    delays: tuple[float, ...] = ()
    #: how long the function takes at most (seconds)
    longest: float = 1.0


def random_scenario(seed: int, members: int = 4, faults: int = 3) -> Scenario:
    """The job that belongs to a seed."""
    rng = random.Random(f"scenario {seed}")
    longest = rng.choice((0.05, 0.5, 0.5, 2.0, 2.0, 15.0))
    chosen = tuple(_random_fault(rng, members, longest) for _ in range(faults))
    return Scenario(
        seed,
        members,
        chosen,
        max_active=rng.choice((None, None, max(1, members - 1), max(1, members // 2))),
        even=rng.random() < 0.15,
        shared_host=rng.random() < 0.3,
        delays=tuple(rng.random() * 10.0 for _ in range(members)) if rng.random() < 0.1 else (),
        longest=longest,
    )


def _random_fault(rng: random.Random, members: int, longest: float) -> Fault:
    member, draw = rng.randrange(members), rng.random()
    if draw < 0.35:
        target = rng.choices(("training", "monitor", "host"), (6, 2, 3))[0]
        return Kill(member, target, rng.randint(1, 36), rng.random() < 0.5)
    if draw < 0.5:
        return Kill(member, rng.choice(("training", "host")), time=rng.random() * 2 * longest)
    if draw < 0.56:
        return Cut(member, rng.random() * 2 * longest, rng.choice((0.5, 3.0, 9.0, 30.0)))
    if draw < 0.57:
        return StoreGone(rng.random() * 3 * longest)
    if draw < 0.59:
        return Act(member, "limit", rng.randrange(3))
    names = rng.choices((RAISES, LEAVES, EXTRAS), (5, 3, 1))[0]
    return Act(member, rng.choice(names), rng.choice((0, 0, 1, 2)))
