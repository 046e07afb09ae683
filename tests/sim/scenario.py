"""What shall happen in one simulated job: members, reserves, faults. Data, and how a seed becomes such data."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from tests.sim.assignments import ASSIGNMENTS

#: seconds; short, so that a life fits into few heartbeats
HEARTBEAT, HEARTBEAT_TIMEOUT, SOFT_TIMEOUT, HARD_TIMEOUT = 1.0, 6.0, 4.0, 7.0
#: how long a member waits for the founders, and a monitor for the end of a round it speaks in
BARRIER_TIMEOUT = 60.0
#: and a rank is at most so late with each of its commits: the monitor of a reserve that dies early waits no longer than
#: that for the iteration to end (seconds)
APART = 2.5


#: assignments of random jobs; in fours, most of them would only wait
CHOSEN = tuple(name for name in ASSIGNMENTS if name != "fours")


@dataclass(frozen=True)
class Kill:
    """Kill at a store operation, before it is sent or after it took effect, or at a time."""

    member: int
    #: training | monitor | host (both; operations are counted in the training process); or the newest store, also
    #: counted there: store (alone) | store host (with the member on it)
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
    #: both | out | in; store: from the host of the store alone, in jobs with standbys
    way: str = "both"


@dataclass(frozen=True)
class Freeze:
    """A member's processes stand still for a while, and then go on as if nothing had been."""

    member: int
    #: training | monitor | host (both)
    target: str
    time: float
    seconds: float
    #: from the training process' entry into this phase, instead of at a time ...
    phase: str = ""
    #: ... in the first iteration >= this one
    iteration: int = 0


@dataclass(frozen=True)
class Act:
    """What one member's function or hook does, once, in the first iteration >= ``iteration`` in which it gets there."""

    member: int
    what: str
    iteration: int = 0


@dataclass(frozen=True)
class Again:
    """A member's function raises the same error at its entry, in so many iterations from that one on."""

    member: int
    times: int
    iteration: int = 0


@dataclass(frozen=True)
class HangsAgain:
    """A member's function hangs at its entry, in so many iterations from that one on; the others wait for it."""

    member: int
    times: int
    iteration: int = 0


@dataclass(frozen=True)
class StoreGone:
    """The newest store ends, the first one without anybody else; ``host``: and the member on its host."""

    time: float
    host: bool = False


@dataclass(frozen=True)
class Split:
    """The hosts of these members are cut off from the first store and from all others for a while, and reach each
    other."""

    members: tuple[int, ...]
    time: float
    seconds: float


@dataclass(frozen=True)
class Spawn:
    """A process more is started, for this slot. As ``member`` of other faults, it counts on from the founders."""

    slot: int
    time: float


Fault = Kill | Cut | Freeze | Act | Again | HangsAgain | StoreGone | Split | Spawn

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
    #: seconds after which a process that died, or left with an error, is replaced by a new one; None: it is not
    respawn: float | None = None
    #: option ``join``
    join: str = "now"
    #: option ``max_repeats``
    max_repeats: int | None = 10
    #: how many monitors stand by for the loss of the store
    standbys: int = 0
    #: how long ranks wait for replacements where no active rank is left (seconds); 0: not at all
    patience: float = 0.0
    #: the function trains with a LiveState: "replicated", "sharded" or "hybrid" (two shards); "" it does not
    live: str = ""
    #: how long a rank may take from the gradients of all to its commit (seconds): so long it is a step behind
    apart: float = 0.0


def random_scenario(seed: int, members: int = 4, faults: int = 3) -> Scenario:
    """The job that belongs to a seed. Later faults prefer later iterations, where they meet a job half way."""
    rng = random.Random(f"scenario {seed}")
    longest = rng.choice((0.05, 0.5, 0.5, 2.0, 15.0))
    failover = random.Random(f"standbys {seed}")
    standbys = failover.choice((0, 0, 0, 0, 0, 2, 2, 1, 3)) if members > 1 else 0
    if standbys:
        longest = failover.choice((0.5, 2.0, 10.0, 40.0))
    chosen = tuple(_random_fault(rng, members, longest, number) for number in range(faults))
    joins = random.Random(f"joins {seed}")
    spawns: tuple[Fault, ...] = tuple(
        _random_spawn(joins, members, longest) for _ in range(joins.choice((0, 0, 0, 0, 0, 1, 2)))
    )
    again = random.Random(f"again {seed}")
    if again.random() < 0.15:
        spawns = (*spawns, _random_again(again, members))
    hangs = random.Random(f"hangs {seed}")
    if hangs.random() < 0.05:
        spawns = (*spawns, HangsAgain(hangs.randrange(members), hangs.choice((2, 3, 4)), hangs.choice((0, 0, 1, 2))))
    if standbys:
        chosen = (*chosen[: failover.choice((0, 0, 1, 1, 3))], *_random_losses(failover, members, longest))
    delicate = random.Random(f"delicate {seed}")
    chosen = tuple(_in_a_phase(delicate, fault) if isinstance(fault, Freeze) else fault for fault in chosen)
    if standbys:
        chosen = tuple(_from_the_store(delicate, fault) if isinstance(fault, Cut) else fault for fault in chosen)
    return Scenario(
        seed,
        members,
        (*chosen, *spawns),
        assignment=rng.choice(("shift", "shift", "at most 2", "at most 3", *CHOSEN)),
        shared_host=rng.random() < 0.3,
        delays=tuple(rng.random() * 10.0 for _ in range(members)) if rng.random() < 0.1 else (),
        longest=longest,
        slow=(rng.randrange(members),) if rng.random() < 0.15 else (),
        commits=rng.choice((0, 1, 1, 4)),
        respawn=joins.choice((None, None, 0.0, 0.2, 3.0)),
        join=joins.choice(("now", "now", "next_restart")),
        standbys=standbys,
        patience=random.Random(f"patience {seed}").choice((0.0, 0.0, 20.0)),
        live=_random_live(seed),
        apart=random.Random(f"apart {seed}").choice((0.0, 0.0, 0.0, min(longest / 6, APART))),
    )


def _random_live(seed: int) -> str:
    live = random.Random(f"live {seed}").choice((*[""] * 6, "replicated", "sharded"))
    return "hybrid" if live == "sharded" and random.Random(f"hybrid {seed}").random() < 0.5 else live


def _random_again(rng: random.Random, members: int) -> Again:
    """Mostly a few times, sometimes for ever."""
    return Again(rng.randrange(members), rng.choice((2, 3, 4, 5, 11, 14)), rng.choice((0, 0, 1, 2)))


def _random_spawn(rng: random.Random, members: int, longest: float) -> Spawn:
    """Mostly of a slot that exists, which makes it a spare; sometimes the job grows."""
    return Spawn(rng.randrange(members + (rng.random() < 0.3)), rng.random() * 3 * longest)


#: the second loss comes so long after the first, or less: while they vote, while they join, or much later
_LATER = (0.3, 3.0, 10.0, 30.0)


def _random_losses(rng: random.Random, members: int, longest: float) -> list[Fault]:
    """Of the store or of the way to it, and more while the others deal with that."""
    time = rng.choice((0.1, 0.5, 1.0, 1.0)) + rng.random() * 2 * longest
    losses: list[Fault] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        losses.append(_random_loss(rng, members, time))
        time += rng.random() * rng.choice(_LATER)
    return losses


def _random_loss(rng: random.Random, members: int, time: float) -> Fault:
    draw = rng.random()
    if draw < 0.3:
        return StoreGone(time, host=rng.random() < 0.7)
    if draw < 0.6:
        side = tuple(member for member in range(members) if rng.random() < 0.5) or (members - 1,)
        return Split(side, time, rng.choice((3.0, 9.0, 9.0, 16.0, 30.0)) * (0.7 + rng.random() * 0.6))
    member = rng.randrange(members)
    if draw < 0.8:
        phase = rng.choice(("", "join", *_DELICATE))
        target, op = rng.choice(("store", "store host", "host", "training")), rng.randint(1, 5 if phase else 40)
        return Kill(member, target, op, rng.random() < 0.5, phase=phase, iteration=rng.randint(0, 2))
    if draw < 0.9:
        return Kill(member, rng.choice(("host", "training", "monitor")), time=time)
    if draw < 0.95:
        return Cut(member, time, rng.choice(_AWAY), rng.choice(("both", "out", "in")))
    return Freeze(member, rng.choice(("training", "monitor", "host")), time, rng.choice(_AWAY))


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


def _from_the_store(rng: random.Random, fault: Cut) -> Cut:
    """Every other host is heard by the others, so that all of them know who has gone on without it."""
    return fault if rng.random() < 0.5 else dataclasses.replace(fault, way="store")


def _in_a_phase(rng: random.Random, fault: Freeze) -> Freeze:
    """Every other one begins where something may be half done, so that what it misses is the rest of a restart."""
    if rng.random() < 0.5:
        return fault
    return dataclasses.replace(fault, phase=rng.choice(_DELICATE), iteration=rng.randint(0, 2))
