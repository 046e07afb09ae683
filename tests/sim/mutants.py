"""The protocol broken on purpose, one way each: the seeds must notice every one of them, or they prove nothing.

``python -m tests.sim.mutants`` prints how many seeds each mutant survives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from inprocess import coordinator, guardian, policy
from inprocess.protocol.book import Book
from inprocess.protocol.messages import Arrival, Decision, Kind, Outcome, dump, load_arrival
from inprocess.protocol.ops import Add, Claim, Verb
from inprocess.protocol.phases import Phase
from tests import sim
from tests.sim import engine, training
from tests.sim.engine import SimStore
from tests.sim.training import Step, Training

Patch = pytest.MonkeyPatch


def _nothing(*_: Any, **__: Any) -> Verb[None]:
    yield from ()


def interrupt_wakes_nobody(patch: Patch) -> None:
    """An interruption sets the outcome, but not the keys on which the start round waits."""
    patch.setattr(coordinator, "_wake", _nothing)


def count_before_entry(patch: Patch) -> None:
    """A member is counted before its entry is written."""

    def arrive(iteration: int, name: str, member: int, arrival: Arrival, roster: Sequence[int]) -> Verb[Arrival]:
        key, text = f"{iteration}/{name}/{member}", dump(arrival)
        count = yield Add(f"{iteration}/{name}#", 1)
        found = yield Claim(key, text)
        if found != text.encode():
            return load_arrival(found, key)
        if count == len(roster):
            yield from coordinator._decide(iteration, name, roster)
        return arrival

    patch.setattr(coordinator, "_arrive", arrive)


def _overwritten(patch: Patch, verdict: str) -> None:
    claim = SimStore.claim

    def overwrite(store: SimStore, op: Claim) -> bytes:
        if not op.key.endswith(verdict):
            return claim(store, op)
        store.write(op.key, op.value)
        return op.value.encode()

    patch.setitem(engine._ACTIONS, Claim, overwrite)


def last_outcome_wins(patch: Patch) -> None:
    """The outcome is a plain set instead of a compare-and-set."""
    _overwritten(patch, "/outcome")


def last_start_wins(patch: Patch) -> None:
    """The start round's verdict is a plain set."""
    _overwritten(patch, "/start")


def dead_do_not_interrupt(patch: Patch) -> None:
    """Whoever speaks for a dead member enters the rounds for it, but does not interrupt the iteration."""

    def speak(iteration: int, roster: Sequence[int], member: int, record: Any, by: str) -> Verb[None]:
        dead = Arrival(Kind.DEAD, by=by)
        if iteration > coordinator.JOINING:
            yield from coordinator._arrive(iteration, "start", member, dead, roster)
        yield from coordinator._arrive(iteration, "end", member, dead, roster)

    patch.setattr(coordinator, "speak_for_dead", speak)


def no_recount(patch: Patch) -> None:
    """Nobody decides a round whose last arriver died before it could."""
    patch.setattr(coordinator, "recount", _nothing)


def speak_once(patch: Patch) -> None:
    """The dead are spoken for in one iteration only, not until they are off the roster."""

    def stand_in(book: Book, member: int, record: Any, by: str) -> Verb[None]:
        yield from coordinator.speak_for_dead(book.iteration, book.roster, member, record, by)

    patch.setattr(guardian, "stand_in", stand_in)


def end_without_the_last(patch: Patch) -> None:
    """The end round is decided when one member is still missing."""
    arrive = coordinator._arrive

    def early(iteration: int, name: str, member: int, arrival: Arrival, roster: Sequence[int]) -> Verb[Arrival]:
        found = yield from arrive(iteration, name, member, arrival, roster)
        if name == "end" and iteration >= 0 and (yield Add(f"{iteration}/end#", 0)) >= len(roster) - 1 > 0:
            yield Claim(f"{iteration}/next", dump(Decision()))
        return found

    patch.setattr(coordinator, "_arrive", early)


def completed_is_ignored(patch: Patch) -> None:
    """Whoever speaks for a dead member waits for a next iteration also after ``completed``."""
    await_outcome = coordinator.await_outcome

    def ignored(iteration: int, recounting: Sequence[int] | None = None) -> Verb[Outcome]:
        outcome = yield from await_outcome(iteration, recounting)
        return outcome if recounting is None else dataclasses.replace(outcome, completed=False)

    patch.setattr(coordinator, "await_outcome", ignored)


def frame_moves_on_no(patch: Patch) -> None:
    """A new numbering becomes the frame although its iteration did not start."""
    start = Training._start

    def moved(self: Training) -> Step:
        self.book.started(self.proposed.rank, self.proposed.world_size)
        return (yield from start(self))

    patch.setitem(training._STEPS, Phase.START, moved)


def one_short(patch: Patch) -> None:
    """``completed`` is proposed when one active member has not finished."""
    finish = coordinator.finish
    patch.setattr(coordinator, "finish", lambda i, active, roster: finish(i, max(1, active - 1), roster))


def dead_counts_as_reserve(patch: Patch) -> None:
    """The death of an active member is taken for that of a reserve."""

    def aside(iteration: int, member: int) -> Verb[bool]:
        yield Add(f"{iteration}/end#", 0)
        return True

    patch.setattr(coordinator, "_stands_aside", aside)


def no_lease(patch: Patch) -> None:
    """A monitor that cannot reach the store leaves its training process alone."""
    patch.setattr(policy, "_lease", lambda seen, view: iter(()))


def impatient_ring(patch: Patch) -> None:
    """A neighbour is declared dead before its own lease has run out."""
    observe = guardian.Ring.observe

    def hasty(self: guardian.Ring, member: int, counter: int, now: float) -> bool:
        self.timeout = 2.0
        return observe(self, member, counter, now)

    patch.setattr(guardian.Ring, "observe", hasty)


def reserve_interrupts(patch: Patch) -> None:
    """The death of a reserve interrupts the others."""

    def never(iteration: int, member: int) -> Verb[bool]:
        yield Add(f"{iteration}/end#", 0)
        return False

    patch.setattr(coordinator, "_stands_aside", never)


def terminated_forgets(patch: Patch) -> None:
    """The terminated ranks of a decision are those of its own iteration only, not all since the frame began."""
    apply = Book.apply

    def forgetful(self: Book, decision: Any) -> None:
        before = self.terminated
        apply(self, decision)
        self.terminated = self.terminated - before

    patch.setattr(Book, "apply", forgetful)


MUTANTS: tuple[Callable[[Patch], None], ...] = (
    interrupt_wakes_nobody,
    count_before_entry,
    last_outcome_wins,
    last_start_wins,
    dead_do_not_interrupt,
    no_recount,
    speak_once,
    end_without_the_last,
    completed_is_ignored,
    frame_moves_on_no,
    one_short,
    dead_counts_as_reserve,
    no_lease,
    impatient_ring,
    reserve_interrupts,
    terminated_forgets,
)


def survives(mutant: Callable[[Patch], None], seeds: Sequence[int]) -> tuple[int, str]:
    """How many seeds the mutant survives, and what catches it (empty: nothing)."""
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        for count, seed in enumerate(seeds):
            try:
                sim.run(sim.random_scenario(seed))
            except sim.Failure as failure:
                return count, f"{type(failure.__cause__).__name__}: {failure.__cause__}"
    return len(seeds), ""


if __name__ == "__main__":
    for each in MUTANTS:
        number, why = survives(each, range(500))
        print(f"{each.__name__:24} {number:4}  {why[:100]}")
