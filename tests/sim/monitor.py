"""A monitor process, written with the real verbs: heartbeats, the neighbour's heartbeats, timeouts, the lease, and
speaking for the dead."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import RestartAbort, StoreLost
from inprocess.monitor import policy
from inprocess.protocol import verbs
from inprocess.protocol.messages import Decision
from inprocess.protocol.ops import Verb
from inprocess.protocol.phases import RUNNING
from inprocess.protocol.verbs import joining, watching
from tests.sim.desk import ArbiterServer
from tests.sim.engine import Process, Thread, Until, Work
from tests.sim.scenario import BARRIER_TIMEOUT, HARD_TIMEOUT, HEARTBEAT, HEARTBEAT_TIMEOUT, SOFT_TIMEOUT
from tests.sim.training import Training

if TYPE_CHECKING:
    from tests.sim.world import World

LIMITS = policy.Timeouts.of(SOFT_TIMEOUT, HARD_TIMEOUT, HEARTBEAT_TIMEOUT)
#: monitor_process_interval (seconds)
INTERVAL = 1.0
#: termination_grace_time: how long it waits for a job that has not begun, where its rank has given up (seconds)
GRACE = 1.0


class Monitor(Process):
    """The monitor process of one member."""

    def __init__(self, world: World, training: Training, generation: int) -> None:
        view = training.view
        name = f"monitor{training.number}" + "'" * generation
        super().__init__(world.engine, view.store, view.label(name))
        self.host, self.silence = training.host, training.silence
        self.world, self.training = world, training
        #: signs its entries; a new monitor signs like the one before it
        self.by = f"monitor of {training.number}"
        self.membership = training.founder_book()
        #: who its rank is in the job; None: not known yet
        self.identity: int | None = None
        if training.entered:
            self.membership, self.identity = copy.copy(training.membership), training.member
        #: members it speaks for or has spoken for, and those of them for which it is not done
        self.speaks: dict[int, Thread] = {}
        self.speaking: set[int] = set()
        self.saw_death = False
        self.view = policy.View(training.ticket.slot, LIMITS, self.membership.iteration)
        #: the last iteration that was seen interrupted, and when; when it was found off the roster, lost the store
        self.interrupted = (-2, 0.0)
        self.removed_at: float | None = None
        self.lost_at: float | None = None
        self.ended = False
        #: when it last applied its rules (ns); 0: not yet
        self.watched = 0
        #: when the last heartbeat that got through was begun
        self.beat_at: float | None = training.leased_from
        self._looked = self.engine.now
        #: the arbiter, where it stands by
        self.desk: ArbiterServer | None = None
        #: its rank goes on in another store, with another monitor
        self.retired = False
        if self.identity is not None or training.founds:
            self._stand_by()
        self.delay, self.pace = training.delay if generation == 0 else 0.0, training.pace
        if self.identity is None:
            self.spawn(self._guarded(self._ask_identity()))
        self.spawn(self._guarded(self._follow()))
        self._watcher = self.spawn(self._guarded(self._watch()))
        self.spawn(self._guard())
        self.protecting = self.spawn(self._protect())
        self.delay = 0.0
        if not training.alive:
            self.training_ended()

    def _stand_by(self) -> None:
        """Open an arbiter as soon as its member is one of those that stand by. It stays, those who stand by change."""
        view, roster = self.training.view, self.membership.roster
        if self.desk is None and self.member in self.world.standbys(view, roster):
            self.desk = ArbiterServer(self.world, self, view)
            self.world.opened(self.desk, self.member)

    def _guarded(self, verb: Generator[Any, Any, Any]) -> Generator[Any, Any, None]:
        """A monitor whose store is gone stays: its lease kills a training process that does not leave by itself."""
        try:
            yield from verb
        except RestartAbort:
            self.ended = True
        except StoreLost as error:
            self.engine.note(self.name, error)
            self.lost_at = self.lost_at or self.engine.now
            self.world.lost_touch(self.training)
            self.interrupt(self.protecting)
            if self.desk is not None:
                self.desk.lost()
            self.notify()

    @property
    def member(self) -> int:
        return self.training.ticket.slot if self.identity is None else self.identity

    @property
    def inside(self) -> bool:
        """Its rank is a member, or was one."""
        return self.identity in self.membership.known

    def _ask_identity(self) -> Verb[None]:
        slot = self.training.ticket.slot
        if (yield from verbs.await_founder(slot, (self.training.name, self.by))):
            self.identify(slot)

    def identify(self, member: int) -> None:
        """The training process has arrived as a founder, or has a ticket."""
        self.identity = member
        self.notify()

    def _follow(self) -> Generator[Any, Any, None]:
        yield Until(lambda: self.identity is not None)
        if not self.inside:
            self.membership = yield from joining.follow(self.member)
        self.notify()
        if self.membership.iteration >= 0:
            yield from self._publish()
        while not self.ended:
            try:
                decision = yield from self._await_decision()
            except verbs.Behind as behind:
                self.engine.note(self.name, behind)
                self.membership.jump(behind.roster)
            else:
                if decision is None:
                    break
                outside = not self.inside
                self.membership.apply(decision)
                if outside and self.inside:
                    now = self.engine.now
                    yield from verbs.beat(self.member)
                    self._beaten(now)
                self.ended = bool(decision.abort) or not self.membership.roster
            self._moved()
            if not self.ended:
                yield from self._publish()
        self.ended = True

    def _moved(self) -> None:
        """It stands in another iteration, of which its rank may not be a part any more."""
        if self.inside:
            self._stand_by()
        if self.training.leased_from is None:
            self._note_lease()
        if self.inside and not self.membership.included:
            self.removed_at = self.engine.now if self.removed_at is None else self.removed_at
            self.ended = True

    def _await_decision(self) -> Verb[Decision | None]:
        if self.membership.iteration >= 0:
            yield from verbs.refuse_behind(self.membership.iteration)
            if (yield from verbs.await_outcome(self.membership.iteration)).completed:
                return None
            if self.inside:
                self.interrupted = (self.membership.iteration, self.engine.now)
            self.interrupt(self.protecting)
        return (yield from verbs.await_next_awake(self.membership.iteration))

    def _publish(self) -> Verb[None]:
        if self.world.scenario.shared_host and self.membership.roster and self.membership.roster[0] == self.member:
            address = f"host{self.training.number}:{29500 + self.membership.iteration}"
            yield from verbs.publish_rendezvous(self.membership.iteration, address)

    # --- heartbeats -------------------------------------------------------------------------------------------

    def _watch(self) -> Verb[None]:
        yield Until(lambda: self.identity is not None)
        ring = watching.Ring(self.member, HEARTBEAT_TIMEOUT, HEARTBEAT)
        yield from watching.keep_watch(ring, lambda: self.membership, self._beaten, self._lost)

    def _beaten(self, when: float) -> None:
        if self.engine.now >= self.training.lease_ends:
            return  # never renewed
        self.beat_at = when
        self._note_lease()

    def stop_beating(self) -> None:
        """Its rank has lost the store, and votes."""
        self._watcher.done = True

    def retire(self) -> None:
        """Its rank goes on in another store. It stays as long as it serves one itself."""
        self.retired = True
        for thread in self.threads:
            thread.done = True
        if self.desk is None or self.desk.next is None:
            self.end("exits: its rank goes on with another store")
        else:
            self.spawn(self._serve())

    def _serve(self) -> Generator[Any, Any, None]:
        """Until nobody is left that began anew with the store that is served here."""
        desk = self.desk
        if desk is not None and desk.next is not None:
            yield Until(lambda: desk.idle)
            self.end("exits: nobody needs its store")

    def _note_lease(self) -> None:
        """As in the real one: there is none where it was alone from the start."""
        if self.beat_at is not None:
            self.training.leased_from = None if self.membership.known == {self.member} else self.beat_at
            self.training.notify()

    def _lost(self, member: int, seconds: float) -> None:
        if member not in self.speaks:
            self.world.declared(self, member)
            record = watching.lost_record(self.membership.slot_of(member), seconds)
            self.speaks[member] = self.spawn(self._guarded(self._speak(member, record)))

    # --- for the dead -----------------------------------------------------------------------------------------

    def _speak(self, member: int, record: InterruptionRecord) -> Verb[None]:
        self.speaking.add(member)
        try:
            yield from verbs.gone(member, len(self.membership.known))
            yield from watching.report_death(copy.copy(self.membership), member, record, self.by)
        finally:
            self.speaking.discard(member)
        self.notify()

    def training_ended(self) -> None:
        """Its main thread ends; the pidfd becomes readable a moment later, or several."""
        seen = self.training.snapshot(_ns(self.engine.now))
        if self.inside and seen.phase in RUNNING and not seen.reserve:
            self.spawn(self._guarded(verbs.foretell(seen.iteration, self._record())))
        self.engine.at(self.engine.latency(), self._see_death)

    def _see_death(self) -> None:
        self.saw_death = True
        self.notify()

    def _guard(self) -> Generator[Any, Any, None]:
        yield Until(lambda: self.saw_death)
        self.engine.at(BARRIER_TIMEOUT if self.training.result is None else GRACE, self._leave_unbegun)
        self.engine.at(BARRIER_TIMEOUT + GRACE, self._give_up)
        yield from self._guarded(self._last_words())
        yield Until(lambda: not self.speaking or self.lost_at is not None)
        yield from self._serve()
        self.end("exits")

    def _last_words(self) -> Verb[None]:
        training, membership, record = self.training, copy.copy(self.membership), self._record()
        if self.identity is None:
            yield from joining.act_on_behalf_of_unknown(membership, training.name, record, self.by, self.identify)
        elif training.accounted and self.inside:
            yield from verbs.gone(self.member, len(membership.known))
        elif training.accounted:
            yield from verbs.return_ticket(self.member)
        elif self.inside:
            yield from self._speak(self.member, record)
        else:
            yield from joining.act_on_behalf_of((yield from joining.follow(self.member)), record, self.by)

    def _record(self) -> InterruptionRecord:
        return InterruptionRecord(0, Interruption.TERMINATED, initial_rank=self.training.ticket.slot, message="died")

    def _leave_unbegun(self) -> None:
        if self.alive and self.membership.iteration == verbs.JOINING and not self.serves:
            self.end("exits: the job has not begun")

    @property
    def serves(self) -> bool:
        """A store, with which the job goes on."""
        return self.desk is not None and self.desk.next is not None

    def _give_up(self) -> None:
        if self.alive and not self.serves:
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
            self.spawn(self._guarded(verbs.interrupt(action.iteration, action.record)))
        else:
            self.view = dataclasses.replace(self.view, killed=True)
            self.training.end(f"killed: {action.record.message}")

    def _current_view(self, now: int, seen: policy.Snapshot) -> policy.View:
        iteration, when = self.interrupted
        stopped = self.engine.now - self._looked > SOFT_TIMEOUT / 2 + INTERVAL
        self._looked = self.engine.now
        interrupted = iteration == self.membership.iteration
        # who votes has left its function; the verdict does not take for ever
        votes = self.training.votes
        lost_at = None if votes else self.lost_at
        return dataclasses.replace(
            self.view,
            iteration=self.membership.iteration if self.inside else verbs.JOINING,
            interrupted_at=_ns(when) if interrupted else None,
            atomic_at=now if seen.atomic and interrupted else self.view.atomic_at,
            lease_until=None if votes or (self.ended and self.removed_at is None) else _ns(self.training.lease_ends),
            cut_off_at=_ns(lost_at if self.removed_at is None else self.removed_at),
            awake_since=now if stopped else self.view.awake_since,
        )


def _ns(seconds: float | None) -> Any:
    return None if seconds in (None, math.inf) else int(seconds * 1e9)
