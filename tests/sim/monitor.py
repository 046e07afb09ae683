"""A monitor process, written with the real verbs: heartbeats, the neighbour's heartbeats, timeouts, the lease, and
speaking for the dead."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from inprocess import coordinator, guardian, policy
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import StoreLost
from inprocess.protocol.messages import Decision
from inprocess.protocol.ops import Verb
from tests.sim.engine import Process, Thread, Until, Work
from tests.sim.scenario import BARRIER_TIMEOUT, HARD_TIMEOUT, HEARTBEAT, HEARTBEAT_TIMEOUT, SOFT_TIMEOUT
from tests.sim.training import Training

if TYPE_CHECKING:
    from tests.sim.world import World

LIMITS = policy.Limits.of(SOFT_TIMEOUT, HARD_TIMEOUT, HEARTBEAT_TIMEOUT)
#: monitor_process_interval (seconds)
INTERVAL = 1.0
#: termination_grace_time: how long it waits for a job that has not begun, where its rank has given up (seconds)
GRACE = 1.0


class Monitor(Process):
    """The monitor process of one member."""

    def __init__(self, world: World, training: Training, number: int) -> None:
        super().__init__(world.engine, world.store, f"monitor{training.member}" + "'" * number)
        self.world, self.training, self.member = world, training, training.member
        #: signs its entries; a new monitor signs like the one before it
        self.by = f"monitor of {self.member}"
        self.book = copy.copy(training.book)
        self.ring = guardian.Ring(self.member, HEARTBEAT_TIMEOUT, HEARTBEAT)
        #: members it speaks for or has spoken for, and those of them for which it is not done
        self.speaks: dict[int, Thread] = {}
        self.speaking: set[int] = set()
        self.saw_death = False
        self.view = policy.View(self.member, LIMITS, self.book.iteration)
        #: the last iteration that was seen interrupted, and when; when it was found off the roster, lost the store
        self.interrupted = (-2, 0.0)
        self.removed_at: float | None = None
        self.lost_at: float | None = None
        self.ended = False
        #: when it last applied its rules (ns); 0: not yet
        self.watched = 0
        self._looked = self.engine.now
        self.delay, self.pace = training.delay if number == 0 else 0.0, training.pace
        self.spawn(self._guarded(self._follow()))
        self.spawn(self._guarded(guardian.keep_watch(self.ring, lambda: self.book, self._beaten, self._lost)))
        self.spawn(self._guard())
        self.protecting = self.spawn(self._protect())
        self.delay = 0.0
        if not training.alive:
            self.training_ended()

    def _guarded(self, verb: Generator[Any, Any, Any]) -> Generator[Any, Any, None]:
        """A monitor whose store is gone stays: its lease kills a training process that does not leave by itself."""
        try:
            yield from verb
        except StoreLost as error:
            self.engine.note(self.name, error)
            self.lost_at = self.lost_at or self.engine.now
            self.interrupt(self.protecting)

    def _follow(self) -> Generator[Any, Any, None]:
        if self.book.iteration >= 0:
            yield from self._publish()
        while not self.ended:
            try:
                decision = yield from self._await_decision()
            except coordinator.Behind as behind:
                self.engine.note(self.name, behind)
                self.book.jump(behind.roster)
            else:
                if decision is None:
                    break
                self.book.apply(decision)
                self.ended = bool(decision.abort)
            if not self.book.included:
                self.removed_at = self.engine.now if self.removed_at is None else self.removed_at
                self.ended = True
            if not self.ended:
                yield from self._publish()
        self.ended = True

    def _await_decision(self) -> Verb[Decision | None]:
        if self.book.iteration >= 0:
            yield from coordinator.refuse_behind(self.book.iteration)
            if (yield from coordinator.await_outcome(self.book.iteration)).completed:
                return None
            self.interrupted = (self.book.iteration, self.engine.now)
            self.interrupt(self.protecting)
        return (yield from coordinator.await_next_awake(self.book.iteration))

    def _publish(self) -> Verb[None]:
        if self.world.scenario.shared_host and self.book.roster and self.book.roster[0] == self.member:
            address = f"host{self.member}:{29500 + self.book.iteration}"
            yield from coordinator.publish_rendezvous(self.book.iteration, address)

    # --- heartbeats -------------------------------------------------------------------------------------------

    def _beaten(self, when: float) -> None:
        if self.engine.now >= self.training.lease_ends:
            return  # never renewed
        self.training.leased_from = when
        self.training.notify()

    def _lost(self, member: int, seconds: float) -> None:
        if member not in self.speaks:
            self.world.declared(member, self.name)
            self.speaks[member] = self.spawn(self._guarded(self._speak(member, guardian.lost_record(member, seconds))))

    # --- for the dead -----------------------------------------------------------------------------------------

    def _speak(self, member: int, record: InterruptionRecord) -> Verb[None]:
        self.speaking.add(member)
        try:
            yield from coordinator.gone(member, self.world.scenario.members)
            yield from guardian.stand_in(copy.copy(self.book), member, record, self.by)
        finally:
            self.speaking.discard(member)
        self.notify()

    def training_ended(self) -> None:
        """The pidfd of the training process became readable, a moment ago."""
        self.engine.at(self.engine.latency(), self._see_death)

    def _see_death(self) -> None:
        self.saw_death = True
        self.notify()

    def _guard(self) -> Generator[Any, Any, None]:
        yield Until(lambda: self.saw_death)
        self.engine.at(BARRIER_TIMEOUT if self.training.result is None else GRACE, self._leave_unbegun)
        self.engine.at(BARRIER_TIMEOUT + GRACE, self._give_up)
        record = InterruptionRecord(0, Interruption.TERMINATED, initial_rank=self.member, message="died")
        if self.training.accounted:
            yield from self._guarded(coordinator.gone(self.member, self.world.scenario.members))
        else:
            yield from self._guarded(self._speak(self.member, record))
        yield Until(lambda: not self.speaking or self.lost_at is not None)
        self.end("exits")

    def _leave_unbegun(self) -> None:
        if self.alive and self.book.iteration == coordinator.JOINING:
            self.end("exits: the job has not begun")

    def _give_up(self) -> None:
        if self.alive:
            self.world.overdue.add(self.member)
            self.end("exits: barrier_timeout")

    # --- the rules --------------------------------------------------------------------------------------------

    def _protect(self) -> Generator[Any, Any, None]:
        while self.training.alive and not self.saw_death:
            self.watched = now = _ns(self.engine.now)
            seen = self.training.snapshot(now)
            self.view = self._current_view(now, seen)
            for action in policy.decide(now, seen, self.view):
                self._act(action)
            due = policy.wake_at(seen, self.view)
            yield Work(INTERVAL if due is None else max(0.0, min(INTERVAL, (due - now) / 1e9)), interruptible=True)

    def _act(self, action: policy.Action) -> None:
        self.engine.note(self.name, action)
        if isinstance(action, policy.Report):
            self.view = dataclasses.replace(self.view, reported=action.iteration)
            self.spawn(self._guarded(coordinator.interrupt(action.iteration, action.record)))
        else:
            self.view = dataclasses.replace(self.view, killed=True)
            self.training.end(f"killed: {action.record.message}")

    def _current_view(self, now: int, seen: policy.Snapshot) -> policy.View:
        iteration, when = self.interrupted
        stopped = self.engine.now - self._looked > SOFT_TIMEOUT / 2 + INTERVAL
        self._looked = self.engine.now
        interrupted = iteration == self.book.iteration
        return dataclasses.replace(
            self.view,
            iteration=self.book.iteration,
            interrupted_at=_ns(when) if interrupted else None,
            atomic_at=now if seen.atomic and interrupted else self.view.atomic_at,
            lease_until=None if self.ended and self.removed_at is None else _ns(self.training.lease_ends),
            cut_off_at=_ns(self.lost_at if self.removed_at is None else self.removed_at),
            awake_since=now if stopped else self.view.awake_since,
        )


def _ns(seconds: float | None) -> Any:
    return None if seconds in (None, math.inf) else int(seconds * 1e9)
