"""The MonitorThread: follows the job's chain of decisions and gets the main thread out of an interrupted iteration.

It is the only thread of the training process that waits on the store. What it learns goes into a mailbox, on which the
main thread waits locally, so that the main thread stays interruptible. It never decides anything.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

from inprocess import clock, coordinator
from inprocess.exception import BadMessage, InternalError, RankShouldRestart, RestartError, StoreLost
from inprocess.interpreter import interpreter
from inprocess.interrupt import Gate
from inprocess.protocol.book import Book
from inprocess.protocol.messages import Decision, Outcome, Start
from inprocess.store import StoreSpec, connect, connections, drive, shut

__all__ = ["Mailbox", "MonitorThread", "RankShouldRestart"]

log = logging.getLogger(__name__)

#: the main thread wakes this often while it waits, so that pending calls (progress stamps) run (seconds)
SLICE = 0.5
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
        self._failure: RestartError | None = None

    def put(self, name: str, iteration: int, value: Any) -> None:
        with self._changed:
            # what an earlier iteration learned is of no use any more
            self._letters = {key: letter for key, letter in self._letters.items() if key[1] >= iteration - 1}
            self._letters[name, iteration] = value
            self._changed.notify_all()

    def fail(self, error: RestartError) -> None:
        """Nothing more will come; whoever takes gets ``error``."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

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


class MonitorThread(threading.Thread):
    """One per call of a wrapped function. Joins the job for it, too.

    Letters it puts into the mailbox: ``next`` (a Decision: the iteration begins), ``rendezvous`` (str), ``start``
    (Start), ``outcome`` (Outcome), ``aborted`` (True: the abort ladder of an interrupted iteration has ended).
    """

    def __init__(
        self,
        spec: StoreSpec,
        book: Book,
        me: str,
        new_gate: Callable[[], Gate],
        abort: Callable[[int], None],
        release: Callable[[], None],
        retry_after: float,
        timeout: float,
    ) -> None:
        super().__init__(name="inprocess-monitor", daemon=True)
        self.mailbox = Mailbox()
        self._spec, self._me, self._timeout = spec, me, timeout
        self._new_gate, self._abort, self._release, self._retry_after = new_gate, abort, release, retry_after
        self._own = copy.copy(book)
        self._lock = threading.Lock()
        # under the lock: the gate of the running iteration; whether that iteration is over; sockets to the store
        self._gate: Gate | None = None
        self._over = False
        self._sockets: list[int] = []
        self._ending = threading.Event()
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

    def leave_after_outcome(self) -> None:
        """The rank leaves the job: do not follow it into another iteration."""
        self._ending.set()

    def stop(self, cut: bool) -> None:
        """End the thread. It usually has ended by itself; otherwise its connection is cut, at once with ``cut``."""
        self._ending.set()
        self.assigned.set()  # never will be, where the call ended before that
        if self.ident is None:
            return
        self.join(0 if cut else PATIENCE)
        if self.is_alive():
            self._cut()
            self.join(PATIENCE)

    def _cut(self) -> None:
        with self._lock:
            for descriptor in self._sockets:
                shut(descriptor)

    # --- this thread --------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._follow(*self._join())
        except RestartError as error:
            self._fail(error)
        except Exception as error:
            log.exception("the monitor thread failed")
            self._fail(InternalError(f"the monitor thread failed: {error!r}"))
        finally:
            with self._lock:
                self._sockets = []

    def _connect(self) -> Any:
        before = {descriptor for descriptor, _ in connections()}
        store = connect(self._spec, self._timeout, self._ending)
        with self._lock:
            mine = [descriptor for descriptor, peer in connections() if peer[1] == self._spec.port]
            self._sockets = [descriptor for descriptor in mine if descriptor not in before]
        return store

    def _join(self) -> tuple[Any, Decision]:
        """Arrive and wait for everybody. A server that goes away meanwhile was that of the call before: begin again."""
        deadline = clock.monotonic() + self._timeout
        while True:
            store = self._connect()
            try:
                drive(coordinator.join(self._own, self._me), store)
                return store, drive(coordinator.await_next(coordinator.JOINING, book=self._own), store)
            except BadMessage:
                raise
            except StoreLost:
                if self._ending.wait(RECONNECT) or clock.monotonic() > deadline:
                    raise

    def _follow(self, store: Any, decision: Decision) -> None:
        iteration = coordinator.JOINING + 1
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
        self.mailbox.put("start", iteration, start)
        if start.go:
            drive(coordinator.forget(iteration, self._own), store)
        else:
            self._release_assignment()
        outcome: Outcome = drive(coordinator.await_outcome(iteration), store)
        if not outcome.completed:
            interpreter.hurry()
        self.mailbox.put("outcome", iteration, outcome)
        if outcome.completed:
            return False
        self._get_out(iteration)
        return True

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

    def _fail(self, error: RestartError) -> None:
        if not self._ending.is_set():
            self._get_out(self._own.iteration)
        self.mailbox.fail(error)


def _report_atomic(waited: float, holder: str) -> None:
    log.warning("the restart waits for atomic(), for %.0f s so far; it is held by %s", waited, holder)
