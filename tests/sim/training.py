"""A training process, written with the real verbs: what the call loop and its MonitorThread do, without torch.

A main thread walks ``TRANSITIONS``; beside it a follower reads the chain of decisions and gets it out of its function.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from inprocess.attribution import RETURNED, Interruption, InterruptionRecord
from inprocess.exception import Fenced, OptionError, RankDiscarded, RestartAbort, RestartError, StoreLost
from inprocess.monitor.policy import Snapshot
from inprocess.progress_watchdog import Silence
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import Arrival, ArrivalKind, FailoverOutcome, JoinMode, Spot, Ticket, Verdict, Vote
from inprocess.protocol.ops import Pause
from inprocess.protocol.phases import RUNNING, Event, Phase, next_phase
from inprocess.protocol.repeats import ErrorStreak, stood_at_once
from inprocess.protocol.rounds import assign_slots
from inprocess.protocol.timing import LEASE_SHARE
from inprocess.protocol.verbs import joining
from inprocess.rank_assignment import RankAssignmentCtx
from inprocess.state import FrozenState, State
from tests.sim.assignments import ASSIGNMENTS, ShutDown, assign
from tests.sim.desk import PATIENCE, ArbiterClient, View
from tests.sim.engine import Process, Until, Work
from tests.sim.live import Left, Live, RaisedInside
from tests.sim.scenario import BARRIER_TIMEOUT, HEARTBEAT_TIMEOUT, SOFT_TIMEOUT, Act

if TYPE_CHECKING:
    from tests.sim.world import World

#: progress_watchdog_interval (seconds)
WATCHDOG = 1.0
#: how long a desk may take to answer, and the verdict longer than it should (seconds)
ANSWER, MORE = 2.0, 3.0
#: an error that comes again and again
AGAIN = "Again: as before"

Step = Generator[Any, Any, Event]


class Training(Process):
    """The training process of one member."""

    def __init__(self, world: World, number: int, slot: int) -> None:
        super().__init__(world.engine, world.store, f"train{number}")
        self.host, self.silence = number, world.silence
        #: the store that it uses, and its connections to those that stand by, or did in an iteration before
        self.view, self.contacts = world.views[0], list[ArbiterClient]()
        #: which process it is, in the order in which they started
        self.world, self.number = world, number
        size = max(world.scenario.members, slot + 1)
        self.ticket = Ticket(slot, size, by=self.name)
        self.membership = self.founder_book()
        self.entry = JoinMode.FOUND if number < world.scenario.members else JoinMode.REPLACE
        if slot >= world.scenario.members:
            self.entry = JoinMode.GROW
        self._begin()
        live = world.scenario.live
        self.live = Live(self, world.live, live != "replicated") if live else None
        #: where its main thread was at a soft timeout
        self.spot: Spot | None = None
        #: since when no active rank is left
        self.too_few_since: float | None = None
        #: it raises in the middle of a commit
        self.breaks = False
        #: since when it has a ticket, or has arrived as a founder
        self.waits_since = 0.0
        #: why it is not let in
        self.refused = ""
        self.phase = Phase.JOIN
        #: the next phase, where it is another one than the table says
        self._detour: Phase | None = None
        #: why it leaves the job; empty while it stays
        self.quitting = ""
        #: its function's iteration while it is inside it
        self.inside: int | None = None
        self.atomic = False
        #: since when it makes no progress
        self.stuck_since: float | None = None
        #: and waits meanwhile for another member that hangs
        self.waits = False
        #: it has done nothing before it stood still, in the iteration that a soft timeout ended
        self.stood_at_once = False
        #: it has voted
        self.asked = False
        #: how the call ended; None while it runs, and for ever where it was killed
        self.result: str | None = None
        self.delay = dict(enumerate(world.scenario.delays)).get(number, 0.0)
        self.main = self.spawn(self._live())
        self.follower = self.spawn(self._follow())
        self.spawn(self._watch_monitor())

    def _begin(self) -> None:
        """What it knows at the beginning, with the first store and with any other."""
        slot, size = self.ticket.slot, self.ticket.world_size
        #: it knows who it is: a founder, or by its ticket
        self.entered = False
        #: it has said which node it is on, one of three; who else is, and of whom it knew when it asked
        self.node, self.registered = f"node{self.number % 3}", False
        self.neighbors, self.asked_with = dict[int, int](), frozenset[int]()
        #: what the follower found: ("next" | "rendezvous" | "start" | "outcome" | "aborted", iteration) -> value
        self.found: dict[tuple[str, int], Any] = {}
        #: last iteration in which it arrived in the start round
        self.started_in = -1
        self.assignment = ASSIGNMENTS[self.world.scenario.assignment](slot)
        #: the assignment of this iteration, and the last one that its start round accepted
        self.proposed = self.placed = FrozenState(
            rank=slot, world_size=size, initial_rank=slot, initial_world_size=size
        )
        #: it has its rank in this iteration, or has given up on it
        self.assigned = True
        #: from which iteration on ``atomic()`` may not be entered any more
        self.closed = math.inf
        #: the last iteration whose interruption it has answered, and in which its function returned
        self.answered = self.done_in = -2
        #: when the last heartbeat that got through was begun; a new monitor takes it over. None: there was none yet
        self.leased_from: float | None = None
        #: nobody needs to speak for it any more
        self.accounted = False
        #: its connection to who closes the store
        self.keeper: ArbiterClient | None = None
        #: the members that stand by in this iteration, the connections to those that it has reached, and whether
        #: these are all, in the order in which they are asked
        self.standing: tuple[int, ...] = ()
        self.order: list[ArbiterClient] = []
        self.met_all = True
        #: it has lost the store and wants to vote; it is voting
        self.wants_vote = self.votes = False
        #: in this iteration: how many times in a row its error is the same, and whether it committed
        self.repeats, self.progressed = 0, False

    def founder_book(self) -> Membership:
        """The membership at the beginning."""
        if self.view.number:
            return Membership.founder(self.ticket.slot, self.view.members, self.view.world_size)
        return Membership.founder(self.ticket.slot, range(self.ticket.world_size), self.ticket.world_size)

    @property
    def founds(self) -> bool:
        """It is a founder, if it comes in time."""
        return self.entry in (JoinMode.FOUND, JoinMode.EITHER)

    @property
    def moment(self) -> tuple[int, int]:
        """Its store and iteration; later ones are larger."""
        return self.view.number, self.membership.iteration

    @property
    def member(self) -> int:
        """Its id, as far as it knows."""
        return self.membership.member

    # --- the follower -----------------------------------------------------------------------------------------

    def _join_job(self) -> Generator[Any, Any, int | None]:
        """Answers the iteration before its first; None: it is not let in."""
        if (yield from verbs.join(self.membership, self.name, self.entry)):
            self._enter(self.membership)
            decision = yield from verbs.await_next(-1)
            yield from verbs.refuse_stranger(self.membership)
            self._find("next", -1, decision)
            return -1
        membership = yield from joining.register(self.ticket)
        self._enter(membership)
        helps = self.world.joining_helps
        decision = yield from joining.await_slot(membership, self.ticket, helps, lambda membership: None)
        if decision is None:
            return self._refuse("late")
        yield from verbs.return_ticket(membership.member)
        self.membership = copy.copy(membership)
        self._find("next", membership.iteration, decision)
        return membership.iteration

    def _enter(self, membership: Membership) -> None:
        self.membership, self.entered = copy.copy(membership), True
        self.waits_since = self.engine.now
        self.notify()
        if not membership.was_founder:
            self.world.monitors[self.number].identify(membership.member)

    def _follow(self) -> Generator[Any, Any, None]:
        try:
            iteration = yield from self._join_job()
            while iteration is not None and self._goes_on(self.found["next", iteration]):
                iteration += 1
                self._find("rendezvous", iteration, (yield from verbs.await_rendezvous(iteration)))
                start = self._find("start", iteration, (yield from verbs.await_start(iteration)))
                if not start.go:
                    yield from self._release_assignment()
                outcome = self._find("outcome", iteration, (yield from verbs.await_outcome(iteration)))
                if outcome.completed:
                    return
                if start.go:
                    yield from self._abort(iteration)
                self._find("next", iteration, (yield from verbs.await_next(iteration)))
        except StoreLost:
            self._find("lost", 0, True)
            self.world.lost_touch(self)
            yield from self._abort(self.membership.iteration)
        except RestartAbort:
            self._refuse("aborted")
        except OptionError:
            self._refuse("taken")
        except Fenced:
            self._refuse("fenced")
        except RestartError:
            self._refuse("nobody left")

    def _refuse(self, why: str) -> None:
        self.refused = why
        self.notify()

    def _goes_on(self, decision: Any) -> bool:
        return not decision.abort and self.member not in decision.removed

    def _find(self, what: str, iteration: int, value: Any) -> Any:
        self.assigned = self.assigned and what != "next"
        self.engine.note(self.name, f"found {what}/{iteration}: {value}")
        if what == "outcome" and iteration == self.membership.iteration:
            self.world.ended(self)
        if what == "outcome" and value.cause and value.cause.interruption is Interruption.SOFT_TIMEOUT:
            self.spot = self._look()
            # who does not stand still has called ping()
            self.stood_at_once = stood_at_once(int(self.stuck_since is None), 0.0, SOFT_TIMEOUT)
        if what == "next":
            self.world.named(self, value)
            self.spot = None
        if what == "start" and value.go:
            self.standing = self.world.standbys(self.view, self.membership.roster)
            self.world.make_contacts(self)
        self.found[what, iteration] = value
        self.world.agree(self.view, what, iteration, value)
        self.notify()
        return value

    def _look(self) -> Spot:
        """Where its main thread is."""
        if self.stuck_since is not None:
            return Spot(f"waits in {self.membership.iteration}", waits=True) if self.waits else Spot("hangs")
        if self.done_in == self.membership.iteration:
            return Spot(RETURNED, waits=True)  # for the outcome
        return Spot("" if self.inside is None else "works", waits=True)

    def _release_assignment(self) -> Generator[Any, Any, None]:
        """It may wait for ranks that will never answer."""
        while not self.assigned:
            self.interrupt(self.main)
            yield Pause(0.5)

    def _abort(self, iteration: int) -> Generator[Any, Any, None]:
        """No ``atomic()`` any more, the abort ladder, then the interrupt until the main thread is out."""
        self.closed = iteration
        yield Until(lambda: not self.atomic)
        slow = self.world.take(self.number, iteration, "abort is slow")
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
                if self.phase in RUNNING:
                    self.end("ends itself: its lease is over")
                continue
            monitor = self.world.monitors[self.number]
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
                self.inside = None
                event = self._cut_off(error)
            self.engine.note(self.name, f"{self.phase.value}: {event.value}")
            self.phase, self._detour = self._detour or next_phase(self.phase, event), None
        self.result = self.result or self.quitting
        self.end(f"exits: {self.result}")

    def _cut_off(self, error: Exception) -> Event:
        """Whoever has somebody to ask what becomes of the job leaves its function, and votes."""
        self._detour = _AFTER_LOSS.get(self.phase)
        if isinstance(error, Fenced) or not self.order or self.quitting or self._detour is None:
            self._detour = None
            self.quitting = self.quitting or f"cut off: {type(error).__name__}"
            return Event.CUT_OFF
        self.wants_vote = True
        if ("lost", 0) not in self.found:  # the follower, on another connection, has not noticed yet
            self.world.lost_touch(self)
            self.follower.done = True
            self.found["lost", 0] = True
            self.follower = self.spawn(self._abort(self.membership.iteration))
        return Event.INTERRUPTED

    def _wait(self, what: str) -> Generator[Any, Any, Any]:
        """Wait for the follower to find ``what`` of this iteration. Raises StoreLost."""
        key = (what, self.membership.iteration)
        yield Until(lambda: key in self.found or ("lost", 0) in self.found)
        if key not in self.found:
            raise StoreLost("the follower lost the store")
        return self.found[key]

    def _knows(self, what: str) -> Any:
        if ("lost", 0) in self.found:
            raise StoreLost("the follower lost the store")
        return self.found.get((what, self.membership.iteration))

    def _takes(self, what: str) -> bool:
        return self.world.take(self.number, self.membership.iteration, what)

    def _record(self, what: str, leaves: bool = False) -> InterruptionRecord:
        """Of errors each is a new one, with as many pings as no other has, but for those that come again."""
        kind = Interruption.BASE_EXCEPTION if leaves else Interruption.EXCEPTION
        pings = 0 if what == AGAIN else 1 + self.membership.iteration
        record = InterruptionRecord(self.placed.rank, kind, self.ticket.slot, what, pings=pings)
        if not leaves and self.world.scenario.max_repeats is not None:
            self.repeats = self.membership.streak.count_with(record)
        return record

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
            iteration=self.membership.iteration,
            phase=self.phase,
            reserve=self.is_reserve,
            atomic=self.atomic,
            answered=self.answered,
            left=self.phase is Phase.OUT,
        )

    def _join(self) -> Step:
        overdue = self.engine.now + BARRIER_TIMEOUT
        self.engine.at(BARRIER_TIMEOUT, self.notify)
        yield Until(lambda: self._has_joined() or self.engine.now >= overdue)
        if self.entered and not self.membership.was_founder:
            yield Until(self._has_joined)
        if self.refused:
            self.result, self.accounted = self.refused, True
            return Event.COMPLETED
        if not self._has_joined():
            self.quitting = "a founder is missing"
            return Event.QUIT
        return (yield from self._next())

    def _has_joined(self) -> bool:
        return bool(self.refused) or bool(self.found)

    def _next(self) -> Step:
        decision = yield from self._wait("next")
        self.membership.apply(decision)
        self.repeats, self.progressed = 0, False
        self.world.same_book(self)
        if not self.registered:
            self.registered = True
            yield from verbs.register_on_host(self.node, self.member)
        if not decision.abort:
            self.world.let_in(self)
        if decision.abort:
            self.accounted = True
            self.quitting = "aborted"
            return Event.QUIT
        if not self.membership.included:
            raise Fenced("not in the roster")
        yield from verbs.forget(self.membership.iteration, self.membership)
        return Event.OK

    def _assign(self) -> Step:
        self.assigned = False
        address = yield from self._wait("rendezvous")
        if address == "-":
            self.assigned = True
            return Event.NO_START
        start = ("start", self.membership.iteration)
        yield Until(lambda: self._is_leased() or start in self.found or ("lost", 0) in self.found)
        yield self._hook_time()
        try:
            yield from self._take_rank()
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

    def _is_leased(self) -> bool:
        return self.leased_from is not None or len(self.membership.known) == 1

    def _take_rank(self) -> Generator[Any, Any, None]:
        membership, placed = self.membership, self.placed
        state = State(
            rank=membership.rank,
            world_size=membership.world_size,
            active_rank=placed.active_rank,
            active_world_size=placed.active_world_size,
            initial_rank=self.ticket.slot,
            initial_world_size=self.world.scenario.members,
            iteration=membership.iteration,
        )
        ctx = RankAssignmentCtx(state, None, set(membership.terminated), set(membership.fresh))
        self.assignment, ctx = yield from assign(self.assignment, ctx, f"iteration store {membership.iteration}/")
        self.proposed = ctx.state.freeze()

    def _start(self) -> Step:
        if (yield from self._pause(self.membership.last.pause / 1e3)):
            return Event.NO_START
        state = self.proposed
        self.started_in = self.membership.iteration
        arrival = Arrival(
            ArrivalKind.RANK, state.rank, state.world_size, state.active_world_size, state.active_rank, by=self.name
        )
        yield from verbs.start_round(self.membership, arrival)
        start = yield from self._wait("start")
        if not start.go:
            return Event.NO_START
        verbs.refuse_other_size(self.membership.iteration, start, arrival)
        self.too_few_since = self.too_few_since if not state.active_world_size else None
        self.membership.started(state.rank, state.world_size)
        self.placed = state
        if not self.is_reserve:
            yield from self._place_on_host()
        return Event.OK

    def _place_on_host(self) -> Generator[Any, Any, None]:
        iteration, known = self.membership.iteration, self.membership.known
        if known != self.asked_with:
            self.neighbors = yield from verbs.find_neighbors(iteration, self.node, self.neighbors)
            self.asked_with = known
        own, active = self.placed.active_rank, self.placed.active_world_size
        assert own is not None
        place, size = yield from verbs.place_on_host(iteration, self.membership, self.neighbors.values(), own, active)
        self.world.agree(self.view, f"active ranks on {self.node}", iteration, size)
        self.world.agree(self.view, f"rank {place} on {self.node}", iteration, self.placed.active_rank)

    def _pause(self, seconds: float) -> Generator[Any, Any, bool]:
        """After the same error again and again. True: something else happened, and this iteration does not start."""
        if not seconds:
            return False
        start, until = ("start", self.membership.iteration), self.engine.now + seconds
        self.engine.at(seconds, self.notify)
        yield Until(lambda: start in self.found or ("lost", 0) in self.found or self.engine.now >= until)
        self.world.paused(self, self.engine.now - until + seconds)
        return self._knows("start") is not None

    def _initialize(self) -> Step:
        if self._takes("limit"):
            return (yield from self._interrupt("limit", abort="limit reached"))
        if not self.placed.active_world_size:
            return (yield from self._await_replacements())
        return (yield from self._hook("initialize raises", "initialize exits"))

    def _await_replacements(self) -> Step:
        """RetryController's: no active rank is left."""
        if self.too_few_since is None:
            self.too_few_since = self.engine.now
        overdue = self.too_few_since + self.world.scenario.patience
        if overdue > self.engine.now:
            waiting = yield from verbs.want(self.membership.iteration, self.membership.roster)
            if assign_slots(self.membership.taken, waiting):
                yield from verbs.interrupt(self.membership.iteration, self._record("it was waited for"))
            self.engine.at(overdue - self.engine.now, self.notify)
            over = {("outcome", self.membership.iteration), ("lost", 0)}
            yield Until(lambda: not over.isdisjoint(self.found) or self.engine.now >= overdue)
        if self._knows("outcome"):
            return Event.INTERRUPTED
        self.quitting = "too few"
        yield from verbs.interrupt(self.membership.iteration, self._record("too few"), "too few")
        return Event.QUIT

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
        record = self._record(what, leaves=bool(abort or self.quitting))
        stands = yield from verbs.interrupt(self.membership.iteration, record, abort)
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
            self.done_in = self.membership.iteration
            self.world.returned(self)
        return event

    def _function(self) -> Step:
        if self.engine.now >= self.lease_ends:
            self.end("ends itself: its lease is over")
            yield Work(math.inf)
        self.world.enter(self)
        self.inside = self.membership.iteration
        again = self.world.comes_again(self)
        raises = again or self._takes("raise at entry")
        interrupted = False
        if not raises:
            interrupted = yield from self._work()
            raises = not interrupted and (self.breaks or self._takes("raise"))
        leaves = not raises and not interrupted and self._takes("exit")
        self.inside = None
        self.engine.note(self.name, "leaves the function")
        if leaves:
            self.quitting = "exit"
        if raises or leaves:
            record = self._record(AGAIN if again else "raised", leaves)
            yield from verbs.interrupt(self.membership.iteration, record)
        if leaves:
            return Event.QUIT
        return Event.INTERRUPTED if raises or interrupted else Event.OK

    def _work(self) -> Generator[Any, Any, bool]:
        """The function's body; answers True where it was interrupted."""
        hangs, dead = self._takes("hang") or self.world.hangs_again(self), self._takes("hang for ever")
        self.waits = not hangs and not dead and self.world.waits_for_hung(self)
        if hangs or dead:
            self.world.hung(self)
        hangs = hangs or self.waits
        self.stuck_since = self.engine.now if hangs or dead else None
        while dead:
            yield Work(math.inf)
        swallows = 2 if self._takes("swallow") else 0
        if self.live is not None:
            return (yield from self._train(self.live, hangs))
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

    def _train(self, live: Live, hangs: bool) -> Generator[Any, Any, bool]:
        """The same with steps that all active ranks do together."""
        self.breaks = False
        try:
            if hangs:
                yield from live.hang()
            yield from live.train(self.world.scenario.longest)
        except Left:
            self.stuck_since = None
            return True
        except RaisedInside:
            self.breaks = True
            self.world.fired.append(Act(self.number, "raise", self.membership.iteration))
        return False

    def _commit(
        self, begin: Callable[[], None] = lambda: None, done: Callable[[], None] = lambda: None
    ) -> Generator[Any, Any, bool]:
        """An ``atomic()`` section; answers True where it was interrupted before it began."""
        if self.closed <= self.membership.iteration or self.engine.now >= self.lease_ends:
            return bool((yield Work(math.inf, interruptible=True)))
        self.atomic = True
        self.world.committed(self)
        begin()
        yield Work(self.engine.rng.random() * 0.02)
        done()
        self.atomic = False
        self.progressed = True
        self.world.progressed(self)
        self.notify()
        return False

    def _finish(self) -> Step:
        if not self.is_reserve:
            size = self.placed.active_world_size
            yield from verbs.finish(self.membership.iteration, size, self.membership.roster)
        outcome = yield from self._wait("outcome")
        return Event.COMPLETED if outcome.completed else Event.INTERRUPTED

    def _complete(self) -> Step:
        if not self.wants_vote and not (yield from self._may_return()):
            self.quitting = "cut off: others may have gone on"
            return Event.QUIT
        yield self._hook_time()
        self.world.completed(self)
        self.result = "returned"
        self.accounted = True
        return Event.OK

    def _may_return(self) -> Generator[Any, Any, bool]:
        """Tell all that stand by that the job is completed."""
        silent = not self.met_all
        for contact in self.contacts:
            if contact not in self.order:
                contact.send(contact.say_completed)
        for contact in self.order:
            answer = None if contact.ended else (yield from contact.ask(ArbiterClient.say_completed, ANSWER))
            if answer is not None and answer[0].outcome is FailoverOutcome.GO:
                return False
            silent = silent or (answer is None and not contact.ended)
        return not silent or (yield from self._outlasts())

    def _outlasts(self) -> Generator[Any, Any, bool]:
        """Whether the store is still there when one that hears too little has closed itself."""
        try:
            yield Pause(1.25 * HEARTBEAT_TIMEOUT)
            return bool((yield from verbs.has_begun()))
        except StoreLost:
            return False

    def _wait_abort(self) -> Step:
        if self.wants_vote:
            yield Until(lambda: ("aborted", self.membership.iteration) in self.found)
            self.answered, self.closed = self.membership.iteration, math.inf
            return Event.OK
        outcome = self._knows("outcome") if self.quitting else (yield from self._wait("outcome"))
        if outcome and not outcome.completed:
            yield from self._wait("aborted")
        self.answered, self.closed = self.membership.iteration, math.inf
        if ("lost", 0) in self.found and self.order:
            raise StoreLost("the follower lost the store")
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
        self.answered = self.membership.iteration
        if self.wants_vote:
            return Event.QUIT if self.quitting else (yield from self._vote())
        if not self.quitting:
            membership = self.membership
            arrival = verbs.alive(
                membership,
                by=self.name,
                repeats=self.repeats,
                limit=self.world.scenario.max_repeats,
                progressed=self.progressed,
                spot=self.spot,
                hangs=self._hangs(),
            )
            yield from verbs.end_round(membership, arrival)
            return (yield from self._next())
        if self.started_in < self.membership.iteration:
            kind = ArrivalKind.DISCARDED if self.quitting == "discarded" else ArrivalKind.LEFT
            yield from verbs.start_round(self.membership, Arrival(kind, by=self.name))
        yield from verbs.end_round(self.membership, Arrival(ArrivalKind.LEFT, by=self.name))
        self.accounted = True
        return Event.QUIT

    def _hangs(self) -> int:
        counts = self.world.scenario.max_repeats is not None and not self.repeats and not self.progressed
        if self.spot is None or not counts or not self.stood_at_once:
            return 0
        return self.membership.streak.hangs_with(self.spot.where)

    # --- the store is lost --------------------------------------------------------------------------------------

    def _vote(self) -> Step:
        """Ask those that stand by, one after the other, until one has decided."""
        self.votes = self.asked = True
        self.world.monitors[self.number].stop_beating()
        vote = Vote.of(self.membership.slot, self.membership.note(self.membership.iteration))
        for contact in self.order:
            if contact.ended or (yield from contact.ask(ArbiterClient.ping, ANSWER)) is None:
                continue
            self.engine.note(self.name, f"votes at {contact.post.process.name}")
            for other in (*self.contacts, self.keeper):
                if other is not None and other is not contact:
                    other.send(other.turn_away)
            answer = yield from contact.ask(lambda asked: asked.vote(vote), PATIENCE + MORE)
            if answer is not None:
                return self._obey(*answer)
            if not contact.ended:
                break
        self.quitting = "cut off: no verdict"
        return self._lost()

    def _lost(self) -> Event:
        self.votes = False
        return Event.CUT_OFF

    def _obey(self, verdict: Verdict, view: View | None) -> Event:
        self.engine.note(self.name, f"is told: {verdict}")
        if (
            verdict.outcome is FailoverOutcome.COMPLETED
            and verdict.iteration == self.membership.iteration
            and self._has_returned()
        ):
            self._detour = Phase.COMPLETE
            return Event.COMPLETED
        if verdict.outcome is FailoverOutcome.GO and view is not None and self.ticket.slot in view.members:
            self._begin_anew(view)
            self._detour = Phase.JOIN
            return Event.OK
        self.quitting = "cut off: " + ("Fenced" if verdict.outcome is FailoverOutcome.GO else verdict.outcome.value)
        return self._lost()

    def _has_returned(self) -> bool:
        """Or has nothing to do in this iteration but to wait for the others."""
        idle = self.started_in == self.membership.iteration and self.is_reserve
        return idle or self.done_in == self.membership.iteration

    def _begin_anew(self, view: View) -> None:
        self.world.monitors[self.number].retire()
        self.follower.done = True
        self.world.keep(self.contacts)
        self.view, self.store, self.contacts = view, view.store, []
        self.entry = JoinMode.EITHER
        streak = ErrorStreak(progressed=True) if self.progressed else self.membership.streak
        self._begin()
        self.membership = self.founder_book()
        self.membership.streak = streak
        self.follower = self.spawn(self._follow())
        self.world.new_monitor(self)

    def _leave(self) -> Step:
        yield self._hook_time()
        return Event.OK


#: where it goes on that has lost the store; it votes where the end round would be
_AFTER_LOSS = {phase: Phase.END for phase in (Phase.ASSIGN, Phase.START, Phase.END)} | {
    phase: Phase.ABORT for phase in (Phase.INITIALIZE, Phase.CHECK, Phase.RUN, Phase.FINISH, Phase.ABORT)
}

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
