"""A monitor process, written with the real verbs: heartbeats, the neighbour's heartbeats, timeouts, the lease, and
speaking for the dead."""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from inprocess import coordinator, guardian
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import StoreLost
from inprocess.protocol.ops import Verb
from tests.sim.engine import Process, Thread, Until
from tests.sim.scenario import BARRIER_TIMEOUT, HEARTBEAT, HEARTBEAT_TIMEOUT
from tests.sim.training import Training

if TYPE_CHECKING:
    from tests.sim.world import World


class Monitor(Process):
    """The monitor process of one member."""

    def __init__(self, world: World, training: Training, number: int) -> None:
        super().__init__(world.engine, world.store, f"monitor{training.member}" + "'" * number)
        self.world, self.training, self.member = world, training, training.member
        #: signs its entries; a new monitor signs like the one before it
        self.by = f"monitor of {self.member}"
        self.book = copy.copy(training.book)
        self.ring = guardian.Ring(self.member, HEARTBEAT_TIMEOUT, HEARTBEAT)
        #: members it speaks for or has spoken for
        self.speaks: dict[int, Thread] = {}
        self.saw_death = False
        self.delay = training.delay if number == 0 else 0.0
        self.spawn(self._guarded(self._follow()))
        self.spawn(self._guarded(guardian.keep_watch(self.ring, lambda: self.book, self._beaten, self._lost)))
        self.spawn(self._guard())
        self._beaten(max(training.leased_from, self.engine.now + self.delay if number == 0 else 0.0))
        self.delay = 0.0
        if not training.alive:
            self.training_ended()

    def _guarded(self, verb: Generator[Any, Any, Any]) -> Generator[Any, Any, None]:
        """A monitor whose store is gone stays: its lease kills a training process that does not leave by itself."""
        try:
            yield from verb
        except StoreLost as error:
            self.engine.note(self.name, error)

    def _follow(self) -> Generator[Any, Any, None]:
        if self.book.iteration >= 0:
            yield from self._publish()
        while True:
            if self.book.iteration >= 0 and (yield from coordinator.await_outcome(self.book.iteration)).completed:
                return
            decision = yield from coordinator.await_next(self.book.iteration)
            self.book.apply(decision)
            if decision.abort:
                return
            yield from self._publish()

    def _publish(self) -> Verb[None]:
        if self.world.scenario.shared_host and self.book.roster and self.book.roster[0] == self.member:
            address = f"{self.name}:{self.book.iteration}"
            yield from coordinator.publish_rendezvous(self.book.iteration, address)

    # --- heartbeats -------------------------------------------------------------------------------------------

    def _beaten(self, when: float) -> None:
        self.training.leased_from = when
        due = when + 0.9 * HEARTBEAT_TIMEOUT - self.engine.now
        self.engine.at(max(0.0, due), self._check_lease)

    def _check_lease(self) -> None:
        if self.alive and self.engine.now - self.training.leased_from >= 0.9 * HEARTBEAT_TIMEOUT - 1e-9:
            self.training.end("killed: its monitor could not reach the store (lease)")

    def _lost(self, member: int, seconds: float) -> None:
        if member not in self.speaks:
            self.world.declared(member, self.name)
            self.speaks[member] = self.spawn(self._guarded(self._speak(member, guardian.lost_record(member, seconds))))

    # --- for the dead -----------------------------------------------------------------------------------------

    def _speak(self, member: int, record: InterruptionRecord) -> Verb[None]:
        if member in self.book.roster:
            yield from guardian.stand_in(copy.copy(self.book), member, record, self.by)
        yield from coordinator.gone(member, self.world.scenario.members)

    def training_ended(self) -> None:
        """The pidfd of the training process became readable, a moment ago."""
        self.engine.at(self.engine.latency(), self._see_death)

    def _see_death(self) -> None:
        self.saw_death = True
        self.notify()

    def _guard(self) -> Generator[Any, Any, None]:
        yield Until(lambda: self.saw_death)
        self.engine.at(BARRIER_TIMEOUT, self._give_up)
        record = InterruptionRecord(0, Interruption.TERMINATED, initial_rank=self.member, message="died")
        if self.training.accounted:
            yield from self._guarded(coordinator.gone(self.member, self.world.scenario.members))
        else:
            yield from self._guarded(self._speak(self.member, record))
        self.end("exits")

    def _give_up(self) -> None:
        if self.alive:
            self.world.overdue.add(self.member)
            self.end("exits: barrier_timeout")

    def report_hang(self) -> None:
        """soft_timeout: record it, so it works while the training process cannot."""
        record = InterruptionRecord(0, Interruption.SOFT_TIMEOUT, initial_rank=self.member)
        self.spawn(self._guarded(coordinator.interrupt(self.training.book.iteration, record)))
