"""One simulated job: who takes part, the faults, and the design's invariants I1 to I5, checked as it goes."""

from __future__ import annotations

from functools import partial
from typing import Any

from inprocess import coordinator
from inprocess.exception import StoreLost
from inprocess.protocol.book import Book
from tests.sim.assignments import mate_of
from tests.sim.engine import Engine, Process, Script, SimStore
from tests.sim.monitor import Monitor
from tests.sim.scenario import EXTRAS, LEAVES, Act, Cut, Freeze, Kill, Scenario, StoreGone
from tests.sim.training import Training

#: messages and hooks of a slow member take that many times as long
SLOW_PACE = 4.0
#: how long after it woke a member may still be inside a function that the others have given up (seconds)
JUST = 0.5


class Broken(AssertionError):
    """An invariant does not hold."""


class World:
    """Runs one scenario. ``run`` raises Broken, or Stuck."""

    def __init__(self, scenario: Scenario, max_time: float = 400.0) -> None:
        self.scenario = scenario
        self.engine = Engine(scenario.seed, max_time=max_time)
        self.store = SimStore()
        #: faults that did happen, in order
        self.fired: list[object] = []
        #: when the last training process ended
        self._last_end = 0.0
        self._armed: set[Kill] = set()
        self._acts = [fault for fault in scenario.faults if isinstance(fault, Act)]
        #: (what, iteration) -> the value the first reader found
        self._agreed: dict[tuple[str, int], Any] = {}
        #: iteration -> active rank -> member, of those that entered the function
        self._entered: dict[int, dict[int, int]] = {}
        #: iteration -> members whose function returned
        self._returned: dict[int, set[int]] = {}
        #: members whose monitor gave up waiting for the end of the job
        self.overdue: set[int] = set()
        #: members whose monitor was killed or cut off: only these may be found silent
        self._unwatched: set[int] = set()
        #: members that were found silent
        self._declared: set[int] = set()
        self.training = [Training(self, member) for member in range(scenario.members)]
        for member in scenario.slow:
            self.training[member].pace = SLOW_PACE
        self.monitors = [Monitor(self, training, 0) for training in self.training]
        for training in self.training:
            training.on_end.append(partial(self._training_ended, training))
        if not scenario.shared_host:
            Process(self.engine, self.store, "host").spawn(self._host())
        for fault in scenario.faults:
            self._arm(fault)

    def run(self) -> None:
        """Until every process has ended. Raises Broken (an invariant does not hold) or Stuck (it does not end)."""
        self.engine.run(lambda: not any(p.alive for p in self.training) and not any(m.alive for m in self.monitors))
        self._check_results()

    def _host(self) -> Script:
        try:
            for iteration in range(1_000):
                yield from coordinator.await_next(iteration - 1)
                yield from coordinator.publish_rendezvous(iteration, f"host:{29500 + iteration}")
        except StoreLost:
            return

    # --- faults -----------------------------------------------------------------------------------------------

    def _arm(self, fault: object) -> None:
        match fault:
            case Kill(phase=str(phase)) if phase:
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
                self.engine.at(fault.time, partial(self._lose_store, fault))

    def begins(self, training: Training) -> None:
        """A phase begins: kills that count operations from here are armed."""
        for fault in self.scenario.faults:
            if isinstance(fault, Kill) and fault.member == training.member and fault.phase == training.phase.value:
                self._arm_phase(fault, training)

    def _arm_phase(self, fault: Kill, training: Training) -> None:
        if training.book.iteration >= fault.iteration and fault.op is not None and fault not in self._armed:
            self._armed.add(fault)
            moments = training.after if fault.after else training.before
            moments[training.operations + fault.op] = partial(self._kill, fault)

    def _kill(self, fault: Kill) -> None:
        training, monitor = self.training[fault.member], self.monitors[fault.member]
        self.fired.append(fault)
        if fault.target in ("monitor", "host"):
            self._unwatched.add(fault.member)
        if fault.target == "monitor":
            self.kill_monitor(training, "killed (monitor)")
        if fault.target == "host":
            monitor.end("killed (host)")
        if fault.target in ("training", "host"):
            training.end(f"killed ({fault.target})")

    def kill_monitor(self, training: Training, why: str) -> None:
        """A new one comes soon."""
        self.monitors[training.member].end(why)
        self.engine.at(0.05 + self.engine.rng.random(), partial(self._new_monitor, training))

    def _new_monitor(self, training: Training) -> None:
        if training.alive and not self.monitors[training.member].alive:
            self.monitors[training.member] = Monitor(self, training, 1)

    def _cut(self, fault: Cut) -> None:
        self.fired.append(fault)
        self._unwatched.add(fault.member)
        end = self.engine.now + fault.seconds
        for process in (self.training[fault.member], self.monitors[fault.member]):
            if fault.way != "in":
                process.cut_out_until = max(process.cut_out_until, end)
            if fault.way != "out":
                process.cut_in_until = max(process.cut_in_until, end)
        self.engine.note(f"host{fault.member}", f"not reachable ({fault.way}) for {fault.seconds} s")

    def _freeze(self, fault: Freeze) -> None:
        self.fired.append(fault)
        if fault.target != "training":
            self._unwatched.add(fault.member)
            self.monitors[fault.member].freeze(fault.seconds)
        if fault.target != "monitor":
            self.training[fault.member].freeze(fault.seconds)
        self.engine.note(f"host{fault.member}", f"{fault.target} stands still for {fault.seconds} s")

    def _lose_store(self, fault: StoreGone) -> None:
        self.fired.append(fault)
        self.engine.note("store", "is gone")
        self.store.lose()

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
        monitor = self.monitors[training.member]
        if monitor.alive:
            monitor.training_ended()

    # --- invariants -------------------------------------------------------------------------------------------

    def agree(self, what: str, iteration: int, value: Any) -> None:
        """I1: the same outcome and the same next roster for everybody."""
        first = self._agreed.setdefault((what, iteration), value)
        if first != value:
            raise Broken(f"I1: two values of {what}/{iteration}: {first} and {value}")

    def same_book(self, book: Book) -> None:
        """I1, I4: the same roster and the same frame on every member's book."""
        self.agree("roster", book.iteration, (book.roster, book.world_size, book.terminated))

    def declared(self, member: int, by: str) -> None:
        """``by`` found ``member`` silent. Only a member that was cut off, or has lost its monitor, may be."""
        monitor = self.monitors[member]
        if monitor.alive and member not in self._unwatched:
            raise Broken(f"{by} declares member {member} dead, whose monitor sends heartbeats")
        self._declared.add(member)

    def enter(self, training: Training) -> None:
        """I2, I4: checked as the function starts."""
        iteration, place = training.book.iteration, training.placed
        size, rank, active = place.world_size, place.active_rank, place.active_world_size
        self.engine.note(training.name, f"enters the function, iteration {iteration}, rank {rank} of {active}/{size}")
        for other in self.training:
            if other.alive and other.inside not in (None, iteration) and not self._just_woken(other):
                raise Broken(f"I2: {training.name} enters iteration {iteration}, {other.name} is in {other.inside}")
        self.agree("active world size", iteration, active)
        if rank is None or not 0 <= rank < active:
            raise Broken(f"I4: {training.name} has rank {rank} of {active}")
        taken = self._entered.setdefault(iteration, {}).setdefault(rank, training.member)
        if taken != training.member:
            raise Broken(f"I4: rank {rank} in iteration {iteration} on members {taken} and {training.member}")

    def _just_woken(self, training: Training) -> bool:
        """It stands still, or its monitor, which does not know yet, is about to end it."""
        return self.engine.now < training.frozen_until + JUST

    def committed(self, training: Training) -> None:
        """I2, the fence: what the function does inside ``atomic()`` belongs to the iteration that runs."""
        if training.inside is not None and training.inside < max(self._entered):
            raise Broken(
                f"I2: {training.name} commits in iteration {training.inside}, others are in {max(self._entered)}"
            )

    def returned(self, training: Training) -> None:
        """The function returned."""
        self._returned.setdefault(training.book.iteration, set()).add(training.member)

    def completed(self, training: Training) -> None:
        """I5: the call returns."""
        iteration, active = training.book.iteration, training.placed.active_world_size
        self.agree("completed", 0, iteration)
        done = self._returned.get(iteration, set())
        if len(done) != active:
            raise Broken(f"I5: {training.name} returns; in iteration {iteration} {sorted(done)} of {active} returned")

    def _check_results(self) -> None:
        """How each member ended follows from what happened to it, and no restart was needless."""
        excused = any(isinstance(f, StoreGone) or (isinstance(f, Act) and f.what == "limit") for f in self.fired)
        for training in self.training:
            if training.result != "returned" and not excused and not self._explained(training):
                raise Broken(f"I3: {training.name} ended with {training.result!r} though nothing happened to it")
        missing = any(training.result == "a founder is missing" for training in self.training)
        if self.overdue and not missing and not excused:
            raise Broken(f"I3: monitors of {sorted(self.overdue)} waited for barrier_timeout")
        self._check_gone()
        late = self.engine.now - self._last_end
        if (
            ("completed", 0) in self._agreed
            and late > 5.0
            and not any(isinstance(fault, Cut | Freeze) for fault in self.fired)
        ):
            raise Broken(f"I3: monitors stayed for {late:.1f} s after the last training process had ended")
        iterations = 1 + max((iteration for what, iteration in self._agreed if what == "outcome"), default=0)
        faults = sum(not (isinstance(fault, Act) and fault.what in EXTRAS) for fault in self.fired)
        if iterations > 1 + faults:
            raise Broken(f"{iterations} iterations with {faults} faults")

    def _check_gone(self) -> None:
        """The store's host must not wait for a lost member that nobody speaks for any more."""
        for training in self.training:
            kept = training.book.roster if training.result == "returned" else self._declared
            silent = [member for member in self._declared.difference(kept) if f"gone/{member}" not in self.store.data]
            if silent:
                raise Broken(f"I3: nobody said that members {silent} need the store no more")

    def _explained(self, training: Training) -> bool:
        for fault in self.fired:
            mine = getattr(fault, "member", None) == training.member
            if mine and (isinstance(fault, Kill | Cut | Freeze) or fault.what in LEAVES):  # type: ignore[attr-defined]
                return True
        if training.result == "a founder is missing":  # killed before anybody could see it
            return any(isinstance(fault, Kill) for fault in self.fired)
        if training.result == "aborted":
            return training.proposed.active_world_size == 0
        mate = mate_of(self.scenario.assignment, training.member)
        if training.result != "discarded" or mate is None:
            return False
        return not 0 <= mate < len(self.training) or self.training[mate].result != "returned"
