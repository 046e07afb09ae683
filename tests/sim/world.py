"""One simulated job: who takes part, the faults, and the design's invariants I1 to I5, checked as it goes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from inprocess.attribution import RETURNED, WAITED
from inprocess.call.hooks import adapt_rank_assignment
from inprocess.exception import StoreLost
from inprocess.failover.rules import standbys
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import FIRST_JOINER, Decision, Ticket, Verdict
from inprocess.protocol.parsing import load_ticket
from inprocess.protocol.phases import Phase
from inprocess.protocol.repeats import TRIES
from inprocess.protocol.rounds import assign_slots
from inprocess.protocol.timing import SILENCE_SHARE
from inprocess.protocol.verbs.joining import LAST_LOOK
from tests.sim.assignments import ASSIGNMENTS, mate_of
from tests.sim.desk import ArbiterClient, ArbiterServer, Keeper, View
from tests.sim.engine import Broken, Engine, Process, Script, SimStore
from tests.sim.live import Record
from tests.sim.monitor import Monitor
from tests.sim.scenario import (
    EXTRAS,
    HEARTBEAT,
    HEARTBEAT_TIMEOUT,
    LEAVES,
    RAISES,
    Act,
    Again,
    Cut,
    Freeze,
    HangsAgain,
    Kill,
    Scenario,
    Spawn,
    Split,
    StoreGone,
)
from tests.sim.training import Training

#: messages and hooks of a slow member take that many times as long
SLOW_PACE = 4.0
#: how a process ended well; and how many processes are started in all
ENDED_WELL, MOST = ("returned", "late"), 12
#: how long after it woke a member may still be inside a function that the others have given up (seconds)
JUST = 0.5
#: how long a process may have to be let in, where there is a slot for it (seconds)
SOON = 3.0
#: how long a monitor may stay after the last training process: that of one that died while it waited looks once more
STAYS = LAST_LOOK + 1.0


def _excuses(fault: object) -> bool:
    """Whether everybody may end without having returned."""
    if isinstance(fault, Kill):
        return fault.target in ("store", "store host")
    return isinstance(fault, StoreGone | Split) or (isinstance(fault, Act) and fault.what == "limit")


def _is_loss(fault: object) -> bool:
    return isinstance(fault, StoreGone) or (isinstance(fault, Kill) and fault.target in ("store", "store host"))


def _is_raise(fault: object) -> bool:
    return isinstance(fault, Act) and fault.what in RAISES


class World:
    """Runs one scenario. ``run`` raises Broken, or Stuck."""

    def __init__(self, scenario: Scenario, max_time: float = 400.0) -> None:
        self.scenario = scenario
        self.engine = Engine(scenario.seed, max_time=max_time)
        self.store = SimStore()
        members = tuple(range(scenario.members))
        #: the stores, in the order in which the job went on with them
        self.views = [View(0, self.store, members, len(members))]
        #: those that closed themselves, and the newest in which the function was entered
        self.closed: list[View] = []
        self._newest = self.views[0]
        #: how long a process waits for an answer of the store. Shorter than in the real one by a heartbeat: of a
        #: timeout as short as here it would be too large a part for leaving the function before the lease is over
        self.silence = SILENCE_SHARE * HEARTBEAT_TIMEOUT - HEARTBEAT if scenario.standbys else None
        self.is_over = False
        #: the job is over, and with it its first store: whoever starts now finds none
        self.has_store_ended = False
        #: monitors whose rank has another one since, and connections to the desks of stores before
        self._retired: list[Monitor] = []
        self._kept: list[ArbiterClient] = []
        #: faults that did happen, in order
        self.fired: list[object] = []
        #: when the last training process ended
        self._last_end = 0.0
        #: members whose error came again, each time; the iterations in which one did
        self._agains: list[int] = []
        self._failed_again: set[tuple[int, int]] = set()
        #: the iterations in which a function hung at its entry
        self._hung: set[tuple[int, int]] = set()
        #: who committed, and in which iteration; how long each waited before a start
        self._progressed: list[tuple[Training, tuple[int, int]]] = []
        self.pauses: list[tuple[int, float]] = []
        #: the job ended for the same error again and again
        self.hopeless = False
        self._armed: set[Kill | Freeze] = set()
        self._acts = [fault for fault in scenario.faults if isinstance(fault, Act)]
        #: (what, iteration) -> the value the first reader found
        self._agreed: dict[tuple[str, int], Any] = {}
        #: (store, iteration) -> tickets that were there when it ended
        self._waiting: dict[tuple[int, int], dict[int, Ticket]] = {}
        #: (store, iteration) -> active rank -> member, of those that entered the function
        self._entered: dict[tuple[int, int], dict[int, int]] = {}
        #: (store, iteration) -> members whose function returned
        self._returned: dict[tuple[int, int], set[int]] = {}
        #: of those that train with a LiveState
        self.live = Record()
        #: members whose monitor gave up waiting for the end of the job
        self.overdue: set[int] = set()
        #: members whose monitor was killed or cut off: only these may be found silent
        self._unwatched: set[int] = set()
        #: members that were found silent
        self._declared: set[int] = set()
        #: processes by number: the founders, then those that are started later
        self.training: list[Training] = []
        self.monitors: list[Monitor] = []
        #: any member's: they differ in where it is only
        self._assignment = adapt_rank_assignment(ASSIGNMENTS[scenario.assignment](0))
        #: processes that are about to start
        self._to_come = sum(isinstance(fault, Spawn) for fault in scenario.faults)
        for member in range(scenario.members):
            self._start(member)
        if not scenario.shared_host:
            Process(self.engine, self.store, "host").spawn(self._host())
        if scenario.standbys:
            self.views[0].keeper = Keeper(self, Process(self.engine, self.store, "store"), self.views[0])
        for fault in scenario.faults:
            if not isinstance(fault, Kill) or fault.op is None:
                self._arm(fault)

    def run(self) -> None:
        """Until every process has ended. Raises Broken (an invariant does not hold) or Stuck (it does not end)."""
        self.engine.run(self._has_ended)
        self._check_results()

    def _has_ended(self) -> bool:
        processes = (*self.training, *self.monitors, *self._retired)
        self.is_over = not self._to_come and not any(process.alive for process in processes)
        return self.is_over

    def _start(self, slot: int) -> None:
        number = len(self.training)
        training = Training(self, number, slot)
        training.pace = SLOW_PACE if number in self.scenario.slow else 1.0
        training.on_end.append(partial(self._training_ended, training))
        self.training.append(training)
        self.monitors.append(Monitor(self, training, 0))
        for fault in self.scenario.faults:
            if isinstance(fault, Kill) and fault.member == number and fault.op is not None and not fault.phase:
                self._arm(fault)

    def _start_late(self, slot: int) -> None:
        self._to_come -= 1
        self._start(slot)
        self.engine.note(f"train{len(self.training) - 1}", f"starts, with RANK={slot}")

    def _host(self) -> Script:
        try:
            for iteration in range(1_000):
                yield from verbs.await_next(iteration - 1)
                yield from verbs.publish_rendezvous(iteration, f"host:{29500 + iteration}")
        except StoreLost:
            return

    # --- several stores ---------------------------------------------------------------------------------------

    def standbys(self, view: View, roster: Sequence[int]) -> tuple[int, ...]:
        """The members that stand by in an iteration."""
        return standbys(roster, self.scenario.standbys, view.host)

    def opened(self, desk: ArbiterServer, member: int) -> None:
        """A member stands by from now on: those that have waited to hear where it is come to it."""
        desk.view.desks[member] = desk
        for training in self.training:
            if training.alive and training.view is desk.view and member in training.standing:
                self.make_contacts(training)

    def make_contacts(self, training: Training) -> None:
        """To those that stand by in its iteration, and can be reached; and to who serves the store, which is not
        asked."""
        view = training.view
        if training.keeper is None and view.keeper is not None and not training.cannot_hear(view.store):
            training.keeper = ArbiterClient(training, view.keeper)
            self._kept.append(training.keeper)
        known = {contact.post: contact for contact in training.contacts if not contact.ended}
        training.order, training.met_all = [], True
        for member in training.standing:
            desk = view.desks.get(member)
            if desk is None or (desk not in known and desk.process.alive and not self._reaches(training, desk)):
                training.met_all = False
            elif desk.process.alive:
                contact = known.get(desk) or ArbiterClient(training, desk)
                training.order.append(contact)
                training.contacts += [contact] * (desk not in known)

    def _reaches(self, training: Training, desk: ArbiterServer) -> bool:
        """Whether it answers: where it stands still, not before it goes on."""
        network, here, there = self.engine.network, training.host, desk.process.host
        opens = max(network.open_at(here, there), network.open_at(there, here), desk.process.frozen_until)
        return opens <= self.engine.now

    def keep(self, contacts: list[ArbiterClient]) -> None:
        """They end with the process."""
        self._kept.extend(contacts)

    def go_on(self, before: View, verdict: Verdict, server: Process, slot: int) -> View:
        """A desk has decided that the job goes on; ``slot``: of the member whose monitor that is."""
        number, members = len(self.views), verdict.members
        offset = before.offset + verdict.iteration + 1
        view = View(number, server.store, members, max(members) + 1, slot, offset, before)
        view.keeper = Keeper(self, server, view)
        self.views.append(view)
        if not self.scenario.shared_host:
            process = Process(self.engine, view.store, view.label("host"))
            process.host = server.host
            process.spawn(self._host())
        return view

    def new_monitor(self, training: Training) -> None:
        """The training process goes on with another store."""
        self._retired.append(self.monitors[training.number])
        self.monitors[training.number] = Monitor(self, training, 0)

    def lost_touch(self, training: Training) -> None:
        """Its monitor may be found silent from now on."""
        self._unwatched.add(training.number)

    # --- errors that come again ---------------------------------------------------------------------------------

    def comes_again(self, training: Training) -> bool:
        """Whether its function raises as before."""
        iteration = training.view.offset + training.membership.iteration
        for fault in self.scenario.faults:
            mine = isinstance(fault, Again) and fault.member == training.number
            if mine and iteration >= fault.iteration and self._agains.count(training.number) < fault.times:
                self._agains.append(training.number)
                self.fired.append(Act(training.number, "raise at entry", iteration))
                self._failed_again.add(training.moment)
                self.engine.note(training.name, "raises as before")
                return True
        return False

    def hangs_again(self, training: Training) -> bool:
        """Whether its function hangs at its entry as before."""
        if not any(fault.member == training.number for fault in self._hangs(training)):
            return False
        self.fired.append(Act(training.number, "hang", training.view.offset + training.membership.iteration))
        self.engine.note(training.name, "hangs as before")
        return True

    def waits_for_hung(self, training: Training) -> bool:
        """Whether it waits in a collective for another member that hangs."""
        others = [self.training[fault.member] for fault in self._hangs(training)]
        return any(
            other.alive
            and other is not training
            and other.moment == training.moment
            and other.started_in == training.membership.iteration
            and other.proposed.active_rank is not None
            for other in others
        )

    def _hangs(self, training: Training) -> list[HangsAgain]:
        iteration = training.view.offset + training.membership.iteration
        faults = [fault for fault in self.scenario.faults if isinstance(fault, HangsAgain)]
        return [fault for fault in faults if 0 <= iteration - fault.iteration < fault.times]

    def hung(self, training: Training) -> None:
        """Its function stands still from its entry on."""
        self._hung.add(training.moment)

    def progressed(self, training: Training) -> None:
        """It committed."""
        self._progressed.append((training, training.moment))

    def paused(self, training: Training, seconds: float) -> None:
        """How long it waited before a start."""
        self.pauses.append((training.number, seconds))

    def _check_repeats(self, view: View, iteration: int, decision: Decision) -> None:
        """No false alarm: an error counts more than once only where one came again, and none does where a member that
        stays committed; the job ends for it after the tenth, and only where nobody who stays ever committed. A hang
        counts as often as members hung at their entries, in a row, and the third ends such a job."""
        moment = (view.number, iteration)
        limit = self.scenario.max_repeats
        if decision.repeats > 1 and moment not in self._failed_again:
            raise Broken(f"{decision.repeats} errors in a row after iteration {iteration}, and none came again")
        here = [(who, when) for who, when in self._progressed if who.alive and who.view is view]  # not given up before
        stayed = [when for who, when in here if who.member not in decision.removed]
        if decision.repeats and moment in stayed:
            raise Broken(f"an error of iteration {iteration} counts, in which a member committed")
        before = [(view.number, number) for number in range(max(0, iteration - decision.hangs + 1), iteration + 1)]
        if decision.hangs and (moment in stayed or not self._hung.issuperset(before)):
            raise Broken(f"{decision.hangs} hangs in a row after iteration {iteration}, of {before}: {self._hung}")
        if decision.abort and decision.hangs:
            self.hopeless = True
            if limit is None or decision.hangs < TRIES or any(when <= moment for when in stayed):
                raise Broken(f"the job ends after {decision.hangs} hangs in a row in iteration {iteration}")
        if decision.abort and decision.repeats:
            self.hopeless = True
            if limit is None or decision.repeats < limit or any(when <= moment for when in stayed):
                raise Broken(f"the job ends after {decision.repeats} errors in a row in iteration {iteration}")

    # --- faults -----------------------------------------------------------------------------------------------

    def _arm(self, fault: object) -> None:
        match fault:
            case Kill(phase=str(phase)) | Freeze(phase=str(phase)) if phase:
                pass
            case Kill(op=None):
                self.engine.at(fault.time, partial(self._kill, fault))
            case Kill(op=int(number)):
                victim: Process = (self.monitors if fault.target == "monitor" else self.training)[fault.member]
                (victim.after if fault.after else victim.before)[number] = partial(self._kill, fault)
            case Cut():
                self.engine.at(fault.time, partial(self._cut, fault))
            case Freeze():
                self.engine.at(fault.time, partial(self._freeze, fault))
            case StoreGone():
                self.engine.at(fault.time, partial(self._lose_store, fault, fault.host))
            case Split():
                self.engine.at(fault.time, partial(self._split, fault))
            case Spawn():
                self.engine.at(fault.time, partial(self._start_late, fault.slot))

    def begins(self, training: Training) -> None:
        """A phase begins: kills that count operations from here are armed, and who is to stand still does so."""
        for fault in self.scenario.faults:
            mine = isinstance(fault, Kill | Freeze) and fault.member == training.number
            if mine and fault.phase == training.phase.value:  # type: ignore[union-attr]
                self._arm_phase(fault, training)  # type: ignore[arg-type]

    def _arm_phase(self, fault: Kill | Freeze, training: Training) -> None:
        iteration = training.view.offset + training.membership.iteration
        if iteration < fault.iteration or fault in self._armed:
            return
        self._armed.add(fault)
        if isinstance(fault, Freeze):
            self._freeze(fault)
        elif fault.op is not None:
            moments = training.after if fault.after else training.before
            moments[training.operations + fault.op] = partial(self._kill, fault)

    def _kill(self, fault: Kill) -> None:
        if fault.target in ("store", "store host"):
            self._lose_store(fault, fault.target == "store host")
            return
        if fault.member >= len(self.training):
            return
        training, monitor = self.training[fault.member], self.monitors[fault.member]
        self.fired.append(fault)
        if fault.target in ("monitor", "host"):
            self._unwatched.add(fault.member)
        if fault.target == "monitor":
            self.kill_monitor(training, "killed (monitor)")
        if fault.target == "host":
            for process in (monitor, *self._retired):
                if process.host == fault.member:
                    process.end("killed (host)")
        if fault.target in ("training", "host"):
            training.end(f"killed ({fault.target})")

    def kill_monitor(self, training: Training, why: str) -> None:
        """A new one comes soon."""
        self.monitors[training.number].end(why)
        self.engine.at(0.05 + self.engine.rng.random(), partial(self._new_monitor, training))

    def _new_monitor(self, training: Training) -> None:
        if training.alive and not self.monitors[training.number].alive:
            self.monitors[training.number] = Monitor(self, training, 1)

    def _cut(self, fault: Cut) -> None:
        self.fired.append(fault)
        self._unwatched.add(fault.member)
        end = self.engine.now + fault.seconds
        self.engine.note(f"host{fault.member}", f"not reachable ({fault.way}) for {fault.seconds} s")
        if self.scenario.standbys:
            way, host, server = fault.way, fault.member, self.views[-1].store.host
            if way == "store":
                self.engine.network.cut(lambda a, b: {a, b} == {host, server}, end)
            else:
                self.engine.network.cut(lambda a, b: (a == host and way != "in") or (b == host and way != "out"), end)
            self._hush(fault.seconds)
            return
        for process in (self.training[fault.member], self.monitors[fault.member]):
            if fault.way != "in":
                process.cut_out_until = max(process.cut_out_until, end)
            if fault.way != "out":
                process.cut_in_until = max(process.cut_in_until, end)

    def _split(self, fault: Split) -> None:
        self.fired.append(fault)
        self._unwatched.update(range(len(self.training)))
        self.engine.note("network", f"hosts {fault.members} and the others do not reach each other: {fault.seconds} s")
        side = frozenset(fault.members)
        self.engine.network.cut(lambda a, b: (a in side) is not (b in side), self.engine.now + fault.seconds)
        self._hush(fault.seconds)

    def _hush(self, seconds: float) -> None:
        """Connections over which nothing comes back end."""
        if self.silence is None or seconds < self.silence:
            return
        for process in (*self.training, *self.monitors):
            self.engine.at(self.silence, process.hush)

    def _freeze(self, fault: Freeze) -> None:
        self.fired.append(fault)
        if fault.target != "training":
            self._unwatched.add(fault.member)
            for monitor in (self.monitors[fault.member], *self._retired):
                if monitor.host == fault.member:
                    monitor.freeze(fault.seconds)
        if fault.target != "monitor":
            self.training[fault.member].freeze(fault.seconds)
        self.engine.note(f"host{fault.member}", f"{fault.target} stands still for {fault.seconds} s")

    def _lose_store(self, fault: StoreGone | Kill, host: bool) -> None:
        store = self.views[-1].store
        if store.lost:
            return
        self.fired.append(fault)
        self.engine.note("store", "is gone")
        store.lose()
        number = 0 if store.host is None else store.host
        for process in (*self.monitors, *self._retired):
            if isinstance(process.desk, ArbiterServer) and process.desk.next is self.views[-1]:
                process.end("killed (it served the store)")
            elif host and process.host == number:
                self._unwatched.add(number)
                process.end("killed (host)")
        if host:
            self.training[number].end("killed (host)")

    def take(self, member: int, iteration: int, what: str) -> bool:
        """Whether this member shall do ``what`` now."""
        for act in self._acts:
            if act.member == member and act.what == what and iteration >= act.iteration:
                self._acts.remove(act)
                self.fired.append(act)
                self.engine.note(f"train{member}", f"fault: {what}")
                return True
        return False

    def _training_ended(self, training: Training) -> None:
        self._last_end = self.engine.now
        monitor = self.monitors[training.number]
        if monitor.alive:
            monitor.training_ended()
        for contact in (*training.contacts, *self._kept):
            if contact.training is training:
                contact.close()
        again = self.scenario.respawn
        ended = (*ENDED_WELL, "a founder is missing")  # once more would take as long, and end as it did
        if (
            again is not None
            and training.result not in ended
            and len(self.training) < MOST
            and not self.has_store_ended
        ):
            self._to_come += 1
            self.engine.at(again, partial(self._start_late, training.ticket.slot))

    # --- invariants -------------------------------------------------------------------------------------------

    def agree(self, view: View, what: str, iteration: int, value: Any) -> None:
        """I1: the same outcome and the same next roster for everybody. Who comes back when the address of an iteration
        was deleted long ago may find a new one: it was declared dead there, which it finds in the start round."""
        if what == "rendezvous" and f"{iteration}/rendezvous" in view.store.deleted:
            return
        what = view.label(what)
        if isinstance(value, Decision) and (what, iteration) not in self._agreed:
            self._check_repeats(view, iteration, value)
        first = self._agreed.setdefault((what, iteration), value)
        if first != value:
            raise Broken(f"I1: two values of {what}/{iteration}: {first} and {value}")

    def ended(self, training: Training) -> None:
        """A member learns that an iteration has ended: whoever decides its end round will see the tickets of now, if
        it has not looked yet."""
        membership, data = training.membership, training.view.store.data
        entries = [f"{membership.iteration}/end/{member}" for member in membership.roster]
        if any(entry not in data for entry in entries):
            self._waiting.setdefault(training.moment, self._tickets(data))

    def _tickets(self, data: dict[str, bytes]) -> dict[int, Ticket]:
        found = [(key, raw) for key, raw in data.items() if key.startswith("ticket/")]
        tickets = {FIRST_JOINER + int(key.removeprefix("ticket/")): load_ticket(raw, key) for key, raw in found}
        return {member: ticket for member, ticket in tickets.items() if not ticket.closed}

    def _was_away(self) -> bool:
        """Whether somebody may have learned late what happened meanwhile."""
        return any(isinstance(fault, Cut | Split | Freeze) for fault in self.scenario.faults)

    def let_in(self, training: Training) -> None:
        """The end round was decided: whoever has a ticket, and finds a slot in the new roster, is in it."""
        membership, (number, iteration) = training.membership, training.moment
        still = self._tickets(training.view.store.data)
        waiting = {m: ticket for m, ticket in self._waiting.get((number, iteration - 1), {}).items() if m in still}
        self._check_seats(
            membership, {member: ticket for member, ticket in waiting.items() if member not in membership.roster}
        )

    def named(self, training: Training, decision: Decision) -> None:
        """After a soft timeout: nobody is named that neither hangs nor died; where one hangs, it is."""
        hung = {fault.member for fault in self.fired if isinstance(fault, Act) and fault.what.startswith("hang")}
        slots = {self.training[number].ticket.slot for number in hung}
        found = [record for record in decision.stuck if record.where not in ("", RETURNED)]
        said = {record.initial_rank for record in found if record.message != WAITED}
        if said - slots:
            raise Broken(f"{training.name} names {sorted(said - slots)} with a place, and only {slots} hang")

    def _check_seats(self, membership: Membership, waiting: dict[int, Ticket]) -> None:
        if seats := assign_slots(membership.taken, waiting):
            raise Broken(f"members {sorted(seats)} wait, and slots {sorted(seats.values())} are free")

    def same_book(self, training: Training) -> None:
        """I1, I4: the same roster and the same frame on every member's membership."""
        membership = training.membership
        numbering = (membership.roster, membership.world_size, membership.terminated, membership.fresh)
        self.agree(training.view, "roster", membership.iteration, numbering)
        if membership.was_founder and not training.view.number:  # who joins learns of a row with the next error of it
            self.agree(training.view, "errors in a row", membership.iteration, membership.streak)

    def declared(self, by: Monitor, member: int) -> None:
        """``by`` found ``member`` silent. Only a member that was cut off, or has lost its monitor, may be."""
        view = by.training.view
        known = (
            monitor.training.number
            for monitor in self.monitors
            if monitor.identity == member and monitor.training.view is view
        )
        number = next(known, member)  # a founder whose host went down when it had just arrived
        if number >= FIRST_JOINER:
            self._check_lost_early(member)
            return
        if self.monitors[number].alive and number not in self._unwatched:
            raise Broken(f"{by.name} declares member {member} dead, whose monitor sends heartbeats")
        self._declared.add(member)

    def _check_lost_early(self, member: int) -> None:
        """Nobody sends heartbeats for a joiner that died, or was cut off, before it could tell its monitor its id."""
        unknown = [training for training in self.training if not training.entered]
        if all(training.alive and training.number not in self._unwatched for training in unknown):
            raise Broken(f"member {member} is declared dead, and no process was lost before it said who it is")
        self._declared.add(member)

    def enter(self, training: Training) -> None:
        """I2, I4: checked as the function starts."""
        iteration, state = training.membership.iteration, training.placed
        self._check_job(training)
        size, rank, active = state.world_size, state.active_rank, state.active_world_size
        self.engine.note(training.name, f"enters the function, iteration {iteration}, rank {rank} of {active}/{size}")
        for other in self.training:
            if other.inside is None or not other.alive or self._just_woken(other):
                continue
            if other.moment != training.moment:
                raise Broken(f"I2: {training.name} enters iteration {iteration}, {other.name} is in {other.inside}")
        self.agree(training.view, "active world size", iteration, active)
        if rank is None or not 0 <= rank < active:
            raise Broken(f"I4: {training.name} has rank {rank} of {active}")
        self._check_slot(training, rank)
        taken = self._entered.setdefault(training.moment, {}).setdefault(rank, training.member)
        if taken != training.member:
            raise Broken(f"I4: rank {rank} in iteration {iteration} on members {taken} and {training.member}")

    def _check_job(self, training: Training) -> None:
        """I2: there is one job. Who has gone on with another store has done so for all."""
        view = training.view
        if not view.follows(self._newest):
            raise Broken(f"I2: {training.name} enters with store {view.number}, others have with {self._newest.number}")
        self._newest = view
        done = [what for what, _ in self._agreed if what.startswith("completed")]
        if done and done != [view.label("completed")]:
            raise Broken(f"I5: {training.name} enters with store {view.number}, and a call has returned: {done}")

    def _check_slot(self, training: Training, rank: int) -> None:
        """Ranks keep the order in which they were started; who joins stands where the one that it replaces stood."""
        membership = training.membership
        if self.scenario.assignment == "shift" and sorted(membership.taken).index(membership.slot) != rank:
            raise Broken(f"{training.name} has rank {rank}, and slot {membership.slot} of {sorted(membership.taken)}")

    def _just_woken(self, training: Training) -> bool:
        """It stands still, or its monitor, which does not know yet, is about to end it."""
        return self.engine.now < training.frozen_until + JUST

    def committed(self, training: Training) -> None:
        """I2, the fence: what the function does inside ``atomic()`` belongs to the iteration that runs."""
        if training.inside is not None and training.moment < max(self._entered):
            raise Broken(
                f"I2: {training.name} commits in iteration {training.inside}, others are in {max(self._entered)}"
            )

    def returned(self, training: Training) -> None:
        """The function returned."""
        self._returned.setdefault(training.moment, set()).add(training.number)

    def completed(self, training: Training) -> None:
        """I5: the call returns."""
        iteration, active = training.membership.iteration, training.placed.active_world_size
        self.agree(training.view, "completed", 0, iteration)
        if any(training.view.label("completed") != what for what, _ in self._agreed if what.startswith("completed")):
            raise Broken(f"I5: {training.name} returns with store {training.view.number}, others with another one")
        if not self._was_away() and not self.scenario.slow:
            waiting = [other for other in self.training if self._waits(other) and other.view is training.view]
            tickets = {other.member: other.ticket for other in waiting}
            members = len(training.membership.roster)
            if self.joining_helps(members, members + len(assign_slots(training.membership.taken, tickets))):
                self._check_seats(training.membership, tickets)
        done = self._returned.get(training.moment, set())
        if len(done) != active:
            raise Broken(f"I5: {training.name} returns; in iteration {iteration} {sorted(done)} of {active} returned")

    def joining_helps(self, members: int, later: int) -> bool:
        """As the library has it, with this scenario's assignment."""
        return self.scenario.join == "now" and self._assignment.gains(members, later)

    def _waits(self, training: Training) -> bool:
        """It has been waiting for a slot, and could have interrupted what ran."""
        waits = training.alive and training.entered and training.phase is Phase.JOIN and not training.found
        return waits and not training.refused and training.waits_since < self.engine.now - SOON

    def _check_results(self) -> None:
        """How each member ended follows from what happened to it, and no restart was needless."""
        excused = any(_excuses(fault) for fault in self.fired) or self.closed or len(self.views) > 1
        for training in self.training:
            if training.result not in ENDED_WELL and not excused and not self._explained(training):
                raise Broken(f"I3: {training.name} ended with {training.result!r} though nothing happened to it")
        missing = any(training.result == "a founder is missing" for training in self.training)
        if self.overdue and not missing and not excused:
            raise Broken(f"I3: monitors of {sorted(self.overdue)} waited for barrier_timeout")
        self._check_gone()
        self._check_goes_on()
        late = self.engine.now - self._last_end
        if (
            ("completed", 0) in self._agreed
            and late > STAYS + max(self.scenario.delays, default=0.0)
            and not any(isinstance(fault, Cut | Split | Freeze) for fault in self.fired)
        ):
            raise Broken(f"I3: monitors stayed for {late:.1f} s after the last training process had ended")
        iterations = sum(self._iterations(view) for view in self.views)
        faults = sum(not (isinstance(fault, Act) and fault.what in EXTRAS) for fault in self.fired)
        faults += len(self.training) - self.scenario.members  # each interrupts once
        faults += sum(len(fault.members) for fault in self.fired if isinstance(fault, Split)) + len(self.views) - 1
        if iterations > 1 + faults:
            raise Broken(f"{iterations} iterations with {faults} faults")

    def _iterations(self, view: View) -> int:
        return 1 + max((number for what, number in self._agreed if what == view.label("outcome")), default=0)

    def _check_goes_on(self) -> None:
        """I3: who only loses the store, or its host, goes on."""
        losses = [fault for fault in self.fired if _is_loss(fault)]
        others = [fault for fault in self.fired if not _is_loss(fault) and not _is_raise(fault)]
        # one that ended before it had seen the first start is on the roster still, and has met nobody who stands by
        unknown = any(training.result in ("discarded", "cut off: StoreLost") for training in self.training)
        if len(losses) != 1 or others or not self.scenario.standbys or self.closed or unknown:
            return
        self.engine.note("world", "the job must go on")
        for training in self.training:
            if training.result not in (None, *ENDED_WELL) and training.asked and not self._explained(training):
                raise Broken(f"I3: {training.name} ended with {training.result!r}, and only the store was lost")

    def _check_gone(self) -> None:
        """The store's host must not wait for a lost member that nobody speaks for any more."""
        if self.scenario.standbys:
            return  # one that was declared may live on with another store, or have lost this one
        for training in self.training:
            kept = training.membership.roster if training.result == "returned" else self._declared
            silent = [member for member in self._declared.difference(kept) if f"gone/{member}" not in self.store.data]
            if silent:
                raise Broken(f"I3: nobody said that members {silent} need the store no more")

    def _explained(self, training: Training) -> bool:
        for fault in self.fired:
            mine = getattr(fault, "member", None) == training.number
            if mine and (isinstance(fault, Kill | Cut | Freeze) or fault.what in LEAVES):  # type: ignore[attr-defined]
                return True
        if training.result == "a founder is missing":  # killed before anybody could see it
            cut = self.scenario.standbys and any(isinstance(fault, Cut | Split) for fault in self.fired)
            return cut or any(isinstance(fault, Kill) for fault in self.fired)
        if training.result == "cut off: StoreLost" and self.has_store_ended and training.started_in < 0:
            return True
        if training.result == "aborted" and self.hopeless:
            return True
        if training.result in ("aborted", "too few"):
            return training.proposed.active_world_size == 0
        if training.result == "nobody left":  # or of a larger job, before the smaller one had begun
            nobody = not any(other.result == "returned" for other in self.training)
            return nobody or training.ticket.slot >= self.scenario.members
        if training.result == "taken":
            return any(
                isinstance(fault, Spawn) and fault.slot == training.ticket.slot for fault in self.scenario.faults
            )
        mate = mate_of(self.scenario.assignment, training.ticket.slot)
        if training.result != "discarded" or mate is None:
            return False
        mates = [other for other in self.training if other.ticket.slot == mate < self.scenario.members]
        # a spare that was started for one of the two slots has their key too, wherever it sits
        group = [other for other in self.training if other.ticket.slot in (mate, training.ticket.slot)]
        return not mates or len(group) > 2 or any(other.result != "returned" for other in mates)
