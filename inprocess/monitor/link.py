"""The store side of a monitor process: its threads, each with its own connection, and what they have learned so far.

They carry out verbs of ``protocol.verbs`` and serve stores. They decide nothing about the rank and never
end the process: what matters is posted to the main thread as an event. Nothing of torch is imported before ``start``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from inprocess.attribution import InterruptionRecord
from inprocess.exception import BadMessage, RestartAbort, StoreLost, TimeoutError
from inprocess.monitor import policy
from inprocess.monitor.board import LEASE, Board
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.connections import Connections, driving
from inprocess.monitor.events import (
    Connected,
    Decided,
    Event,
    Interrupted,
    Joined,
    Over,
    Spoken,
    StandbyChanged,
    Unbegun,
    Woken,
)
from inprocess.monitor.heartbeat_tasks import HeartbeatTasks
from inprocess.monitor.roles import StandbyRole
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import Decision
from inprocess.protocol.verbs import joining, watching
from inprocess.stores.driver import execute
from inprocess.stores.iteration import IterationServers
from inprocess.system import clock, extensions
from inprocess.system.logs import get_logger

__all__ = ["Link"]

T = TypeVar("T")
log = get_logger("inprocess.monitor")
#: how long a finished host waits for the others before it tells its training process not to wait for it (seconds)
FAREWELL_S = 0.05


class Link:
    """Threads and connections of one monitor. Each field has one writer; ``membership`` is replaced, not changed."""

    def __init__(
        self, config: MonitorConfig, board: Board, post: Callable[[Event], None], predecessor: int = -1
    ) -> None:
        self._config, self._board, self._post = config, board, post
        self._by = f"the monitor of initial rank {config.rank} on {socket.gethostname()}"
        self._connections = Connections(config, post, self._spoiled, self._in_job, predecessor)
        self.spawn, self.with_store = self._connections.spawn, self._connections.with_store
        #: what is done here for the case that the store is lost; None before torch is imported, and without failover
        self._standby: StandbyRole | None = None
        #: no heartbeats any more: the rank votes
        self._moves = threading.Event()
        self._tasks = HeartbeatTasks()
        self._rendezvous = IterationServers(config.rendezvous_host, config.serve_host, config.bind)
        #: the member's view of the job
        self.membership = config.membership()
        #: the rank is a founder, or has a ticket; until then ``member`` is what a founder would be
        self._identified = threading.Event()
        #: the rank is a member, or was one
        self._inside = threading.Event()
        if config.identified:
            self.identify(config.member)
        #: the last iteration that was seen interrupted, and when (ns)
        self.interrupted: tuple[int, int] = (-2, 0)
        #: when this member was found off the roster (ns)
        self.removed_at: int | None = None
        limits = (config.soft_timeout, config.hard_timeout, config.heartbeat_timeout)
        self.limits = policy.Timeouts.of(*limits, config.progress_watchdog_interval, config.barrier_timeout)
        #: when this monitor's last heartbeat that got through in time was begun (s), or None
        self.heartbeat_at: float | None = None
        self._lease, self._lease_is_over = threading.Lock(), False
        #: the job has ended, or goes on without this member
        self.ended = threading.Event()
        #: members for which it has begun to speak and is not done
        self.speaking: set[int] = set()

    # --- what the main thread asks for; nothing here blocks -----------------------------------------------------

    def start(self) -> None:
        """Import torch, serve if this is the host, connect, follow the job and send heartbeats."""
        self.spawn(self._connections.load, self._loaded)

    def report(self, iteration: int, record: InterruptionRecord) -> None:
        """Interrupt an iteration."""
        self.spawn(self.with_store, driving(lambda: verbs.interrupt(iteration, record)))

    def foretell(self, iteration: int, record: InterruptionRecord, died: threading.Event) -> None:
        """The training process is dying: interrupt the others, and get ready to speak for it once it has ``died``."""
        self._tasks.ask(verbs.foretell(iteration, record))
        self._speak_for(self.member, record, died)

    def speak(self, record: InterruptionRecord) -> None:
        """Account for the dead training process until it is off the roster or the job has ended; posts Spoken."""
        if self.inside:
            self._speak_for(self.member, record)
        else:
            self.spawn(self.with_store, lambda connection: self._speak_outside(record, connection))

    def identify(self, member: int) -> None:
        """Who the rank is: a founder that has arrived, or the id on its ticket."""
        self.membership = dataclasses.replace(self.membership, member=member)
        self._look_inside()
        self._identified.set()

    @property
    def member(self) -> int:
        return self.membership.member

    @property
    def inside(self) -> bool:
        """The rank is a member of the job, or was one."""
        return self._inside.is_set()

    def ask_begun(self) -> None:
        """Posts Unbegun where the job has not begun."""
        self.spawn(self.with_store, self._ask_begun)

    def say_gone(self) -> None:
        """The rank has said all by itself; posts Spoken."""
        self.spawn(self._say_gone)

    def linger(self) -> None:
        """Wait until the others need this host no more; posts Over, perhaps twice."""
        self.spawn(self._linger)

    def move(self) -> None:
        """The rank asks an arbiter where the job goes on: what serves the store now must not count on it."""
        self._moves.set()

    @property
    def patience(self) -> float:
        """How long members may come that lost the store (seconds)."""
        return self._standby.patience if self._standby is not None else 0.0

    def lose(self) -> None:
        """The store is lost: members may come to this standby."""
        if self._standby is not None:
            self._standby.lose()

    def give_up_after(self, seconds: float) -> None:
        """Stop waiting for a store that is not up; not before there was so much time to look for it."""
        self.spawn(self._give_up_after, seconds)

    @property
    def lease_until(self) -> int | None:
        """Until when the others do not go on without this member, a predecessor's heartbeats included (ns)."""
        return self._board.slots[LEASE] or None

    def end_lease(self) -> None:
        """For good: the others go on without this rank, which cannot be ended."""
        with self._lease:
            self._lease_is_over = True
            self._board.slots[LEASE] = 1

    @property
    def is_host(self) -> bool:
        """Whether others use a store that is served here."""
        return self._config.serve_port is not None or (self._rendezvous.serving and self.membership.included)

    @property
    def is_asked(self) -> bool:
        """Whether there are members that may ask this standby, or use its store."""
        return self._standby is not None and self._standby.is_needed

    @property
    def serves_again(self) -> bool:
        """Whether the job goes on here."""
        return self._standby is not None and self._standby.serves

    # --- threads ------------------------------------------------------------------------------------------------

    def _loaded(self) -> None:
        if self._config.standby_stores:  # only now: it imports torch
            self._standby = extensions.first("StandbyRole")(self._config, self._connections.spec, self)
        if not self._identified.is_set():
            self.spawn(self.with_store, self._ask_identity)
        self.spawn(self.with_store, self._follow)
        self.spawn(self.with_store, self._watch)

    def heard(self) -> float | None:
        """When the last heartbeat that got through in time was begun (s); None: there is no lease."""
        return self.limits.beaten_at(self.lease_until)

    def standby_changed(self) -> None:
        """Posts StandbyChanged."""
        self._post(StandbyChanged())

    def _in_job(self) -> bool:
        """Or its rank, which may have learned of it sooner: the store that is lost is not that of the call before."""
        return max(self.membership.iteration, self._board.snapshot().iteration) > verbs.JOINING

    def stop_serving(self) -> None:
        """Close the servers of the base store and of iterations; clients find them lost."""
        self._connections.server = None  # torch shuts it down when the last reference goes
        self._rendezvous.close_before(1 << 62)

    def _spoiled(self, error: BadMessage) -> None:
        """Nobody can go on: say so to the others, who may never read that value, and have this rank leave in time."""
        log.error("%s", error)
        iteration = self.membership.iteration
        if self.removed_at is None:
            self.removed_at = clock.monotonic_ns()
        self.ended.set()
        self._post(Woken())
        with contextlib.suppress(StoreLost, TimeoutError):
            self.with_store(driving(lambda: verbs.give_up(iteration, str(error))))

    # --- following the job --------------------------------------------------------------------------------------

    def _ask_identity(self, connection: Any) -> None:
        """A founder is known by its entry, also where it stops, or dies, before it can say so."""
        if execute(verbs.await_founder(self._config.rank, (self._config.me, self._by)), connection):
            self.identify(self._config.rank)

    def _give_up_after(self, seconds: float) -> None:
        self._connections.imported.wait()
        self._connections.give_up.wait(seconds)
        if self.heartbeat_at is None:
            self._connections.give_up.set()

    def _ask_begun(self, connection: Any) -> None:
        if not execute(verbs.has_begun(), connection):
            self._post(Unbegun())

    def _follow(self, connection: Any) -> None:
        """next -> outcome -> next -> ...: the chain of decisions, until the job ends or goes on without this member."""
        self._identified.wait()
        if not self.inside:  # it has a ticket
            try:
                self.membership = execute(joining.follow(self.member), connection)
            except RestartAbort:
                self.ended.set()
                return
        if self.membership.iteration == verbs.JOINING and self._config.rendezvous == "always":
            self._rendezvous.offer(0, connection)
        while not self.ended.is_set():
            try:
                decision = self._await_decision(connection)
            except verbs.Behind as behind:
                log.warning("%s", behind)
                self._move(Membership.jump, behind.roster)
                continue
            if decision is None:
                break
            outside = not self.inside
            self._go_on(decision)
            if outside and self.inside:  # at once: the others wait for its first heartbeat
                self._beat(connection)
            # the first time it stood by already, but perhaps in the store of the call before
            self._stand_by(connection, again=self.membership.iteration == 0)
        if self.membership.iteration > verbs.JOINING:  # before it, who comes late is to hear why nobody begins
            self._connections.end()
        self.ended.set()

    def _beat(self, connection: Any) -> None:
        now = clock.monotonic()
        execute(verbs.beat(self.member), connection)
        self._beaten(now)

    def _await_decision(self, connection: Any) -> Decision | None:
        """How this iteration ended; None: everybody has returned."""
        iteration = self.membership.iteration
        if iteration > verbs.JOINING:
            if self._is_rendezvous_host():
                self._rendezvous.offer(iteration, connection)
            execute(verbs.refuse_behind(iteration), connection)
            if execute(verbs.await_outcome(iteration), connection).completed:
                return None
            self._on_interrupted(iteration, connection)
        return execute(verbs.await_next_awake(iteration, membership=self.membership), connection)

    def _look_inside(self) -> None:
        if self.member in self.membership.known:
            self._inside.set()

    def _is_rendezvous_host(self) -> bool:
        smallest = self._config.rendezvous == "smallest" and self.membership.roster[0] == self.member
        return smallest or self._config.rendezvous == "always"

    def _on_interrupted(self, iteration: int, connection: Any) -> None:
        if self.inside:
            self.interrupted = (iteration, clock.monotonic_ns())
            self._post(Woken())
        if self._config.rendezvous == "always":
            self._rendezvous.offer(iteration + 1, connection)  # off the critical path: nobody asks for it yet

    def _go_on(self, decision: Decision) -> None:
        iteration = self.membership.iteration
        if decision.abort:  # the iteration stays the one that a rank has to leave
            log.info("iteration %d: everybody leaves: %s", iteration, decision.abort)
            self._tell_interrupted(iteration)
            self._rendezvous.close_before(self.membership.iteration + 1)
            self.ended.set()
            return
        before = self.membership
        self._move(Membership.apply, decision)
        if iteration > verbs.JOINING:
            failed = (record.initial_rank for record in decision.records if record.initial_rank is not None)
            self._post(Decided(iteration, before, self.membership, frozenset(failed)))
        self._tell_interrupted(iteration)

    def _tell_interrupted(self, iteration: int) -> None:
        membership = self.membership
        if iteration > verbs.JOINING and membership.included:
            self._post(Interrupted(iteration, membership.roster.index(membership.member)))

    def _move(self, change: Callable[[Membership, T], None], how: T) -> None:
        """Go to another iteration, of which this member may not be a part any more."""
        membership = copy.copy(self.membership)
        change(membership, how)
        if self._standby is not None:
            self._standby.go_on(membership)  # first: who sees this membership finds its roster there
        self.membership = membership
        self._look_inside()
        if self.inside and not membership.included and self.removed_at is None:
            self.removed_at = clock.monotonic_ns()
        if not self.lease_until:
            self._note_lease()  # it was alone from the start, and somebody has joined
        # not before: who still tries to connect would try for as long as its own timeout
        self._rendezvous.close_before(membership.iteration)
        log.info("iteration %d: %d members", membership.iteration, len(membership.roster))
        concerned = membership.included or not self.inside or self._config.serve_port is not None
        if not membership.roster or not concerned:
            self.ended.set()

    def _stand_by(self, connection: Any, again: bool) -> None:
        if self._standby is not None and self.inside:
            self._standby.stand_by(connection, again)

    # --- heartbeats ---------------------------------------------------------------------------------------------

    def _watch(self, connection: Any) -> None:
        self._post(Connected())
        self._identified.wait()
        config = self._config
        ring = watching.Ring(self.member, config.heartbeat_timeout, config.heartbeat_interval)

        def lost(member: int, seconds: float) -> None:
            slot = self.membership.slot_of(member)
            log.warning("initial rank %d sends no heartbeats any more", slot)
            self._speak_for(member, watching.lost_record(slot, seconds))

        while True:
            try:
                self._stand_by(connection, again=True)  # before the first heartbeat: then others may ask where it is
                watch = watching.keep_watch(ring, lambda: self.membership, self._beaten, lost, self._moves.is_set)
                execute(self._tasks.within(watch), connection)
                return
            except BadMessage:
                raise
            except StoreLost as error:
                connection = self._connections.again(error, self.member)

    def _beaten(self, when: float) -> None:
        """A lease that has run out is never renewed: the others may have gone on. A process that was stopped and wakes
        gets its next heartbeat through sooner than anybody looks at the lease."""
        if (lease := self.lease_until) is not None and clock.monotonic_ns() >= lease:
            return
        first, self.heartbeat_at = self.heartbeat_at is None, when
        self._note_lease()
        if first:
            self._post(Joined())
        if self._rendezvous.serving and not self._rendezvous.has_spare:
            with contextlib.suppress(RuntimeError):  # there is no thread left
                self.spawn(self._rendezvous.make_ahead)

    def _note_lease(self) -> None:
        """There is none where it was alone from the start. Who is the last of many has one: a process that waits to
        join watches it, and goes on without it."""
        with self._lease:
            if self.heartbeat_at is not None and not self._lease_is_over:
                alone = self.membership.known == {self.member}
                self._board.slots[LEASE] = 0 if alone else int(self.heartbeat_at * 1e9) + self.limits.lease

    # --- speaking for the dead, and the end ---------------------------------------------------------------------

    def _speak_for(self, member: int, record: InterruptionRecord, died: threading.Event | None = None) -> None:
        log.warning("speaking for initial rank %d: %s", self.membership.slot_of(member), record)
        self.speaking.add(member)

        def action(connection: Any) -> None:
            if died is not None:
                died.wait()
            # first: this monitor may be killed, and nobody speaks for a member that is off the roster already
            self._gone(member, connection)
            try:
                execute(watching.report_death(copy.copy(self.membership), member, record, self._by), connection)
            except BadMessage as error:
                self._spoiled(error)

        self.spawn(self._speak_out, member, action, died is not None)

    def _speak_out(self, member: int, action: Callable[[Any], None], ahead: bool) -> None:
        try:
            try:
                self.with_store(action)
            except StoreLost:
                if not ahead:
                    raise
                self.with_store(action)  # the connection was made ahead, perhaps it alone was lost since
        finally:
            self.speaking.discard(member)
        self._post(Spoken(member))

    def _speak_outside(self, record: InterruptionRecord, connection: Any) -> None:
        """It may have been let in by now; and where nobody knows yet who it is, the store does."""
        try:
            if self._identified.is_set():
                membership = execute(joining.follow(self.member), connection)
                execute(joining.act_on_behalf_of(membership, record, self._by), connection)
            else:
                membership = copy.copy(self.membership)
                verb = joining.act_on_behalf_of_unknown(membership, self._config.me, record, self._by, self.identify)
                execute(verb, connection)
        except BadMessage as error:
            self._spoiled(error)
            self._gone(self.member, connection)  # it may be a founder's, for which the store's host waits
        except RestartAbort as error:
            log.info("everybody leaves: %s", error)
        self._post(Spoken(self.member))

    def _say_gone(self) -> None:
        def action(connection: Any) -> None:
            if not self.inside:  # the job was over before it was let in
                if not self.membership.was_founder:
                    execute(verbs.return_ticket(self.member), connection)
                return
            self._gone(self.member, connection)
            # usually all leave together; a next call then finds no server of this one
            execute(verbs.await_over(FAREWELL_S), connection)

        self.with_store(action)
        self._post(Spoken(self.member))

    def _gone(self, member: int, connection: Any) -> None:
        try:
            execute(verbs.gone(member, len(self.membership.known)), connection)
        except BadMessage as error:
            log.error("%s", error)  # the host waits for nobody longer than barrier_timeout

    def _linger(self) -> None:
        if self.ended.wait(FAREWELL_S) and self._everybody_has_gone(FAREWELL_S):
            self._post(Over(True))
            return
        self._post(Over(False))  # not yet: the training process need not wait for it
        self.ended.wait()
        self._everybody_has_gone(self._config.barrier_timeout)
        self._post(Over(True))

    def _everybody_has_gone(self, patience: float) -> bool:
        return self.with_store(driving(lambda: verbs.await_over(patience, self.membership.known)))
