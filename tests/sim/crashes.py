"""Every crash point: a process is stopped before, or just after the effect of, each store operation of a whole life.

A life is a job with a restart in it: somebody joins, runs, restarts, completes, leaves. ``singles`` stops one process
at each of its operations, ``pairs`` a second one as well, at each operation of the life that the first stop left it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from inprocess.protocol.keys import JOINING
from tests import sim
from tests.sim.scenario import BARRIER_TIMEOUT, HEARTBEAT, HEARTBEAT_TIMEOUT, Act, Kill, Scenario, Spawn
from tests.sim.world import World

#: what is stopped: the training process, with its monitor (the host is lost), or the monitor alone
TARGETS = ("training", "host", "monitor")

#: the restart
RAISE = Act(0, "raise")

#: what a process that joins follows
DEATH = Kill(1, "training", time=0.3)

#: lives by name; the members are filled in
LIVES = {
    "all active": Scenario(1, faults=(RAISE,)),
    "with a reserve": Scenario(2, faults=(RAISE,), assignment="at most {active}"),
    "along a tree": Scenario(3, faults=(RAISE,), assignment="tree"),
    "the store of the iteration on a member": Scenario(4, faults=(RAISE,), shared_host=True),
    "one that dies is replaced": Scenario(5, faults=(DEATH, Spawn(1, 0.45))),
    "a spare is there": Scenario(6, faults=(DEATH, Spawn(0, 0.1))),
    "one is replaced at the next restart": Scenario(
        7, faults=(DEATH, Spawn(1, 0.5), Act(0, "raise", 1)), join="next_restart", longest=2.0
    ),
    "it grows": Scenario(8, faults=(Spawn(9, 0.2),)),
}

#: those that are stopped twice
IN_PAIRS = ("all active", "one that dies is replaced")

#: virtual seconds a job may take without a stop, and for each stop: to notice it, and to go on
CALM, PER_STOP = 5.0, HEARTBEAT_TIMEOUT + 4 * HEARTBEAT


def life(name: str, members: int) -> Scenario:
    """A job without any stop."""
    assignment = LIVES[name].assignment.format(active=members - 1)
    return dataclasses.replace(LIVES[name], members=members, assignment=assignment)


def singles(
    calm: Scenario, members: Iterable[int] | None = None, targets: Iterable[str] = TARGETS
) -> Iterator[Scenario]:
    """The job again and again, with one stop more: at each operation of each of these members' processes; None: of all,
    also of those that join."""
    world = sim.run(calm)
    for target in targets:
        for member in range(len(world.training)) if members is None else members:
            yield from _each_moment(calm, world, member, target)


def pairs(calm: Scenario, first: Scenario) -> Iterator[Scenario]:
    """All second stops beside the one that ``first`` adds to the calm job: of members behind it, and of any monitor."""
    world, stop = sim.run(first), first.faults[-1]
    assert isinstance(stop, Kill)
    for member in range(len(world.training)):
        yield from _each_moment(first, world, member, "monitor")
        if member > stop.member:
            yield from _each_moment(first, world, member, "training")
            yield from _each_moment(first, world, member, "host")


def _each_moment(job: Scenario, world: World, member: int, target: str) -> Iterator[Scenario]:
    process = (world.monitors if target == "monitor" else world.training)[member]
    for op in range(1, process.operations + 1):
        for after in (False, True):
            yield dataclasses.replace(job, faults=(*job.faults, Kill(member, target, op, after)))


def play(scenario: Scenario) -> World:
    """Run it, within its bound. Raises Failure."""
    stops = sum(isinstance(fault, Kill) for fault in scenario.faults)
    world = sim.run(scenario, max_time=BARRIER_TIMEOUT + CALM + stops * PER_STOP)
    unbegun = all(training.membership.iteration == JOINING for training in world.training)
    bound = CALM + stops * PER_STOP + unbegun * BARRIER_TIMEOUT
    if world.engine.now > bound:
        raise sim.Failure(f"{sim.story(world)}\nI3: ended after {world.engine.now:.1f} s, the bound is {bound:.1f} s")
    return world
