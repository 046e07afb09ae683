"""What a job with standbys has besides its store: the arbiters' desks, the contacts to them, and who watches a store.

What is decided is the real code, `inprocess.failover.rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import StoreLost
from inprocess.failover import rules
from inprocess.failover.rules import Arbiter
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import FailoverOutcome, Verdict, Vote
from inprocess.protocol.ops import Pause
from inprocess.protocol.timing import SILENCE_SHARE
from inprocess.protocol.verbs import watching
from tests.sim.engine import Process, SimStore, Until, Wire
from tests.sim.scenario import BARRIER_TIMEOUT, HEARTBEAT, HEARTBEAT_TIMEOUT

if TYPE_CHECKING:
    from tests.sim.monitor import Monitor
    from tests.sim.training import Training
    from tests.sim.world import World

#: how long whoever lost the store waits for the verdict, and how often a store looks whom it hears (seconds)
PATIENCE, LOOK = rules.patience(HEARTBEAT_TIMEOUT, HEARTBEAT), HEARTBEAT_TIMEOUT / 10


@dataclass
class View:
    """A store, and who began with it."""

    number: int
    store: SimStore
    #: its founders, by slot, and the size of their numbering
    members: tuple[int, ...]
    world_size: int
    #: the member on whose host it is served
    host: int = 0
    #: its iteration 0 is the job's iteration number ``offset``
    offset: int = 0
    #: the one whose loss led here
    before: View | None = None
    #: member -> its desk
    desks: dict[int, ArbiterServer] = field(default_factory=dict)
    keeper: Keeper | None = None

    def follows(self, other: View) -> bool:
        """Whether it is the other one, or came of it."""
        return self is other or (self.before is not None and self.before.follows(other))

    def label(self, what: str) -> str:
        return f"{what} (store {self.number})" if self.number else what


class ArbiterClient:
    """A connection of a training process to a desk or to a keeper."""

    def __init__(self, training: Training, post: ArbiterServer | Keeper) -> None:
        self.training, self.post, self.member = training, post, training.member
        self._there, self._back = Wire(training, post.process), Wire(post.process, training)
        #: the training process has seen that the other end has ended
        self.ended = False
        self.answer: Any = None
        post.process.on_end.append(lambda: self._back.send(self._end))
        self.send(lambda: post.meet(self))

    def send(self, action: Callable[[], None]) -> None:
        self._there.send(action)

    def reply(self, answer: Any) -> None:
        self._back.send(lambda: self._take(answer))

    def close(self) -> None:
        """The training process has ended, which the kernel tells the other end."""
        self.send(lambda: self.post.leave(self))

    def _take(self, answer: Any) -> None:
        self.answer = answer
        self.training.notify()

    def _end(self) -> None:
        self.ended = True
        self.training.notify()

    def ping(self) -> None:
        self.reply("here")

    def say_completed(self) -> None:
        if isinstance(self.post, ArbiterServer):
            self.post.complete(self, self.training.membership.iteration)

    def turn_away(self) -> None:
        self.post.turn_away(self)

    def vote(self, vote: Vote) -> None:
        if isinstance(self.post, ArbiterServer):
            self.post.vote(self, vote)

    def ask(self, question: Callable[[ArbiterClient], None], seconds: float) -> Generator[Any, Any, Any]:
        """What it answers; None where it does not in time, or has ended."""
        self.answer = None
        engine = self.training.engine
        until = engine.now + seconds
        self.send(lambda: question(self))
        engine.at(seconds, self.training.notify)
        yield Until(lambda: self.answer is not None or self.ended or engine.now >= until)
        return self.answer


class ArbiterServer:
    """The arbiter in the monitor process of a standby."""

    def __init__(self, world: World, monitor: Monitor, view: View) -> None:
        self.world, self.process, self.view = world, monitor, view
        self.arbiter = Arbiter(PATIENCE, HEARTBEAT_TIMEOUT)
        self._waiting: list[ArbiterClient] = []
        self._open: list[ArbiterClient] = []
        #: the view that begins here, and who serves its store
        self.next: View | None = None
        self.server: Process | None = None

    @property
    def idle(self) -> bool:
        """Nobody needs the store that is served here."""
        return not any(contact.training.ticket.slot in self._invited() for contact in self._open)

    def _invited(self) -> tuple[int, ...]:
        return () if self.next is None else self.next.members

    def lost(self) -> None:
        self.arbiter.lost(self.process.engine.now)
        self._settle()

    def meet(self, contact: ArbiterClient) -> None:
        self._open.append(contact)
        self.arbiter.meet(contact.member)

    def leave(self, contact: ArbiterClient) -> None:
        if contact in self._open:
            self._open.remove(contact)
        self.arbiter.leave(contact.member, self.process.engine.now, self.process.beat_at)
        self._speak_for(contact)
        self._settle()
        self.process.notify()

    def turn_away(self, contact: ArbiterClient) -> None:
        self.arbiter.turn_away(contact.member)

    def vote(self, contact: ArbiterClient, vote: Vote) -> None:
        self.arbiter.vote(contact.member, vote, self.process.engine.now)
        self._waiting.append(contact)
        self._settle()

    def complete(self, contact: ArbiterClient, iteration: int) -> None:
        returns = self.arbiter.complete(contact.member, iteration)
        contact.reply((Verdict(FailoverOutcome.COMPLETED) if returns else self.arbiter.verdict, None))
        self._settle()

    def _settle(self) -> None:
        process = self.process
        if not process.alive:
            return
        if process.engine.now < process.frozen_until:
            process.engine.at(process.frozen_until - process.engine.now, self._settle)
            return
        verdict = self.arbiter.decide(process.engine.now)
        if verdict is None:
            self._wake(self.arbiter.wake_at())
            return
        if verdict.outcome is FailoverOutcome.GO and self.next is None:
            process.engine.note(process.name, f"{verdict}; votes {self.arbiter.votes}, gone {self.arbiter.gone}")
            self._serve(verdict)
        for contact in self._waiting:
            contact.reply((verdict, self.next))
        self._waiting.clear()

    def _wake(self, when: float) -> None:
        engine = self.process.engine
        if engine.now < when < engine.now + 2 * PATIENCE:
            engine.at(when - engine.now, self._settle)

    def _serve(self, verdict: Verdict) -> None:
        self.server = Process(self.process.engine, SimStore(), f"store{len(self.world.views)}")
        self.server.host, self.server.frozen_until = self.process.host, self.process.frozen_until
        self.server.store.server = self.server
        self.next = self.world.go_on(self.view, verdict, self.server, self.process.training.ticket.slot)

        def end() -> None:
            assert self.server is not None
            self.server.end("ends with its monitor")
            self.server.store.lose()

        self.process.on_end.append(end)

    def _speak_for(self, contact: ArbiterClient) -> None:
        """One that was to begin anew here may have ended before it had a monitor there."""
        slot = contact.training.ticket.slot
        if self.next is None or self.server is None or slot not in self.next.members:
            return
        record = InterruptionRecord(0, Interruption.TERMINATED, initial_rank=slot, message="died")
        self.server.spawn(self._speak(slot, record))

    def _speak(self, slot: int, record: InterruptionRecord) -> Generator[Any, Any, None]:
        assert self.next is not None
        membership = Membership.founder(slot, self.next.members, self.next.world_size)
        try:
            # it may have arrived and not been counted: whoever speaks for it counts again until there is a verdict
            if not (yield from verbs.has_begun()):
                yield from watching.report_death(membership, slot, record, self.process.name)
        except StoreLost:
            return


class Keeper:
    """Closes a store that hears less than half of the members."""

    def __init__(self, world: World, process: Process, view: View) -> None:
        self.process, self.view, self.world = process, view, world
        #: members whose training process has certainly ended
        self.gone: set[int] = set()
        #: members that have voted, and may have gone on elsewhere
        self.elsewhere: set[int] = set()
        #: anybody said hello: from then on the others may go on elsewhere
        self.met = False
        self._heard = watching.HeartbeatTracker(SILENCE_SHARE * HEARTBEAT_TIMEOUT)
        #: the roster of the last iteration that started, of which all its members know, and all since then: those that
        #: are cut off may know of any of them
        self.rosters = [view.members]
        process.spawn(self._follow())
        process.spawn(self._watch())

    def meet(self, contact: ArbiterClient) -> None:
        self.met = True
        self.gone.discard(contact.member)

    def leave(self, contact: ArbiterClient) -> None:
        if contact.member not in self.elsewhere:
            self.gone.add(contact.member)

    def turn_away(self, contact: ArbiterClient) -> None:
        self.elsewhere.add(contact.member)

    def _follow(self) -> Generator[Any, Any, None]:
        membership = Membership.founder(self.view.members[0], self.view.members, self.view.world_size)
        try:
            while not membership.iteration >= 0 or not (yield from verbs.await_outcome(membership.iteration)).completed:
                decision = yield from verbs.await_next(membership.iteration)
                membership.apply(decision)
                if decision.abort:
                    break
                self.rosters.append(membership.roster)
                if (yield from verbs.await_start(membership.iteration)).go:
                    self.rosters = [membership.roster]
            yield from self._linger(membership)
        except StoreLost:
            return

    def _linger(self, membership: Membership) -> Generator[Any, Any, None]:
        """The job is over. The first store ends when nobody needs it; a later one with the monitor that serves it."""
        if not self.view.number:
            yield from verbs.await_over(BARRIER_TIMEOUT, membership.known)
            self.process.engine.note(self.process.name, "ends: the job is over")
            self.world.has_store_ended = True
            self.view.store.lose()

    def _watch(self) -> Generator[Any, Any, None]:
        store = self.view.store
        while not store.lost and not self.world.is_over:
            yield Pause(LOOK)
            heard = self._hear()
            enough = all(rules.hears_enough(roster, heard, self.gone) for roster in self.rosters)
            if self.met and not enough:
                self.process.engine.note(self.process.name, f"closes itself: of {self.rosters} heard {heard}")
                self.world.closed.append(self.view)
                store.lose()

    def _hear(self) -> set[int]:
        now, data = self.process.engine.now, self.view.store.data
        counters = {member: int(data.get(f"beat/{member}", b"0")) for member in set().union(*self.rosters)}
        self._heard.note(counters, now)
        return set(self._heard.members(now)) - self.elsewhere
