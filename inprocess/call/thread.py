"""The MonitorThread: follows the job's chain of decisions and gets the main thread out of an interrupted iteration.

It is the only thread of the training process that waits on the store. What it learns goes into a mailbox, on which the
main thread waits locally, so that the main thread stays interruptible. It never decides anything.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inprocess.attribution import Interruption, ranges
from inprocess.call.mailbox import Mailbox
from inprocess.call.successor import Successor
from inprocess.exception import (
    BadMessage,
    InternalError,
    OptionError,
    RankShouldRestart,
    RestartAbort,
    RestartError,
    StoreLost,
)
from inprocess.interrupt import in_flight, whereabouts
from inprocess.interrupt.gate import Gate
from inprocess.monitor.process import MonitorProcess
from inprocess.protocol import verbs
from inprocess.protocol.keys import JOINING
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import Decision, JoinMode, Outcome, Spot, Start, Ticket
from inprocess.protocol.verbs import joining
from inprocess.stores.connecting import connect
from inprocess.stores.connections import connections, cut, shut
from inprocess.stores.driver import execute
from inprocess.stores.owner import Access, Owner, access, find_owner, remedy
from inprocess.stores.spec import StoreSpec
from inprocess.system import clock, descriptors
from inprocess.system.interpreter import SLICE, interpreter
from inprocess.system.logs import get_logger
from inprocess.system.observers import emit, is_wanted

__all__ = ["Admission", "MonitorThread", "RankShouldRestart", "JoinRequest"]

log = get_logger(__name__)
#: how long a thread that should end by itself is waited for before its connection is cut (seconds)
CLOSE_LIMIT_S = 2.0
#: first pause before a rank assignment is released again; doubled each time (seconds)
FIRST_PAUSE_S = 0.002
#: pause before a lost connection is made again, while joining (seconds)
RECONNECT_PAUSE_S = 0.05
#: how long a server may take to say whose it is (seconds)
OWNER_LIMIT_S = 5.0
#: how long a process waits for one with its rank that has more in common with rank 0 (seconds)
DOUBT_S = 2.0


@dataclass(frozen=True)
class JoinRequest:
    """How a process comes to the job."""

    entry: JoinMode
    #: with which it joins, where the job runs already
    ticket: Ticket
    #: whether it interrupts a running iteration for that: of so many members, which become so many
    interrupts: Callable[[int, int], bool]
    #: its job
    job: Owner
    #: whether a monitor of this library serves the store, and says whose it is
    has_owner: bool


@dataclass(frozen=True)
class Admission:
    """The verdict that lets a process in (None: the job completed before), and its membership before that."""

    membership: Membership
    decision: Decision | None


class MonitorThread(threading.Thread):
    """One per call of a wrapped function. Joins the job for it, too.

    Letters it puts into the mailbox: ``entered`` (a Membership: this process is a founder, or waits to join),
    ``let in`` (an Admission), ``next`` (a Decision: the iteration begins), ``rendezvous`` (str), ``start`` (Start),
    ``outcome`` (Outcome), ``aborted`` (True: the abort ladder of an interrupted iteration has ended).
    """

    def __init__(
        self,
        spec: StoreSpec,
        membership: Membership,
        request: JoinRequest,
        monitor: MonitorProcess,
        successor: Successor,
        new_gate: Callable[[], Gate],
        abort: Callable[[int], None],
        release: Callable[[], None],
        started: Callable[[], None],
        last_ran: Callable[[], float],
        retry_after: float,
        timeout: float,
    ) -> None:
        super().__init__(name="inprocess-monitor", daemon=True)
        self.mailbox = Mailbox()
        self._spec, self._request, self._timeout = spec, request, timeout
        self._monitor, self._successor = monitor, successor
        self._new_gate, self._abort, self._release, self._after_start = new_gate, abort, release, started
        self._retry_after = retry_after
        self._last_ran = last_ran
        self._own = copy.copy(membership)
        self._lock = threading.Lock()
        # under the lock: the gate of the running iteration; whether that iteration is over; the store and sockets to it
        self._gate: Gate | None = None
        self._over = False
        #: the gate that the main thread has been given last; its own
        self._given: Gate | None = None
        self._store: Any = None
        self._sockets: list[int] = []
        self._ending = threading.Event()
        #: the iteration that ended with a soft timeout, where the main thread was then, and until when it had run
        self._spot: tuple[int, Spot | None, float] = (JOINING, None, 0.0)
        #: the iteration that ended early, or whose store was lost, and when this thread heard of it (seconds)
        self.heard: tuple[int, float] = (JOINING, 0.0)
        #: what the server says that its job has drawn, once this process takes part in it
        self.drawn = ""
        #: nothing is said for this process, by the monitor neither: the store is another job's, or nobody begins there,
        #: and the next job may serve its own at that address by now
        self.stays_out = False
        #: set by the main thread when it has its ranks, or has given up on them
        self.assigned = threading.Event()

    # --- main thread --------------------------------------------------------------------------------------------

    def enter(self) -> Gate | None:
        """A gate for the main thread to run user code behind, or None where the iteration is over already."""
        with self._lock:
            if self._over:
                return None
            self._given = self._gate = self._new_gate()
            return self._gate

    def stay_out(self) -> None:
        """The main thread runs no user code any more. Ctrl-C may have kept it from coming to its gate."""
        if self._given is not None:
            self._given.leave()

    def end_hook(self) -> None:
        """Interrupt the hook that this rank runs while it waits, and with it nobody else. In a thread of its own."""
        with self._lock:
            gate, self._gate = self._gate, None
        if gate is not None:
            gate.close_for_abort(_report_atomic)
            gate.interrupt_until_left(retry_after=self._retry_after, release=self._release)

    def spot(self, iteration: int) -> Spot | None:
        """Where the main thread was when it was known that this iteration ends with a soft timeout."""
        return self._spot[1] if self._spot[0] == iteration else None

    def ran_until(self, iteration: int) -> float | None:
        """When the main thread had last run bytecode then (seconds); None: this iteration ends otherwise."""
        return self._spot[2] if self._spot[0] == iteration else None

    def leave_after_outcome(self) -> None:
        """The rank leaves the job: do not follow it into another iteration."""
        self.stay_out()
        self._ending.set()

    def lose(self, timeout: float) -> bool:
        """The store is lost for this rank: wait until this thread has seen it too, and has aborted."""
        self.cut()
        return self.mailbox.await_failure(timeout)

    def stop(self, cut: bool) -> None:
        """End the thread. It usually has ended by itself; otherwise its connection is cut, at once with ``cut``."""
        self.stay_out()
        self._ending.set()
        self.assigned.set()  # never will be, where the call ended before that
        if self.ident is None:
            return
        self.join(0 if cut else CLOSE_LIMIT_S)
        if self.is_alive():
            self.cut()
            self.join(CLOSE_LIMIT_S)

    def cut(self) -> None:
        """Have it find the store lost, if it waits for that now."""
        with self._lock:
            for descriptor in self._sockets:
                shut(descriptor)
            cut(self._store)

    # --- this thread --------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            store, let_in = self._join()
            self.mailbox.put("let in", JOINING, let_in)
            if let_in.decision is not None:
                self._own = copy.copy(let_in.membership)
                self._follow(store, let_in.decision)
        except (RestartError, RestartAbort) as error:
            self._fail(error)
        except Exception as error:
            self._fail(_explained(error))
        finally:
            with self._lock:
                self._store, self._sockets = None, []

    def _connect(self) -> Any:
        before = {descriptor for descriptor, _ in connections()}
        store = connect(self._spec, self._timeout, self._ending)
        with self._lock:
            mine = [descriptor for descriptor, peer in connections() if peer[1] == self._spec.port]
            self._store, self._sockets = store, [descriptor for descriptor in mine if descriptor not in before]
        return store

    def _join(self) -> tuple[Any, Admission]:
        """Arrive and wait for everybody. A server that goes away meanwhile was that of the call before: begin again."""
        deadline = clock.monotonic() + self._timeout
        while True:
            store = self._connect()
            try:
                if (founds := self._enter(store, deadline)) is not None:
                    return store, self._found(store) if founds else self._join_late(store)
            except BadMessage:
                raise
            except (OptionError, RestartAbort):
                self.stays_out = True
                raise
            except StoreLost:
                late = not self._own.was_founder  # with a ticket, which went with the store
                if late or self._ending.wait(RECONNECT_PAUSE_S) or clock.monotonic() > deadline:
                    raise

    def _enter(self, store: Any, deadline: float) -> bool | None:
        """Whether this process is a founder. None: the store is that of a job that is over.

        Raises OptionError where it is another job's.
        """
        request, where = self._request, str(self._spec)
        owner = mine = request.job
        if request.has_owner:
            owner = self._ask_owner(store, min(deadline, clock.monotonic() + OWNER_LIMIT_S))
            how = access(owner, mine, request.entry)
            if how is Access.LATER and clock.monotonic() < deadline and not self._ending.wait(RECONNECT_PAUSE_S):
                return None
            if how is not Access.GRANTED:
                raise OptionError(f"the store at {where} is that of {_described(owner)}. {remedy(where)}")
        nameless = request.entry is JoinMode.FOUND and not mine.name
        if nameless and not owner.is_kin(mine):  # first those whose job this is more likely to be
            self._ending.wait(DOUBT_S)
        in_doubt = nameless and owner.is_kin(mine)
        verb = verbs.join(self._own, request.ticket.by, request.entry, in_doubt=in_doubt, remedy=remedy(where))
        founds = execute(verb, store)
        if request.has_owner:
            self.drawn = owner.drawn
        return founds

    def _ask_owner(self, store: Any, deadline: float) -> Owner:
        while (owner := find_owner(store)) is None:
            if clock.monotonic() > deadline:
                raise OptionError(
                    f"a store is served at {self._spec}, but no process of this library serves it. "
                    f"{remedy(str(self._spec))}"
                )
            if self._ending.wait(RECONNECT_PAUSE_S / 10):
                raise StoreLost("the call has ended")
        return owner

    def _found(self, store: Any) -> Admission:
        self.mailbox.put("entered", JOINING, self._own)
        decision = execute(verbs.await_next(JOINING, membership=self._own), store)
        execute(verbs.refuse_stranger(self._own), store)
        return Admission(self._own, decision)

    def _join_late(self, store: Any) -> Admission:
        """The job runs already: wait for a slot in it."""
        ticket = self._request.ticket
        # a running job is interrupted to let this process in: the others would wait for its heartbeats
        self._monitor.await_connected(self._timeout)
        self._own = execute(joining.register(ticket), store)
        self._monitor.identify(self._own.member)
        self.mailbox.put("entered", JOINING, copy.copy(self._own))
        decision = execute(joining.await_slot(self._own, ticket, self._request.interrupts, _report_waiting), store)
        if decision is not None:
            execute(verbs.return_ticket(self._own.member), store)
        return Admission(self._own, decision)

    def _follow(self, store: Any, decision: Decision) -> None:
        iteration = self._own.iteration + 1
        while True:
            self._own.apply(decision)
            self._begin(iteration, decision)
            if decision.abort or not self._own.included:
                return
            if not self._follow_iteration(iteration, store) or self._ending.is_set():
                return
            decision = execute(verbs.await_next(iteration, membership=self._own), store)
            iteration += 1

    def _begin(self, iteration: int, decision: Decision) -> None:
        with self._lock:
            self._gate, self._over = None, False
        self.assigned.clear()
        self.mailbox.put("next", iteration, decision)

    def _follow_iteration(self, iteration: int, store: Any) -> bool:
        """One iteration up to its outcome; False where no other follows."""
        self.mailbox.put("rendezvous", iteration, execute(verbs.await_rendezvous(iteration), store))
        start: Start = execute(verbs.await_start(iteration), store)
        if not start.go:
            with self._lock:
                self._over = True
        first = start.go and not self._successor.has_met
        if first:  # before this rank enters: from then on the store may be lost
            self._successor.meet(self._own, store)
        self.mailbox.put("start", iteration, start)
        if start.go:
            execute(verbs.forget(iteration, self._own), store)
            if not first:
                self._successor.meet(self._own, store)
            self._after_start()
        else:
            self._release_assignment()
        outcome: Outcome = execute(verbs.await_outcome(iteration), store)
        if not outcome.completed:
            interpreter.hurry()
            self.heard = iteration, clock.monotonic()
        if outcome.cause is not None and outcome.cause.interruption is Interruption.SOFT_TIMEOUT:
            self._spot = iteration, whereabouts.look(), self._last_ran()  # before anything wakes the main thread
        if not outcome.completed:
            self._note_in_flight(iteration, outcome)
        self.mailbox.put("outcome", iteration, outcome)
        if outcome.completed:
            return False
        self._emit(iteration, outcome)
        self._get_out(iteration)
        return True

    def _note_in_flight(self, iteration: int, outcome: Outcome) -> None:
        """What the main thread handles, unless that is what it saw of another rank's failure."""
        with self._lock:
            gate = self._gate
        spot, cause = self.spot(iteration), outcome.cause
        is_others = spot is None and cause is not None and cause.initial_rank != self._own.slot
        if gate is not None and not (is_others and whereabouts.has_left_collective()):
            gate.note(in_flight.look(), stood_still=spot is not None and spot.waits)

    def _emit(self, iteration: int, outcome: Outcome) -> None:
        emit("interrupted", cause=None if outcome.cause is None else outcome.cause.to_dict())
        if is_wanted():
            spot = self.spot(iteration)
            told = {} if spot is None else dataclasses.asdict(spot)
            left = whereabouts.has_left_collective()
            emit("stacks", threads=whereabouts.stacks(), left_collective=left, **told)

    def _get_out(self, iteration: int) -> None:
        """The iteration is over: abort what the main thread waits for, and interrupt it until it has left."""
        with self._lock:
            # left once, a gate is left for good: the store may be lost afterwards, which leads here again
            self._over, gate, self._gate = True, self._gate, None
        if gate is not None:
            gate.close_for_abort(_report_atomic)
            with gate.parked():
                self._abort(iteration)
            emit("aborted")
            gate.interrupt_until_left(retry_after=self._retry_after, release=self._release)
        self.mailbox.put("aborted", iteration, True)

    def _release_assignment(self) -> None:
        """A rank assignment may wait for ranks that will never answer, on the iteration's own store."""
        pause = FIRST_PAUSE_S
        # a rank that leaves, by Ctrl-C for instance, may never have come to its assignment
        while not self._ending.is_set() and not self.assigned.wait(pause):
            self._release()
            pause = min(2 * pause, SLICE)

    def _fail(self, error: RestartError | RestartAbort) -> None:
        self.heard = self._own.iteration, clock.monotonic()
        if not self._ending.is_set():
            self._get_out(self._own.iteration)
        self.mailbox.fail(error)


def _described(owner: Owner) -> str:
    name = f"the job {owner.name!r}" if owner.name else "a job without a name"
    return f"{name} of {owner.world_size} processes, in its call {owner.call}, served by {owner.by or 'nobody'}"


def _explained(error: Exception) -> RestartError:
    if shortage := descriptors.shortage(error):
        return RestartError(f"the monitor thread failed: {shortage}")
    log.exception("the monitor thread failed")
    return InternalError(f"the monitor thread failed: {error!r}")


def _report_waiting(membership: Membership) -> None:
    log.info(
        "iteration %d of the job runs without this process, on ranks %s", membership.iteration, ranges(membership.taken)
    )


def _report_atomic(waited: float, holder: str) -> None:
    log.warning("the restart waits for atomic(), for %.0f s so far; it is held by %s", waited, holder)
