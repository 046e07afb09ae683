"""A training process, written with the real verbs: what the call loop and its MonitorThread do, without torch.

A main thread walks ``TRANSITIONS``; beside it a follower reads the chain of decisions and gets it out of its function.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from inprocess import coordinator
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import Fenced, RankDiscarded, StoreLost
from inprocess.policy import LEASE_SHARE, RUNNING, Snapshot
from inprocess.progress_watchdog import Silence
from inprocess.protocol.book import Book
from inprocess.protocol.messages import Arrival, Kind
from inprocess.protocol.ops import Pause
from inprocess.protocol.phases import Event, Phase, next_phase
from inprocess.rank_assignment import RankAssignmentCtx
from inprocess.state import FrozenState, State
from tests.sim.assignments import ASSIGNMENTS, ShutDown, assign
from tests.sim.engine import Process, Until, Work
from tests.sim.scenario import BARRIER_TIMEOUT, HEARTBEAT_TIMEOUT

if TYPE_CHECKING:
    from tests.sim.world import World

#: progress_watchdog_interval (seconds)
WATCHDOG = 1.0

Step = Generator[Any, Any, Event]


class Training(Process):
    """The training process of one member."""

    def __init__(self, world: World, member: int) -> None:
        super().__init__(world.engine, world.store, f"train{member}")
        self.world, self.member = world, member
        self.book = Book.founder(member, range(world.scenario.members), world.scenario.members)
        #: what the follower found: ("next" | "rendezvous" | "start" | "outcome" | "aborted", iteration) -> value
        self.found: dict[tuple[str, int], Any] = {}
        self.phase = Phase.JOIN
        #: why it leaves the job; empty while it stays
        self.quitting = ""
        #: last iteration in which it arrived in the start round
        self.started_in = -1
        #: its function's iteration while it is inside it
        self.inside: int | None = None
        self.assignment = ASSIGNMENTS[world.scenario.assignment](member)
        #: the assignment of this iteration, and the last one that its start round accepted
        self.proposed = self.placed = FrozenState(
            rank=member, world_size=self.book.world_size, initial_rank=member, initial_world_size=self.book.world_size
        )
        #: it has its place in this iteration, or has given up on it
        self.assigned = True
        #: inside ``atomic()``; from which iteration on it may not be entered any more
        self.atomic, self.closed = False, math.inf
        #: since when it makes no progress
        self.stuck_since: float | None = None
        #: the last iteration whose interruption it has answered
        self.answered = -2
        #: how the call ended; None while it runs, and for ever where it was killed
        self.result: str | None = None
        #: when the last heartbeat that got through was begun; a new monitor takes it over. None: there was none yet
        self.leased_from: float | None = None
        #: nobody needs to speak for it any more
        self.accounted = False
        self.delay = world.scenario.delays[member] if world.scenario.delays else 0.0
        self.main = self.spawn(self._live())
        self.spawn(self._follow())
        self.spawn(self._watch_monitor())

    # --- the follower -----------------------------------------------------------------------------------------

    def _follow(self) -> Generator[Any, Any, None]:
        try:
            iteration = -1
            while self._goes_on(self._find("next", iteration, (yield from coordinator.await_next(iteration)))):
                iteration += 1
                self._find("rendezvous", iteration, (yield from coordinator.await_rendezvous(iteration)))
                start = self._find("start", iteration, (yield from coordinator.await_start(iteration)))
                if not start.go:
                    yield from self._release_assignment()
                outcome = self._find("outcome", iteration, (yield from coordinator.await_outcome(iteration)))
                if outcome.completed:
                    return
                if start.go:
                    yield from self._abort(iteration)
        except (StoreLost, Fenced):
            self._find("lost", 0, True)
            yield from self._abort(self.book.iteration)

    def _goes_on(self, decision: Any) -> bool:
        return not decision.abort and self.member not in decision.removed

    def _find(self, what: str, iteration: int, value: Any) -> Any:
        self.assigned = self.assigned and what != "next"
        self.engine.note(self.name, f"found {what}/{iteration}: {value}")
        self.found[what, iteration] = value
        self.world.agree(what, iteration, value)
        self.notify()
        return value

    def _release_assignment(self) -> Generator[Any, Any, None]:
        """It may wait for ranks that will never answer."""
        while not self.assigned:
            self.interrupt(self.main)
            yield Pause(0.5)

    def _abort(self, iteration: int) -> Generator[Any, Any, None]:
        """No ``atomic()`` any more, the abort ladder, then the interrupt until the main thread is out."""
        self.closed = iteration
        yield Until(lambda: not self.atomic)
        slow = self.world.take(self.member, iteration, "abort is slow")
        yield Work(self.engine.rng.random() * (1.0 if slow else 0.05))
        while self.inside is not None:
            self.interrupt(self.main)
            yield Pause(0.5)
        self.found["aborted", iteration] = True
        self.notify()

    def _watch_monitor(self) -> Generator[Any, Any, None]:
        """The watchdog: a monitor that shows no life is killed, and a rank whose lease is over ends itself."""
        silence = Silence()
        while self.phase is not Phase.OUT:
            yield Pause(min(WATCHDOG, max(0.05, self.lease_ends - self.engine.now)))
            if self.engine.now >= self.lease_ends:
                if self.phase in RUNNING and self.book.roster != (self.member,):
                    self.end("ends itself: its lease is over")
                continue
            monitor = self.world.monitors[self.member]
            if monitor.alive and silence.lasts(monitor.watched, HEARTBEAT_TIMEOUT / 3 / WATCHDOG):
                self.world.kill_monitor(self, "killed: shows no life")

    @property
    def lease_ends(self) -> float:
        """When it must not run any more; never while no heartbeat got through, so that nobody counts on one."""
        return math.inf if self.leased_from is None else self.leased_from + LEASE_SHARE * HEARTBEAT_TIMEOUT

    # --- the main thread --------------------------------------------------------------------------------------

    def _live(self) -> Generator[Any, Any, None]:
        while self.phase is not Phase.OUT:
            self.world.begins(self)
            try:
                event = yield from _STEPS[self.phase](self)
            except (Fenced, StoreLost) as error:
                self.quitting = self.quitting or f"cut off: {type(error).__name__}"
                self.inside = None
                event = Event.CUT_OFF
            self.engine.note(self.name, f"{self.phase.value}: {event.value}")
            self.phase = next_phase(self.phase, event)
        self.result = self.result or self.quitting
        self.end(f"exits: {self.result}")

    def _wait(self, what: str) -> Generator[Any, Any, Any]:
        """Wait for the follower to find ``what`` of this iteration. Raises StoreLost."""
        key = (what, self.book.iteration)
        yield Until(lambda: key in self.found or ("lost", 0) in self.found)
        if key not in self.found:
            raise StoreLost("the follower lost the store")
        return self.found[key]

    def _knows(self, what: str) -> Any:
        if ("lost", 0) in self.found:
            raise StoreLost("the follower lost the store")
        return self.found.get((what, self.book.iteration))

    def _takes(self, what: str) -> bool:
        return self.world.take(self.member, self.book.iteration, what)

    def _record(self, what: str) -> InterruptionRecord:
        return InterruptionRecord(self.placed.rank, Interruption.EXCEPTION, initial_rank=self.member, message=what)

    def _hook_time(self) -> Work:
        """How long a hook of the user takes: now and then much longer than on the other members."""
        rng = self.engine.rng
        return Work(self.pace * rng.random() * (0.4 if rng.random() < 0.15 else 0.01))

    @property
    def is_reserve(self) -> bool:
        return self.placed.active_rank is None

    def snapshot(self, now: int) -> Snapshot:
        """What its board shows; times in ns."""
        stuck = self.stuck_since if self.frozen_since is None else self.frozen_since
        return Snapshot(
            progress=now if stuck is None else int(stuck * 1e9),
            iteration=self.book.iteration,
            phase=self.phase,
            reserve=self.is_reserve,
            atomic=self.atomic,
            answered=self.answered,
            left=self.phase is Phase.OUT,
        )

    def _join(self) -> Step:
        yield from coordinator.join(self.book, self.name)
        overdue = self.engine.now + BARRIER_TIMEOUT
        self.engine.at(BARRIER_TIMEOUT, self.notify)
        yield Until(lambda: ("next", -1) in self.found or ("lost", 0) in self.found or self.engine.now >= overdue)
        if not self._knows("next"):
            self.quitting = "a founder is missing"
            return Event.QUIT
        return (yield from self._next())

    def _next(self) -> Step:
        decision = yield from self._wait("next")
        self.book.apply(decision)
        self.world.same_book(self.book)
        if decision.abort:
            self.accounted = True
            self.quitting = "aborted"
            return Event.QUIT
        if not self.book.included:
            raise Fenced("not in the roster")
        yield from coordinator.forget(self.book.iteration, self.book)
        return Event.OK

    def _assign(self) -> Step:
        self.assigned = False
        address = yield from self._wait("rendezvous")
        if address == "-":
            self.assigned = True
            return Event.NO_START
        start = ("start", self.book.iteration)
        yield Until(lambda: self.leased_from is not None or start in self.found or ("lost", 0) in self.found)
        yield self._hook_time()
        try:
            yield from self._take_place()
        except ShutDown:
            return Event.NO_START
        except RankDiscarded:
            self.quitting = "discarded"
            return Event.QUIT
        finally:
            self.assigned = True
        if self._takes("assign raises"):
            self.quitting = "assign raises"
            return Event.QUIT
        return Event.OK

    def _take_place(self) -> Generator[Any, Any, None]:
        book, placed = self.book, self.placed
        state = State(
            rank=book.rank,
            world_size=book.world_size,
            active_rank=placed.active_rank,
            active_world_size=placed.active_world_size,
            initial_rank=self.member,
            initial_world_size=self.world.scenario.members,
            iteration=book.iteration,
        )
        ctx = RankAssignmentCtx(state, None, set(book.terminated))
        self.assignment, ctx = yield from assign(self.assignment, ctx, f"iteration store {book.iteration}/")
        self.proposed = ctx.state.freeze()

    def _start(self) -> Step:
        place = self.proposed
        self.started_in = self.book.iteration
        arrival = Arrival(
            Kind.RANK, place.rank, place.world_size, place.active_world_size, place.active_rank, by=self.name
        )
        yield from coordinator.start_round(self.book, arrival)
        start = yield from self._wait("start")
        if not start.go:
            return Event.NO_START
        self.book.started(place.rank, place.world_size)
        self.placed = place
        return Event.OK

    def _initialize(self) -> Step:
        if self._takes("limit"):
            return (yield from self._interrupt("limit", abort="limit reached"))
        return (yield from self._hook("initialize raises", "initialize exits"))

    def _check(self) -> Step:
        return (yield from self._hook("", "check raises"))

    def _hook(self, raises: str, exits: str) -> Step:
        yield self._hook_time()
        leaves = self._takes(exits)
        if leaves or self._takes(raises):
            self.quitting = exits if leaves else ""
            event = yield from self._interrupt(exits if leaves else raises)
            return Event.QUIT if leaves else event
        outcome = self._knows("outcome")
        return Event.INTERRUPTED if outcome and not outcome.completed else Event.OK

    def _interrupt(self, what: str, abort: str = "") -> Step:
        """OK where everybody else has finished already, which a reserve may find as late as here."""
        stands = yield from coordinator.interrupt(self.book.iteration, self._record(what), abort)
        return Event.INTERRUPTED if stands else Event.OK

    def _run(self) -> Step:
        if self.is_reserve:
            if self._takes("exit"):
                self.quitting = "exit"  # a reserve goes without interrupting the others
                return Event.QUIT
            outcome = yield from self._wait("outcome")
            return Event.OK if outcome.completed else Event.INTERRUPTED
        if self._knows("outcome"):
            return Event.INTERRUPTED
        event = yield from self._function()
        if event is Event.OK:
            self.world.returned(self)
        return event

    def _function(self) -> Step:
        self.world.enter(self)
        self.inside = self.book.iteration
        raises = self._takes("raise at entry")
        interrupted = False
        if not raises:
            interrupted = yield from self._work()
            raises = not interrupted and self._takes("raise")
        leaves = not raises and not interrupted and self._takes("exit")
        self.inside = None
        self.engine.note(self.name, "leaves the function")
        if leaves:
            self.quitting = "exit"
        if raises or leaves:
            yield from coordinator.interrupt(self.book.iteration, self._record("raised"))
        if leaves:
            return Event.QUIT
        return Event.INTERRUPTED if raises or interrupted else Event.OK

    def _work(self) -> Generator[Any, Any, bool]:
        """The function's body; answers True where it was interrupted."""
        hangs, dead = self._takes("hang"), self._takes("hang for ever")
        self.stuck_since = self.engine.now if hangs or dead else None
        while dead:
            yield Work(math.inf)
        swallows = 2 if self._takes("swallow") else 0
        pieces = 1 + self.world.scenario.commits
        for piece in range(pieces):
            seconds = math.inf if hangs else self.engine.rng.random() * self.world.scenario.longest / pieces
            while (yield Work(seconds, interruptible=True)) or (piece and (yield from self._commit())):
                self.stuck_since = None
                if not swallows:
                    return True
                swallows -= 1
                seconds = self.engine.rng.random() * 2.0
        # a function that swallowed the interrupt and then returned has missed its iteration
        return False

    def _commit(self) -> Generator[Any, Any, bool]:
        """An ``atomic()`` section; answers True where it was interrupted before it began."""
        if self.closed <= self.book.iteration or self.engine.now >= self.lease_ends:
            return bool((yield Work(math.inf, interruptible=True)))
        self.atomic = True
        self.world.committed(self)
        yield Work(self.engine.rng.random() * 0.02)
        self.atomic = False
        self.notify()
        return False

    def _finish(self) -> Step:
        if not self.is_reserve:
            size = self.placed.active_world_size
            yield from coordinator.finish(self.book.iteration, size, self.book.roster)
        outcome = yield from self._wait("outcome")
        return Event.COMPLETED if outcome.completed else Event.INTERRUPTED

    def _complete(self) -> Step:
        yield self._hook_time()
        self.world.completed(self)
        self.result = "returned"
        self.accounted = True
        return Event.OK

    def _wait_abort(self) -> Step:
        outcome = self._knows("outcome") if self.quitting else (yield from self._wait("outcome"))
        if outcome and not outcome.completed:
            yield from self._wait("aborted")
        self.answered, self.closed = self.book.iteration, math.inf
        return Event.CUT_OFF if ("lost", 0) in self.found else Event.OK

    def _finalize(self) -> Step:
        if self._takes("finalize is slow"):
            yield Work(12.0)
        return (yield from self._leaving_hook("finalize raises"))

    def _recheck(self) -> Step:
        return (yield from self._leaving_hook("recheck raises"))

    def _leaving_hook(self, what: str) -> Step:
        yield self._hook_time()
        if not self.quitting and self._takes(what):
            self.quitting = what
            return Event.QUIT
        return Event.OK

    def _end(self) -> Step:
        self.answered = self.book.iteration
        if not self.quitting:
            yield from coordinator.end_round(
                self.book, Arrival(Kind.ALIVE, self.book.rank, self.book.world_size, by=self.name)
            )
            return (yield from self._next())
        if self.started_in < self.book.iteration:
            kind = Kind.DISCARDED if self.quitting == "discarded" else Kind.LEFT
            yield from coordinator.start_round(self.book, Arrival(kind, by=self.name))
        yield from coordinator.end_round(self.book, Arrival(Kind.LEFT, by=self.name))
        self.accounted = True
        return Event.QUIT

    def _leave(self) -> Step:
        yield self._hook_time()
        return Event.OK


_STEPS = {
    Phase.JOIN: Training._join,
    Phase.ASSIGN: Training._assign,
    Phase.START: Training._start,
    Phase.INITIALIZE: Training._initialize,
    Phase.CHECK: Training._check,
    Phase.RUN: Training._run,
    Phase.FINISH: Training._finish,
    Phase.COMPLETE: Training._complete,
    Phase.ABORT: Training._wait_abort,
    Phase.FINALIZE: Training._finalize,
    Phase.RECHECK: Training._recheck,
    Phase.END: Training._end,
    Phase.LEAVE: Training._leave,
}
