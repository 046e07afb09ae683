"""The loop of one call of a wrapped function: one method per phase, walked by the table in ``protocol.phases``.

Each method does its phase and answers with an event. ``_step`` is the one place that turns exceptions into events.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

import torch.distributed as dist

from inprocess import clock, coordinator, fence, forks, torch_state
from inprocess.agents import Agents, Lost
from inprocess.attribution import RETURNED, Interruption, InterruptionRecord, ranges, standstill, summary
from inprocess.call_wrapper import CallWrapper, set_current
from inprocess.coordinator import JOINING
from inprocess.errors import in_words, where
from inprocess.exception import (
    BadMessage,
    Fenced,
    HealthCheckError,
    NobodyLeft,
    RankDiscarded,
    RankShouldRestart,
    RestartAbort,
    RestartError,
    StateLost,
    StoreLost,
    TimeoutError,
    TooFewRanks,
)
from inprocess.failures import Failures
from inprocess.gloo import shutdown_gloo_connections
from inprocess.groups import unfinished
from inprocess.held import held
from inprocess.hooks import Injector
from inprocess.interpreter import interpreter, pass_time
from inprocess.interrupt import Interrupted, Raised, Returned, let_go
from inprocess.job import Job
from inprocess.leftovers import leftovers
from inprocess.logs import get_logger
from inprocess.monitor_thread import LetIn
from inprocess.nccl_bootstrap import bootstrap
from inprocess.nccl_shutdown import shutdowns
from inprocess.options import Options
from inprocess.protocol.book import Book
from inprocess.protocol.messages import Arrival, Decision, Fate, Kind, Outcome, Spot, Verdict
from inprocess.protocol.ops import Verb
from inprocess.protocol.phases import TRANSITIONS, Event, Phase, next_phase
from inprocess.protocol.rounds import seat
from inprocess.rank_assignment import RankAssignmentCtx
from inprocess.state import FrozenState, Mode, State
from inprocess.store import PrefixStore, shut_connections
from inprocess.story import Story
from inprocess.watch import announce_nobody_left, announce_over

log = get_logger("inprocess")

T = TypeVar("T")
#: what torch's stores raise
DIST_ERROR: type[Exception] = getattr(dist, "DistError", RuntimeError)
Hook = Callable[[FrozenState], FrozenState] | None

#: how many past phases and events an error shows
HISTORY = 16
#: how long a rank that gives up tries to find out who is missing (seconds)
NAMING = 1.0
#: an assignment that failed on a store that was shut down learns within this time (seconds) that the iteration was
#: interrupted
VERDICT = 5.0
#: so long inside the function is progress (seconds)
LONG_INSIDE = 60.0


@dataclasses.dataclass(frozen=True)
class Hooks:
    """The user's callables, adapted to one form."""

    assign: Callable[[RankAssignmentCtx], RankAssignmentCtx]
    initialize: Hook
    abort: Hook
    finalize: Hook
    health_check: Hook
    completion: Hook
    terminate: Hook


class Loop:
    """One call. Use once: ``Loop(...).run()``."""

    def __init__(
        self,
        options: Options,
        hooks: Hooks,
        injector: Injector,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        job: Job,
        since: Lost | None = None,
    ) -> None:
        self._options, self._hooks = options, hooks
        self._job = job
        self._book = self._job.book()
        self._state = self._job.state()
        self._agents = Agents(options, self._job, self._book, self._abort, self._release, since)
        self._call = CallWrapper(self._agents.board, self._iteration_store)
        bound_args, bound_kwargs = injector.bind(tuple(args), dict(kwargs), self._call)
        self._fn: Callable[[], Any] = lambda: fn(*bound_args, **bound_kwargs)
        self._steps: dict[Phase, Callable[[], Event]] = {
            Phase.JOIN: self._join,
            Phase.ASSIGN: self._assign,
            Phase.START: self._start,
            Phase.INITIALIZE: self._initialize,
            Phase.CHECK: self._check,
            Phase.RUN: self._run,
            Phase.FINISH: self._finish,
            Phase.COMPLETE: self._complete,
            Phase.ABORT: self._wait_for_abort,
            Phase.FINALIZE: self._finalize,
            Phase.RECHECK: self._recheck,
            Phase.END: self._end,
            Phase.MOVE: self._move,
            Phase.LEAVE: self._leave,
        }
        self._phase = Phase.JOIN
        self._failures = Failures(options.max_repeats) if since is None else since.failures
        self._history: deque[str] = deque(maxlen=HISTORY)
        self._value: Any = None
        #: the exception with which this rank leaves the job
        self._leaving: BaseException | None = None
        #: the assignment of this iteration, until the start round accepts it
        self._proposed = self._state
        #: the last assignment that the start round accepted; hooks may change ``_state``, not this
        self._placed = self._state
        self._rendezvous = ("", 0)
        self._store: Any = None
        #: torch's of the main thread, before it last ran the user's code
        self._torch_state: torch_state.TorchState | None = None
        #: whether this rank has arrived in the start round of this iteration
        self._arrived = False
        #: whether the others know that this rank is leaving; otherwise its monitor tells them
        self._said_so = False
        #: whether it leaves without an interruption
        self._quietly = False
        #: whether this rank's function has returned in this iteration
        self._has_returned = False
        self._interrupted_at = 0.0 if since is None else since.at
        self._size_before = 0 if since is None else since.active_world_size
        #: restarts that are still to be logged; over another store iteration 0 is one
        self._story = Story(0 if since is None else -1)
        #: the loss of the store
        self._loss: StoreLost | None = None
        #: the call goes on in another loop, over another store
        self.lost: Lost | None = None

    def run(self) -> Any:
        """Walk the table. Returns the function's value (None on a reserve rank), or raises."""
        try:
            forks.tell(self._detach)
            interpreter.begin()
            leftovers.begin(anew=not self._job.moved)
            shutdowns.begin()
            self._agents.open()
            while self._phase is not Phase.OUT:
                self._agents.board.enter(self._phase)
                event = self._step()
                self._history.append(f"iteration {self._book.iteration}: {self._phase.value}: {event.value}")
                self._phase = next_phase(self._phase, event)
        except BaseException as error:  # Ctrl-C between two phases; a port that is taken
            self._leaving = self._leaving or error
        finally:
            self._close()
        if self._leaving is not None:
            self._raise_leaving()
        value, self._value = self._value, None  # this object lives until garbage is collected
        return value

    def _raise_leaving(self) -> None:
        error, self._leaving = self._leaving, None
        assert error is not None
        if isinstance(error, RestartError):
            error.history = tuple(self._history)
        try:
            raise error
        finally:
            del error  # no cycle between this frame and the traceback

    def _detach(self) -> None:
        """In a process that the user's code has forked."""
        self._agents.detach()
        self._call._detach()

    def _close(self) -> None:
        set_current(None)
        forks.tell(None)
        interpreter.end()  # first: closing may raise
        self._call._gate = self._store = None
        self._failures.drop()
        self._fn = _nothing  # the user's arguments must not live as long as this object
        if isinstance(self._leaving, NobodyLeft):
            announce_nobody_left(self._leaving)
        how = "completed" if self._leaving is None else "left" if self._said_so else "failed"
        how = how if self.lost is None else "moved"
        # a rank that goes quietly leaves its MonitorThread waiting for something that may come late or never
        why = "" if self._leaving is None else in_words(self._leaving)
        self._agents.close(how, cut=how in ("failed", "moved") or self._quietly, why=why)
        held.end()
        bootstrap.end()
        shutdowns.end()
        if self.lost is None:
            self._job.leave(self._book)

    def _cut_off(self) -> bool:
        return isinstance(self._leaving, StoreLost | Fenced)

    def _step(self) -> Event:
        try:
            return self._steps[self._phase]()
        except (StoreLost, Fenced) as error:
            if self._phase in (Phase.COMPLETE, Phase.FINALIZE, Phase.RECHECK, Phase.LEAVE):
                return self._quit(error)
            if self._may_move(error):
                self._loss = self._loss or error
                self._note_interruption()
                return Event.LOST
            self._leaving = self._leaving or error
            return Event.CUT_OFF
        except BaseException as error:
            return self._quit(error)

    def _may_move(self, error: StoreLost | Fenced) -> TypeGuard[StoreLost]:
        """Whether there is somebody to ask where the job goes on."""
        if not isinstance(error, StoreLost) or isinstance(error, BadMessage) or self._leaving is not None:
            return False
        return self._agents.contacts.some and (self._phase, Event.LOST) in TRANSITIONS

    def _quit(self, error: BaseException) -> Event:
        """This rank leaves the job with ``error``; the others are told."""
        if self._leaving is not None:
            words = (in_words(self._leaving), self._phase.value, in_words(error))
            log.warning("while leaving with %s, the phase %r raised %s", *words)
            return Event.QUIT
        self._leaving = error
        self._agents.thread.leave_after_outcome()
        self._quietly = self._leaves_quietly(error)
        if self._quietly or self._phase in (Phase.JOIN, Phase.END, Phase.COMPLETE, Phase.MOVE, Phase.LEAVE):
            return Event.QUIT
        abort = ""  # the others go on
        if self._phase is Phase.INITIALIZE:
            abort = f"{_who(self._state)}: initialize raised {in_words(error)}"
        elif isinstance(error, StateLost):
            abort = f"{_who(self._state)}: {in_words(error)}"
        try:
            self._interrupt(self._record(Interruption.BASE_EXCEPTION, error, in_words(error)), abort)
        except (StoreLost, Fenced) as lost:
            log.warning("the others could not be told that this rank leaves: %s", lost)
            return Event.CUT_OFF if (self._phase, Event.CUT_OFF) in TRANSITIONS else Event.QUIT
        return Event.QUIT

    def _leaves_quietly(self, error: BaseException) -> bool:
        """A discarded rank is not missed, and neither is a reserve."""
        return isinstance(error, RankDiscarded) or (self._phase is Phase.RUN and self._is_reserve())

    # --- an undisturbed call ------------------------------------------------------------------------------------

    def _join(self) -> Event:
        timeout = self._options.barrier_timeout
        begin = clock.monotonic()
        entered: Book = self._take("entered", JOINING, timeout, self._name_missing("end"))
        if not entered.was_founder:
            log.warning("%s: the job runs already; this process waits for a place in it", _who(self._state))
        left = max(0.0, timeout - (clock.monotonic() - begin)) if entered.was_founder else None
        let_in: LetIn = self._take("let in", JOINING, left, self._name_missing("end"))
        self._book.become(let_in.book)
        if let_in.decision is None:
            log.warning("%s: the job completed before there was a place for this process", _who(self._state))
            return Event.COMPLETED
        self._agents.connect(timeout)
        if not entered.was_founder:
            self._story.join(self._book.iteration + 1)
        self._next_iteration(let_in.decision)
        return Event.OK

    def _assign(self) -> Event:
        self._arrived = False
        address = self._take("rendezvous", self._book.iteration, self._options.barrier_timeout, _no_rendezvous)
        if address == "-":
            self._agents.thread.assigned.set()
            return self._not_started()
        self._rendezvous = self._agents.numeric(address)
        if len(self._book.known) > 1:
            self._agents.await_lease(self._book.iteration, self._options.barrier_timeout)
        ctx = RankAssignmentCtx(
            state=State(
                rank=self._book.rank,
                world_size=self._book.world_size,
                active_rank=self._placed.active_rank,
                active_world_size=self._placed.active_world_size,
                initial_rank=self._job.launch.rank,
                initial_world_size=self._job.launch.world_size,
                iteration=self._job.before + self._book.iteration,
            ),
            store=_Lazy(lambda: PrefixStore("rank_assignment", self._iteration_store())),
            terminated_ranks=set(self._book.terminated),
            joined=self._joined(),
        )
        try:
            self._proposed = forks.guarded(self._hooks.assign, ctx).state.freeze()
        except (DIST_ERROR, StoreLost):
            # the iteration's store was shut down while the assignment talked over it?
            if (start := self._agents.mailbox.take("start", self._book.iteration, VERDICT)) and not start.go:
                return self._not_started()
            raise
        finally:
            self._agents.thread.assigned.set()
        return Event.OK

    def _start(self) -> Event:
        proposed = self._proposed
        if self._book.last.pause and self._paused(self._book.last.pause / 1e3):
            return self._not_started()
        self._arrived = True
        place = (proposed.rank, proposed.world_size, proposed.active_world_size, proposed.active_rank)
        arrival = Arrival(Kind.RANK, *place)
        self._do(coordinator.start_round(self._book, arrival))
        start = self._take("start", self._book.iteration, self._options.barrier_timeout, self._name_missing("start"))
        if not start.go:
            return self._not_started()
        coordinator.refuse_other_size(self._book.iteration, start, arrival)
        self._book.started(proposed.rank, proposed.world_size)
        self._state = self._placed = proposed
        self._agents.board.place(proposed.rank, self._is_reserve())
        self._enter_iteration()
        return Event.OK

    def _paused(self, seconds: float) -> bool:
        """Wait, after the same error again and again, for anything to happen: a death, a process that joins, Ctrl-C.
        True: this iteration does not start."""
        count, limit = self._book.row.count, self._options.max_repeats
        reached = limit is not None and count >= limit
        log.log(
            logging.WARNING if self._proposed.active_rank == 0 else logging.DEBUG,
            "the same error %d times in a row without progress: the restart waits %g s%s",
            count,
            seconds,
            f" (max_repeats={limit} is reached; the job continues, since it made progress before)" if reached else "",
        )
        begin = clock.monotonic()
        start = self._agents.mailbox.take("start", self._book.iteration, seconds)
        if self._interrupted_at:  # the pause is no part of how long the restart took
            self._interrupted_at += clock.monotonic() - begin
        return start is not None and not start.go

    def _not_started(self) -> Event:
        self._note_interruption()
        return Event.NO_START

    def _enter_iteration(self) -> None:
        state = self._state
        self._call._begin(state)
        bootstrap.begin()
        leftovers.report(state)
        if self._is_reserve():
            return
        assert state.active_rank is not None
        self._agents.environment.show(state.active_rank, state.active_world_size, *self._rendezvous)

    def _initialize(self) -> Event:
        event = self._in_window(self._initialize_with_enough)
        if event is Event.OK and not self._placed.active_world_size:
            raise RestartError(
                f"rank_assignment leaves none of {self._placed.world_size} ranks active. "
                "initialize=RetryController(wait_for_replacement=...) would wait for processes that join."
            )
        return event

    def _initialize_with_enough(self) -> None:
        try:
            self._hook("initialize")
            return
        except TooFewRanks as error:
            too_few = error
        except RestartAbort as error:
            if error.__cause__ is None and self._failures.error is not None:
                error.__cause__ = self._failures.error
            raise
        # not while it is handled: it would be what this rank leaves with, also where it is interrupted
        self._await_replacements(too_few.patience)
        raise too_few

    def _await_replacements(self, patience: float) -> None:
        book = self._book
        free = ranges(
            set(range(max(self._job.world_size, *[place + 1 for place in book.taken]))).difference(book.taken)
        )
        told = self._story.tell(self._job.before)
        log.log(
            self._level(),
            "%s%d ranks are too few: waiting %.0f s for processes that replace initial ranks %s",
            f"{told}; " if told else "",
            len(book.roster),
            patience,
            free,
        )
        waiting = self._do(coordinator.want(book.iteration, book.roster))
        if seats := seat(book.taken, waiting):
            place = min(seats.values())
            record = InterruptionRecord(place, Interruption.JOINED, initial_rank=place, message="it was waited for")
            self._do(coordinator.interrupt(book.iteration, record))
        pass_time(patience)

    def _check(self) -> Event:
        return self._in_window(lambda: self._hook("health_check"))

    def _run(self) -> Event:
        interpreter.relax()
        self._failures.drop()
        self._log_restart()
        if self._is_reserve():
            return self._await_outcome(None)
        leftovers.enter()
        set_current(self._call)
        begin = clock.monotonic()
        try:
            return self._in_window(self._fn, keep=True)
        finally:
            self._call._progressed = self._call._progressed or clock.monotonic() - begin >= LONG_INSIDE

    def _finish(self) -> Event:
        if self._is_reserve():
            return self._await_outcome(None)
        self._has_returned = True
        self._do(coordinator.finish(self._book.iteration, self._placed.active_world_size, self._book.roster))
        return self._await_outcome(self._options.completion_timeout)

    def _await_outcome(self, timeout: float | None) -> Event:
        outcome = self._take("outcome", self._book.iteration, timeout, self._completion_overdue)
        if not outcome.completed:
            self._note_interruption()
            return Event.INTERRUPTED
        self._job.removed(outcome.removed)
        return Event.COMPLETED if self._phase is Phase.FINISH else Event.OK

    def _complete(self) -> Event:
        # before anybody can see that it has returned: should the store be lost now, the others learn it there
        if self._loss is None and not self._may_return():
            raise Fenced(f"{_who(self._state)}: the store was lost, and the others may have gone on without this rank")
        self._hook("completion")
        return Event.OK

    def _may_return(self) -> bool:
        try:
            return self._agents.may_return(self._book.iteration)
        except StoreLost:
            return False

    def _leave(self) -> Event:
        if self._leaving is not None:
            self._hook("terminate")
        return Event.OK

    # --- a restart ----------------------------------------------------------------------------------------------

    def _wait_for_abort(self) -> Event:
        """Wait until the MonitorThread has run the ladder; then sweep up what the function made while it ran."""
        if self._loss is None and not self._cut_off() and not self._quietly:
            self._await_aborted()
        if self._loss is not None:
            self._agents.thread.lose(self._options.barrier_timeout)
        if self._hooks.abort is not None and unfinished():
            self._abort(self._book.iteration)
        self._agents.board.answer(self._book.iteration)
        if self._loss is not None:
            return Event.LOST
        return Event.CUT_OFF if self._cut_off() else Event.OK

    def _await_aborted(self) -> None:
        try:
            outcome: Outcome = self._take("outcome", self._book.iteration, self._options.barrier_timeout, _no_outcome)
            if not outcome.completed:
                self._take("aborted", self._book.iteration, self._options.barrier_timeout, _no_abort)
        except StoreLost as error:
            if not self._may_move(error):
                raise
            self._loss = error

    def _finalize(self) -> Event:
        try:
            self._hook("finalize")
        except BaseException as error:
            log.warning("%s leaves the job: its finalize hook raised %s", _who(self._state), in_words(error))
            raise
        return Event.QUIT if self._leaving is not None else Event.OK

    def _recheck(self) -> Event:
        try:
            self._hook("health_check")
        except Exception as error:
            raise HealthCheckError(f"this rank is not fit to go on: {in_words(error)}") from error
        return Event.OK

    def _end(self) -> Event:
        self._forget_exception()
        self._agents.environment.unhook()
        self._agents.board.answer(self._book.iteration)
        here = (self._book.rank, self._book.world_size)
        if self._leaving is not None:
            if not self._arrived:
                kind = Kind.DISCARDED if isinstance(self._leaving, RankDiscarded) else Kind.LEFT
                self._do(coordinator.start_round(self._book, Arrival(kind)))
            self._do(coordinator.end_round(self._book, Arrival(Kind.LEFT, *here, place=self._book.place)))
            self._said_so = True
            return Event.QUIT
        if self._loss is not None:
            return Event.LOST
        self._value = None
        self._collect()
        arrival = coordinator.alive(
            self._book,
            repeats=self._failures.repeats,
            limit=self._options.max_repeats,
            progressed=self._call._progressed,
            spot=self._spot(),
        )
        self._do(coordinator.end_round(self._book, arrival))
        following = self._book.iteration + 1
        self._next_iteration(self._take("next", following, self._options.barrier_timeout, self._name_missing("end")))
        return Event.OK

    def _spot(self) -> Spot | None:
        """Where this rank was when nobody made progress."""
        spot = self._agents.thread.spot(self._book.iteration)
        return Spot(RETURNED) if spot is not None and self._has_returned else spot

    def _next_iteration(self, decision: Decision) -> None:
        self._failures.settle(_who(self._state), decision)
        if decision.abort:  # the roster stays as it is, on every rank, for another call
            self._said_so = True
            announce_over()
            raise RestartAbort(decision.abort) from self._failures.cause(decision)
        self._failures.begin()
        self._book.apply(decision)
        if not self._book.included:
            raise Fenced(f"{_who(self._state)} was declared dead by the others and must not run again")
        self._story.note(self._book.iteration, self._why(decision))
        self._has_returned = False
        self._call._count_anew()
        self._store = self._value = None
        held.begin()
        self._agents.board.begin(self._book.iteration)

    # --- the store is lost --------------------------------------------------------------------------------------

    def _move(self) -> Event:
        """Ask whether the job goes on over another store. This rank has left the function."""
        assert self._loss is not None
        log.warning("%s: %s; asking the standbys where the job goes on", _who(self._state), self._loss)
        self._forget_exception()
        answer = self._agents.vote()
        if answer is None:
            self._leaving = self._loss
            return Event.CUT_OFF
        verdict, host = answer
        if verdict.fate is Fate.COMPLETED and verdict.iteration == self._book.iteration and self._has_done_all():
            return Event.COMPLETED
        if verdict.fate is Fate.GO and self._agents.kept is not None:
            self._value = None
            self._collect()
            self.lost = Lost(self._agents.kept, self._interrupted_at, self._size_before, self._failures)
            self._job.move(self._book, verdict, host, self._call._progressed)
            return Event.OK
        self._leaving = self._not_here(verdict)
        return Event.CUT_OFF

    def _has_done_all(self) -> bool:
        """Its function has returned, or it has none to run in this iteration."""
        return self._has_returned or (self._arrived and self._is_reserve())

    def _not_here(self, verdict: Verdict) -> RestartError:
        if verdict.fate is Fate.REFUSED:
            return StoreLost(f"{self._loss}. The job does not go on over another store: {verdict.reason}")
        return Fenced(f"{_who(self._state)} was given up by the others, and must not run again")

    def _joined(self) -> set[int]:
        """Over another store everybody is back in its place, as after somebody has joined."""
        book = self._book
        if self._job.moved and book.iteration == 0:
            return set(range(book.world_size)).difference(book.terminated)
        return set(book.fresh)

    # --- running the user's code --------------------------------------------------------------------------------

    def _in_window(self, fn: Callable[[], Any], keep: bool = False) -> Event:
        """Run user code that a restart may interrupt."""
        gate = self._agents.thread.enter()
        if gate is None:
            self._note_interruption()
            return Event.INTERRUPTED
        if fence.due(self._agents.board) <= 0:
            fence.stop()
        self._call._gate, gate.who = gate, _who(self._state)
        self._torch_state = torch_state.capture()
        outcome = gate.run(fn)
        del gate, fn  # this frame lives as long as a traceback of the function that somebody keeps
        if not isinstance(outcome, Returned):
            self._restore_torch_state()
        try:
            return self._settle(outcome, keep)
        finally:
            del outcome

    def _settle(self, outcome: Returned | Raised | Interrupted, keep: bool) -> Event:
        if isinstance(outcome, Returned):
            self._value = outcome.value if keep else self._value
            return Event.OK
        if isinstance(outcome, Interrupted):
            self._note_interruption()
            self._agents.mailbox.take("outcome", self._book.iteration)  # raises where the store is lost
            return Event.INTERRUPTED
        return self._raised(outcome.exception)

    def _raised(self, error: BaseException) -> Event:
        if not isinstance(error, Exception | RankShouldRestart):
            raise error
        self._note_interruption()
        counts = self._ask_for_restart(error) if isinstance(error, RankShouldRestart) else self._fail(error)
        if counts:
            return Event.INTERRUPTED
        self._forget_exception()
        return Event.OK  # a reserve's hook failed after the others had completed

    def _fail(self, error: Exception) -> bool:
        self._state = dataclasses.replace(self._state, fn_exception=error)  # before the abort, which may look at it
        record = self._failures.note(error, self._book, self._call._pings)
        try:
            return self._interrupt(record)
        finally:  # once the others know; they and this rank's abort do not wait for the log
            self._failures.tell(_who(self._state), record)

    def _ask_for_restart(self, request: RankShouldRestart) -> bool:
        """The function, or a hook before it, raised it by itself."""
        words = in_words(request).removeprefix(RankShouldRestart.__name__).removeprefix(": ")
        record = self._record(Interruption.REQUESTED, request, words)
        let_go(request, sys.exc_info()[1])
        return self._interrupt(record)

    def _record(self, how: Interruption, error: BaseException, words: str) -> InterruptionRecord:
        place = where(error) or where(error.__cause__ or error)
        return InterruptionRecord(self._book.rank, how, self._book.place, words, where=place)

    def _hook(self, name: str) -> None:
        hook: Hook = getattr(self._hooks, name)
        if hook is not None:
            self._state = forks.guarded(hook, self._state)

    def _abort(self, iteration: int) -> None:
        """End waits on the iteration's own store, then the abort hook; in the MonitorThread.

        And once more in the main thread, for what was made meanwhile. A function that must not run on does not even
        unwind.
        """
        fence.watch(self._agents.board)
        shut_connections(*self._rendezvous)
        if self._hooks.abort is None:
            return
        try:
            forks.guarded(self._hooks.abort, self._state)
        except BaseException:
            log.exception(
                "%s: the abort hook failed in iteration %d; the restart goes on", _who(self._state), iteration
            )

    def _release(self) -> None:
        """End waits on the iteration's own store, and what began after the abort; in the MonitorThread."""
        shut_connections(*self._rendezvous)
        if self._hooks.abort is not None:
            shutdown_gloo_connections(self._placed.world_size)
            bootstrap.cut()

    def _interrupt(self, record: InterruptionRecord, abort: str = "") -> bool:
        """Tell the others; False: everybody had finished, so it changes nothing."""
        counts = self._do(coordinator.interrupt(self._book.iteration, record, abort))
        if not counts:
            log.warning("%s failed after everybody had finished, which changes nothing: %s", _who(self._state), record)
        return counts

    def _forget_exception(self) -> None:
        """A kept traceback would keep the function's frames, and with them tensors and process groups, alive."""
        for error in (self._state.fn_exception, self._failures.error):
            if error is not None:
                let_go(error, sys.exc_info()[1])
        if self._state.fn_exception is not None:
            self._state = dataclasses.replace(self._state, fn_exception=None)

    def _collect(self) -> None:
        """Free what is in reference cycles, as far as it matters."""
        held.collect()
        leftovers.collect()
        self._restore_torch_state()  # again: something in a cycle may have changed it on its way out

    def _restore_torch_state(self) -> None:
        if self._torch_state is not None:
            self._torch_state.restore()

    # --- small things -------------------------------------------------------------------------------------------

    def _is_reserve(self) -> bool:
        return self._placed.mode is Mode.INACTIVE

    def _do(self, verb: Verb[T]) -> T:
        return self._agents.do(verb)

    def _take(self, name: str, iteration: int, timeout: float | None, overdue: Callable[[float], str]) -> Any:
        letter = self._agents.mailbox.take(name, iteration, timeout)
        if letter is None:
            assert timeout is not None
            raise TimeoutError(overdue(timeout))
        return letter

    def _name_missing(self, name: str) -> Callable[[float], str]:
        def overdue(_: float) -> str:
            timeout = self._options.barrier_timeout
            try:
                self._agents.connect(NAMING)
                absent = self._do(coordinator.missing(self._book.iteration, name, self._book.roster))
            except (StoreLost, TimeoutError) as error:
                return f"nobody arrived within barrier_timeout={timeout:g}s: {error}"
            book = self._book
            who = f"initial rank{'s' if len(absent) > 1 else ''} {ranges(map(book.place_of, absent))}"
            when = self._phase.value + (f", iteration {book.iteration}" if book.iteration >= 0 else "")
            return (
                f"{who} did not arrive within barrier_timeout={timeout:g}s ({when}, {len(book.roster)} members). Check "
                "that all of them were started with the same WORLD_SIZE, or raise barrier_timeout."
            )

        return overdue

    def _completion_overdue(self, timeout: float) -> str:
        return (
            f"{_who(self._state)} returned, and the others did not within completion_timeout={timeout:g}s; raise "
            "completion_timeout where ranks finish at very different times"
        )

    def _iteration_store(self) -> Any:
        if self._store is None:
            self._store = self._agents.connect_to(*self._rendezvous)
        return self._store

    def _note_interruption(self) -> None:
        if not self._interrupted_at:
            self._interrupted_at = clock.monotonic()
            self._size_before = self._state.active_world_size

    def _level(self) -> int:
        """What all ranks know is logged once, by the first rank."""
        first = self._placed.active_rank == 0 or (self._placed.active_world_size == 0 and self._placed.rank == 0)
        return logging.WARNING if first else logging.DEBUG

    def _log_restart(self) -> None:
        """One line for every restart, on the first rank; that may be a process that has just joined."""
        since, self._interrupted_at = self._interrupted_at, 0.0
        if not (told := self._story.tell(self._job.before)):
            return
        now, before = self._placed.active_world_size, self._size_before
        size = f"{now} ranks go on{f', {before} before' if before else ''}"
        size = f"{now} of {before} ranks go on" if now <= before else size
        took = f" after {(clock.monotonic() - since) * 1e3:.0f} ms" if since else ""
        log.log(self._level(), "%s; %s%s", told, size, took)

    def _why(self, decision: Decision) -> str:
        if self._job.moved and self._book.iteration == 0:
            return "the host of the store was lost"
        if decision.stuck:
            return standstill(decision.records, decision.stuck, decision.stuck_count, decision.waiting)
        return summary(decision.records, decision.record_count)


def _nothing() -> None:
    """In place of the wrapped function when the call is over."""


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


def _no_outcome(timeout: float) -> str:
    return f"the iteration had no outcome within barrier_timeout={timeout:g}s"


def _no_abort(timeout: float) -> str:
    return f"the abort did not end within barrier_timeout={timeout:g}s: an abort hook or an atomic() section blocks it"


def _who(state: FrozenState) -> str:
    return f"rank {state.rank} (initial rank {state.initial_rank})"
