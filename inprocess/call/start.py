"""The phases of an iteration before its function runs: to be let in, to get a rank, to start, to initialize."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from inprocess.attribution import Interruption, InterruptionRecord, ranges, standstill, summary
from inprocess.call.local_place import LocalPlace
from inprocess.call.part import IterationContext
from inprocess.call.participant import Participant
from inprocess.call.thread import Admission
from inprocess.call.user_code import UserCode
from inprocess.exception import Fenced, RestartAbort, RestartError, StoreLost, TooFewRanks
from inprocess.interrupt import forks
from inprocess.protocol import verbs
from inprocess.protocol.assignment import RankAssignmentCtx
from inprocess.protocol.keys import JOINING
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import Arrival, ArrivalKind, Decision
from inprocess.protocol.phases import Event
from inprocess.protocol.repeats import TRIES
from inprocess.protocol.rounds import assign_slots
from inprocess.state import State
from inprocess.stores.tcp import PrefixStore
from inprocess.system import clock
from inprocess.system.environment import Place
from inprocess.system.interpreter import sleep_with_progress
from inprocess.system.logs import get_logger
from inprocess.system.observers import emit
from inprocess.system.progress import Progress

log = get_logger("inprocess")

#: what torch's stores raise
DIST_ERROR: type[Exception] = getattr(dist, "DistError", RuntimeError)
#: an assignment that failed on a store that was shut down learns within this time (seconds) that the iteration was
#: interrupted
VERDICT = 5.0


class Starting:
    """From the last iteration's end, or the call's beginning, to the function."""

    def __init__(self, participant: Participant, user: UserCode) -> None:
        self._participant, self._user = participant, user
        #: the assignment of this iteration, until the start round accepts it
        self._proposed = participant.state
        self._local_place = LocalPlace()

    def join(self) -> Event:
        """Wait until this process is let in: with all founders, or with a restart of a job that runs."""
        participant = self._participant
        timeout = participant.options.barrier_timeout
        begin = clock.monotonic()
        entered: Membership = participant.take_round("entered", JOINING, timeout, "end")
        if not entered.was_founder:
            log.warning("%s: job already running; waiting for a free slot", participant.who)
        left = max(0.0, timeout - (clock.monotonic() - begin)) if entered.was_founder else None
        if entered.was_founder:
            let_in: Admission = participant.take_round("let in", JOINING, left, "end")
        else:
            let_in = participant.take("let in", JOINING, left, participant.name_missing("end"))
        participant.membership.become(let_in.membership)
        participant.job.drawn = participant.agents.thread.drawn or participant.job.drawn
        if let_in.decision is None:
            log.warning("%s: the job completed before this process joined", participant.who)
            return Event.COMPLETED
        participant.agents.connect(timeout)
        self._local_place.register(participant)
        if not entered.was_founder:
            participant.untold.join(participant.membership.iteration + 1)
        participant.explain(let_in.decision.records)
        self.next_iteration(let_in.decision)
        return Event.OK

    def assign(self) -> Event:
        """Compute this process's rank and world size in the iteration."""
        participant = self._participant
        participant.arrived = False
        address = participant.take(
            "rendezvous", participant.membership.iteration, participant.options.barrier_timeout, _no_rendezvous
        )
        if address == "-":
            participant.agents.thread.assigned.set()
            return self._not_started()
        participant.rendezvous = participant.agents.numeric(address)
        if len(participant.membership.known) > 1:
            participant.agents.await_lease(participant.membership.iteration, participant.options.barrier_timeout)
        ctx = RankAssignmentCtx(
            state=State(
                rank=participant.membership.rank,
                world_size=participant.membership.world_size,
                active_rank=participant.placed.active_rank,
                active_world_size=participant.placed.active_world_size,
                initial_rank=participant.job.launch.rank,
                initial_world_size=participant.job.launch.world_size,
                iteration=participant.job.before + participant.membership.iteration,
            ),
            store=_Lazy(lambda: PrefixStore("rank_assignment", participant.iteration_store())),
            terminated_ranks=set(participant.membership.terminated),
            joined=self._joined(),
        )
        try:
            self._proposed = forks.guarded(participant.hooks.assign, ctx).state.freeze()
        except (DIST_ERROR, StoreLost):
            # the iteration's store was shut down while the assignment talked over it?
            start = participant.agents.mailbox.take("start", participant.membership.iteration, VERDICT)
            if start is not None and not start.go:
                return self._not_started()
            raise
        finally:
            participant.agents.thread.assigned.set()
        return Event.OK

    def _joined(self) -> set[int]:
        """Over another store everybody is back in its slot, as after somebody has joined."""
        membership = self._participant.membership
        if self._participant.job.moved and membership.iteration == 0:
            return set(range(membership.world_size)).difference(membership.terminated)
        return set(membership.fresh)

    def start(self) -> Event:
        """The start round: all say which rank they took."""
        participant = self._participant
        proposed = self._proposed
        if participant.membership.last.pause and self._paused(participant.membership.last.pause / 1e3):
            return self._not_started()
        participant.arrived = True
        numbers = (proposed.rank, proposed.world_size, proposed.active_world_size, proposed.active_rank)
        arrival = Arrival(ArrivalKind.RANK, *numbers)
        participant.do(verbs.start_round(participant.membership, arrival))
        start = participant.take_round(
            "start", participant.membership.iteration, participant.options.barrier_timeout, "start"
        )
        if not start.go:
            return self._not_started()
        verbs.refuse_other_size(participant.membership.iteration, start, arrival)
        participant.membership.started(proposed.rank, proposed.world_size)
        participant.state = participant.placed = proposed
        active = proposed.active_world_size
        participant.agents.board.place(proposed.rank, participant.is_reserve, active, proposed.world_size - active)
        self._enter_iteration()
        return Event.OK

    def _paused(self, seconds: float) -> bool:
        """Wait, after the same error again and again, for anything to happen: a death, a process that joins, Ctrl-C.
        True: this iteration does not start."""
        participant = self._participant
        count, limit = participant.membership.streak.count, participant.options.max_repeats
        reached = limit is not None and count >= limit
        log.log(
            logging.WARNING if self._proposed.active_rank == 0 else logging.DEBUG,
            "the same error %d times in a row without progress: the restart waits %g s%s",
            count,
            seconds,
            f" (max_repeats={limit} is reached; the job continues, since it made progress before)" if reached else "",
        )
        begin = clock.monotonic()
        start = participant.agents.mailbox.take("start", participant.membership.iteration, seconds)
        participant.fault.pause(clock.monotonic() - begin)
        return start is not None and not start.go

    def _not_started(self) -> Event:
        self._participant.note_interruption()
        return Event.NO_START

    def _enter_iteration(self) -> None:
        participant = self._participant
        state = participant.state
        participant.controls.place(state)
        if state.active_rank is not None:
            place = Place(state.active_rank, state.active_world_size, *self._local_place.find(participant))
            participant.agents.environment.show(place, *participant.rendezvous)
        participant.parts.iteration_begins(IterationContext(state, participant.rendezvous))

    def initialize(self) -> Event:
        """The hook of that name."""
        participant = self._participant
        event = Event.OK if participant.hooks.initialize is None else self._user.in_window(self._initialize_with_enough)
        if event is Event.OK and not participant.placed.active_world_size:
            raise RestartError(
                f"rank_assignment leaves none of {participant.placed.world_size} ranks active. "
                "initialize=RetryController(wait_for_replacement=...) would wait for processes that join."
            )
        return event

    def _initialize_with_enough(self) -> None:
        try:
            self._user.hook("initialize")
            return
        except TooFewRanks as error:
            too_few = error
        except RestartAbort as error:
            if error.__cause__ is None and self._participant.failures.error is not None:
                error.__cause__ = self._participant.failures.error
            raise
        # not while it is handled: it would be what this rank leaves with, also where it is interrupted
        self._await_replacements(too_few.patience)
        raise too_few

    def _await_replacements(self, patience: float) -> None:
        participant = self._participant
        membership = participant.membership
        slots = max(participant.job.world_size, *[slot + 1 for slot in membership.taken])
        free = ranges(set(range(slots)).difference(membership.taken))
        told = participant.untold.tell(participant.job.before)
        log.log(
            participant.level(),
            "%s%d ranks are too few: waiting %.0f s for processes that replace initial ranks %s",
            f"{told}; " if told else "",
            len(membership.roster),
            patience,
            free,
        )
        emit("too_few", patience=patience)
        waiting = participant.do(verbs.want(membership.iteration, membership.roster))
        if assigned := assign_slots(membership.taken, waiting):
            slot = min(assigned.values())
            record = InterruptionRecord(slot, Interruption.JOINED, initial_rank=slot, message="it was waited for")
            participant.do(verbs.interrupt(membership.iteration, record))
        progress = Progress()
        while (left := patience - progress.seconds) > 0:
            sleep_with_progress(max(0.0, min(left, progress.left)))
            if progress.due():
                log.log(
                    participant.level(),
                    "waiting for processes that replace initial ranks %s, for %.0f of %.0f s",
                    *(free, progress.seconds, patience),
                )

    def check(self) -> Event:
        """The health check before the function runs."""
        if self._participant.hooks.health_check is None:
            return Event.OK
        return self._user.in_window(lambda: self._user.hook("health_check"))

    def next_iteration(self, decision: Decision) -> None:
        """Go on as the end round has decided."""
        participant = self._participant
        participant.failures.settle(participant.who, decision)
        if decision.abort:  # the roster stays as it is, on every rank, for another call
            participant.said_so = True
            participant.parts.everybody_leaves()
            emit("abort", why=decision.abort, records=[record.to_dict() for record in decision.records])
            raise RestartAbort(decision.abort) from participant.failures.cause(decision)
        participant.failures.begin()
        participant.membership.apply(decision)
        if not participant.membership.included:
            raise Fenced(f"{participant.who} was declared dead by the others and must not run again")
        self._tell_for_the_first(decision)
        why = self._why(decision)
        participant.untold.note(participant.membership.iteration, why)
        self._emit(decision, why)
        if decision.hangs > 1:
            log.log(
                participant.level(),
                "the same hang again, %d times in a row before the first ping(): the job ends after %d of them",
                decision.hangs,
                TRIES,
            )
        participant.has_returned = False
        participant.controls.begin_iteration()
        participant.store = participant.value = None
        participant.parts.next_iteration()
        participant.agents.board.begin(participant.membership.iteration)

    def _tell_for_the_first(self, decision: Decision) -> None:
        """Who joins as the first rank knows nothing of restarts before, whose function was not called: the first of the
        others tells them."""
        participant = self._participant
        membership, joined = participant.membership, dict(decision.joined)
        if not joined or min(membership.roster, key=membership.slot_of) not in joined:
            return
        if told := participant.untold.tell(participant.job.before):
            first = min((member for member in membership.roster if member not in joined), key=membership.slot_of)
            level = logging.WARNING if membership.member == first else logging.DEBUG
            log.log(level, "%s; the next interruption came before the function was called", told)

    def _emit(self, decision: Decision, why: str) -> None:
        """Of each iteration but the first."""
        participant = self._participant
        if participant.job.before + participant.membership.iteration <= 0:
            return
        emit(
            "restart",
            restart=participant.job.before + participant.membership.iteration,
            why=why,
            records=[record.to_dict() for record in decision.records],
            record_count=decision.record_count,
            stuck=[record.to_dict() for record in decision.stuck],
            stuck_count=decision.stuck_count,
            waiting=decision.waiting,
            removed=decision.removed,
            joined=[slot for _, slot in decision.joined],
            roster=ranges(map(participant.membership.slot_of, participant.membership.roster)),
            world_size=len(participant.membership.roster),
            repeats=decision.repeats,
            pause=decision.pause / 1e3,
            hangs=decision.hangs,
            pings=participant.counts.pings,
            kept=participant.counts.kept,
        )

    def _why(self, decision: Decision) -> str:
        if self._participant.job.moved and self._participant.membership.iteration == 0:
            return "the host of the store was lost"
        if decision.stuck:
            return standstill(decision.records, decision.stuck, decision.stuck_count, decision.waiting)
        return summary(decision.records, decision.record_count)


class _Lazy:
    """Stands for a store that is connected on first use: most assignments never use theirs."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make(), name)


def _no_rendezvous(timeout: float) -> str:
    return (
        f"no store server was offered for this iteration within barrier_timeout={timeout:g}s: its host does not answer"
    )
