"""The MonitorThread: follows the job's chain of decisions and gets the main thread out of an interrupted iteration.

It is the only thread of the training process that waits on the store. What it learns goes into a mailbox, on which the
main thread waits locally, so that the main thread stays interruptible. It never decides anything.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from inprocess import clock, coordinator, descriptors, joiner, whereabouts
from inprocess.attribution import Interruption, ranges
from inprocess.coordinator import JOINING
from inprocess.exception import BadMessage, InternalError, RankShouldRestart, RestartAbort, RestartError, StoreLost
from inprocess.interpreter import SLICE, interpreter
from inprocess.interrupt import Gate
from inprocess.logs import get_logger
from inprocess.protocol.book import Book
from inprocess.protocol.messages import Decision, Entry, Outcome, Spot, Start, Ticket
from inprocess.store import StoreSpec, connect, connections, cut, drive, shut

__all__ = ["LetIn", "Mailbox", "MonitorThread", "RankShouldRestart", "WayIn"]

log = get_logger(__name__)

#: how long a thread that should end by itself is waited for before its connection is cut (seconds)
PATIENCE = 2.0
#: first pause before a rank assignment is released again; doubled each time (seconds)
FIRST_PAUSE = 0.002
#: pause before a lost connection is made again, while joining (seconds)
RECONNECT = 0.05


class Mailbox:
    """What the MonitorThread has learned, for the main thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # under the condition
        self._letters: dict[tuple[str, int], Any] = {}
        self._failure: RestartError | RestartAbort | None = None

    def put(self, name: str, iteration: int, value: Any) -> None:
        with self._changed:
            # what an earlier iteration learned is of no use any more
            recent = {key: letter for key, letter in self._letters.items() if key[1] >= iteration - 1}
            self._letters = {key: letter for key, letter in self._letters.items() if key[1] == JOINING} | recent
            self._letters[name, iteration] = value
            self._changed.notify_all()

    def fail(self, error: RestartError | RestartAbort) -> None:
        """Nothing more will come; whoever takes gets ``error``."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def await_failure(self, timeout: float) -> bool:
        """Wait until nothing more will come; False after ``timeout`` seconds."""
        deadline = clock.monotonic() + timeout
        with self._changed:
            while self._failure is None and (left := deadline - clock.monotonic()) > 0:
                self._changed.wait(min(left, SLICE))
            return self._failure is not None

    def take(self, name: str, iteration: int, timeout: float | None = None) -> Any:
        """Wait for a letter; None after ``timeout`` seconds. Raises what the MonitorThread failed with."""
        deadline = None if timeout is None else clock.monotonic() + timeout
        with self._changed:
            while (name, iteration) not in self._letters:
                if self._failure is not None:
                    raise self._failure
                left = SLICE if deadline is None else deadline - clock.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(min(left, SLICE))
            return self._letters[name, iteration]


@dataclass(frozen=True)
class WayIn:
    """How a process comes to the job."""

    entry: Entry
    #: with which it joins, where the job runs already
    ticket: Ticket
    #: whether it interrupts a running iteration for that
    interrupts: bool
    #: waits until all is ready for the others to begin
    get_ready: Callable[[], None]
    #: told the id on its ticket
    identify: Callable[[int], None]
    #: whose monitors have arbiters, with that roster
    arbiters: Callable[[Sequence[int]], Sequence[int]]
    #: told where they are, in each iteration (empty: not known yet), and whether to wait until they were tried
    meet: Callable[[dict[int, str], bool], None]


@dataclass(frozen=True)
class LetIn:
    """The verdict that lets a process in (None: the job completed before), and its book as it stands before that."""

    book: Book
    decision: Decision | None


class MonitorThread(threading.Thread):
    """One per call of a wrapped function. Joins the job for it, too.

    Letters it puts into the mailbox: ``entered`` (a Book: this process is a founder, or waits to join), ``let in``
    (LetIn), ``next`` (a Decision: the iteration begins), ``rendezvous`` (str), ``start`` (Start), ``outcome``
    (Outcome), ``aborted`` (True: the abort ladder of an interrupted iteration has ended).
    """

    def __init__(
        self,
        spec: StoreSpec,
        book: Book,
        way_in: WayIn,
        new_gate: Callable[[], Gate],
        abort: Callable[[int], None],
        release: Callable[[], None],
        retry_after: float,
        timeout: float,
    ) -> None:
        super().__init__(name="inprocess-monitor", daemon=True)
        self.mailbox = Mailbox()
        self._spec, self._way_in, self._timeout = spec, way_in, timeout
        self._new_gate, self._abort, self._release, self._retry_after = new_gate, abort, release, retry_after
        self._own = copy.copy(book)
        self._lock = threading.Lock()
        # under the lock: the gate of the running iteration; whether that iteration is over; the store and sockets to it
        self._gate: Gate | None = None
        self._over = False
        self._store: Any = None
        self._sockets: list[int] = []
        self._ending = threading.Event()
        #: it knows where the arbiters are
        self._has_met = False
        #: the iteration that ended with a soft timeout, and where the main thread was then
        self._spot: tuple[int, Spot | None] = (JOINING, None)
        #: set by the main thread when it has its ranks, or has given up on them
        self.assigned = threading.Event()

    # --- main thread --------------------------------------------------------------------------------------------

    def enter(self) -> Gate | None:
        """A gate for the main thread to run user code behind, or None where the iteration is over already."""
        with self._lock:
            if self._over:
                return None
            self._gate = self._new_gate()
            return self._gate

    def spot(self, iteration: int) -> Spot | None:
        """Where the main thread was when it was known that this iteration ends with a soft timeout."""
        return self._spot[1] if self._spot[0] == iteration else None

    def leave_after_outcome(self) -> None:
        """The rank leaves the job: do not follow it into another iteration."""
        self._ending.set()

    def lose(self, timeout: float) -> bool:
        """The store is lost for this rank: wait until this thread has seen it too, and has aborted."""
        self.cut()
        return self.mailbox.await_failure(timeout)

    def stop(self, cut: bool) -> None:
        """End the thread. It usually has ended by itself; otherwise its connection is cut, at once with ``cut``."""
        self._ending.set()
        self.assigned.set()  # never will be, where the call ended before that
        if self.ident is None:
            return
        self.join(0 if cut else PATIENCE)
        if self.is_alive():
            self.cut()
            self.join(PATIENCE)

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
                self._own = copy.copy(let_in.book)
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

    def _join(self) -> tuple[Any, LetIn]:
        """Arrive and wait for everybody. A server that goes away meanwhile was that of the call before: begin again."""
        deadline = clock.monotonic() + self._timeout
        while True:
            store = self._connect()
            try:
                if drive(coordinator.join(self._own, self._way_in.ticket.by, self._way_in.entry), store):
                    return store, self._found(store)
                return store, self._join_late(store)
            except BadMessage:
                raise
            except StoreLost:
                late = not self._own.was_founder  # with a ticket, which went with the store
                if late or self._ending.wait(RECONNECT) or clock.monotonic() > deadline:
                    raise

    def _found(self, store: Any) -> LetIn:
        self.mailbox.put("entered", JOINING, self._own)
        decision = drive(coordinator.await_next(JOINING, book=self._own), store)
        drive(coordinator.refuse_stranger(self._own), store)
        return LetIn(self._own, decision)

    def _join_late(self, store: Any) -> LetIn:
        """The job runs already: wait for a place in it."""
        ticket = self._way_in.ticket
        self._way_in.get_ready()
        self._own = drive(joiner.register(ticket), store)
        self._way_in.identify(self._own.member)
        self.mailbox.put("entered", JOINING, copy.copy(self._own))
        decision = drive(joiner.await_place(self._own, ticket, self._way_in.interrupts, _report_waiting), store)
        if decision is not None:
            drive(coordinator.return_ticket(self._own.member), store)
        return LetIn(self._own, decision)

    def _follow(self, store: Any, decision: Decision) -> None:
        iteration = self._own.iteration + 1
        while True:
            self._own.apply(decision)
            self._begin(iteration, decision)
            if decision.abort or not self._own.included:
                return
            if not self._follow_iteration(iteration, store) or self._ending.is_set():
                return
            decision = drive(coordinator.await_next(iteration, book=self._own), store)
            iteration += 1

    def _begin(self, iteration: int, decision: Decision) -> None:
        with self._lock:
            self._gate, self._over = None, False
        self.assigned.clear()
        self.mailbox.put("next", iteration, decision)

    def _follow_iteration(self, iteration: int, store: Any) -> bool:
        """One iteration up to its outcome; False where no other follows."""
        self.mailbox.put("rendezvous", iteration, drive(coordinator.await_rendezvous(iteration), store))
        start: Start = drive(coordinator.await_start(iteration), store)
        if not start.go:
            with self._lock:
                self._over = True
        first = start.go and not self._has_met
        if first:  # before this rank enters: from then on the store may be lost
            self._meet(store, wait=True)
        self.mailbox.put("start", iteration, start)
        if start.go:
            drive(coordinator.forget(iteration, self._own), store)
            if not first:
                self._meet(store)
        else:
            self._release_assignment()
        outcome: Outcome = drive(coordinator.await_outcome(iteration), store)
        if not outcome.completed:
            interpreter.hurry()
        if outcome.cause is not None and outcome.cause.interruption is Interruption.SOFT_TIMEOUT:
            self._spot = iteration, whereabouts.look()  # before anything wakes the main thread
        self.mailbox.put("outcome", iteration, outcome)
        if outcome.completed:
            return False
        self._get_out(iteration)
        return True

    def _meet(self, store: Any, wait: bool = False) -> None:
        """By now the monitors that stand by have sent a heartbeat, and said before that where their arbiter is. Those
        that do so since this iteration may not have said it yet."""
        self._has_met = True
        chosen = self._way_in.arbiters(self._own.roster)
        self._way_in.meet({member: drive(coordinator.find_standby(member), store) for member in chosen}, wait)

    def _get_out(self, iteration: int) -> None:
        """The iteration is over: abort what the main thread waits for, and interrupt it until it has left."""
        with self._lock:
            # left once, a gate is left for good: the store may be lost afterwards, which leads here again
            self._over, gate, self._gate = True, self._gate, None
        if gate is not None:
            gate.close_for_abort(_report_atomic)
            with gate.parked():
                self._abort(iteration)
            gate.interrupt_until_left(retry_after=self._retry_after, release=self._release)
        self.mailbox.put("aborted", iteration, True)

    def _release_assignment(self) -> None:
        """A rank assignment may wait for ranks that will never answer, on the iteration's own store."""
        pause = FIRST_PAUSE
        # a rank that leaves, by Ctrl-C for instance, may never have come to its assignment
        while not self._ending.is_set() and not self.assigned.wait(pause):
            self._release()
            pause = min(2 * pause, SLICE)

    def _fail(self, error: RestartError | RestartAbort) -> None:
        if not self._ending.is_set():
            self._get_out(self._own.iteration)
        self.mailbox.fail(error)


def _explained(error: Exception) -> RestartError:
    if shortage := descriptors.shortage(error):
        return RestartError(f"the monitor thread failed: {shortage}")
    log.exception("the monitor thread failed")
    return InternalError(f"the monitor thread failed: {error!r}")


def _report_waiting(book: Book) -> None:
    log.info("iteration %d of the job runs without this process, on ranks %s", book.iteration, ranges(book.taken))


def _report_atomic(waited: float, holder: str) -> None:
    log.warning("the restart waits for atomic(), for %.0f s so far; it is held by %s", waited, holder)
