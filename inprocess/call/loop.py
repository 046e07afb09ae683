"""The loop of one call of a wrapped function: one method per phase, walked by the table in ``protocol.phases``.

Each method does its phase and returns an event. ``_step`` is the one place that turns exceptions into events.
Before the function they are in ``start``, around it in ``user_code``, after an interruption in ``restart``; what they
all know is in ``rank``.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inprocess.attribution import Interruption
from inprocess.call.agents import Agents, Ending
from inprocess.call.clean_ups import CleanUps
from inprocess.call.injection import Injector
from inprocess.call.instrument import Step
from inprocess.call.job import Job
from inprocess.call.launch_variables import run_dir
from inprocess.call.leaving import LeaveSignals, record_of
from inprocess.call.part import CallContext, CallEnd
from inprocess.call.participant import Handover, Hooks, Participant
from inprocess.call.restart import Restarting
from inprocess.call.start import Starting
from inprocess.call.user_code import UserCode
from inprocess.call_wrapper import CallWrapper, Controls, set_current
from inprocess.exception import Fenced, Preempted, RankDiscarded, RestartError, StateLost, StoreLost
from inprocess.interrupt import forks
from inprocess.options import Options
from inprocess.protocol.phases import RUNNING, TELLS_NOBODY, TRANSITIONS, WITHOUT_STORE, Event, Phase, next_phase
from inprocess.system import extensions, observers
from inprocess.system.errors import in_words
from inprocess.system.logs import get_logger, locate
from inprocess.system.observers import emit

log = get_logger("inprocess")
#: how many past phases and events an error shows
HISTORY = 16


class Loop:
    """One call. Use once: ``Loop(...).run()``. ``opened`` closes what making it has opened, run or not."""

    def __init__(
        self,
        options: Options,
        hooks: Hooks,
        injector: Injector,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        job: Job,
        leaving: LeaveSignals,
        opened: contextlib.ExitStack,
        since: Handover | None = None,
    ) -> None:
        self._leave_signals = leaving
        participant = self._participant = Participant(options, hooks, job, since)
        user = self._user = UserCode(participant)
        contact = None if since is None else since.contact
        clean_ups = self._clean_ups = CleanUps(participant)
        participant.agents = Agents(
            options,
            job,
            participant.membership,
            user.abort,
            user.release,
            participant.parts.started,
            clean_ups.look,
            leaving.ends_by_sigterm,
            participant.joining_helps,
            opened,
            contact,
        )
        self._function = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__name__)}"
        participant.call = CallWrapper(participant.agents.board, participant.iteration_store)
        participant.call.timeouts.soft_timeout = options.soft_timeout
        participant.controls = Controls(participant.call)
        counts = participant.counts
        participant.agents.board.steps = lambda: counts.pings
        bound_args, bound_kwargs = injector.bind(tuple(args), dict(kwargs), participant.call)
        participant.fn = lambda: fn(*bound_args, **bound_kwargs)
        start = Starting(participant, user)
        restart = Restarting(participant, user, start)
        self._steps: dict[Phase, Step] = {
            Phase.JOIN: start.join,
            Phase.ASSIGN: start.assign,
            Phase.START: start.start,
            Phase.INITIALIZE: start.initialize,
            Phase.CHECK: start.check,
            Phase.RUN: user.run,
            Phase.FINISH: user.finish,
            Phase.COMPLETE: user.complete,
            Phase.ABORT: restart.wait_for_abort,
            Phase.FINALIZE: restart.finalize,
            Phase.RECHECK: restart.recheck,
            Phase.END: restart.end,
            Phase.FAILOVER: restart.fail_over,
            Phase.LEAVE: self._leave,
        }
        if (instrument := extensions.first("Instrument")) is not None:
            self._steps = instrument.begin(participant, self._steps)
        #: iteration, phase, event
        self._history: deque[tuple[int, Phase, str]] = deque(maxlen=HISTORY)

    @property
    def handover(self) -> Handover | None:
        """What another loop goes on with, over another store; None: the call is over."""
        return self._participant.handover

    def run(self) -> Any:
        """Walk the table. Returns the function's value (None on a reserve rank), or raises."""
        participant = self._participant
        with contextlib.ExitStack() as closing:
            self._end_with(closing)
            try:
                self._walk()
            except BaseException as error:  # Ctrl-C between two phases; a port that is taken
                participant.leaving = participant.leaving or error
        if participant.leaving is not None:
            self._raise_leaving()
        value, participant.value = participant.value, None  # this object lives until garbage is collected
        return value

    def _walk(self) -> None:
        participant = self._participant
        locate(participant.position)
        observers.begin(run_dir(participant.options.run_dir), participant.job.launch.job, "rank", participant.job.slot)
        emit("call", function=self._function, world_size=participant.job.world_size, pid=os.getpid())
        forks.tell(self._detach, participant.options.leave_signals)
        participant.parts.call_begins(self._context())
        participant.agents.open()
        self._leave_signals.begin(participant)
        after = ""
        while participant.phase is not Phase.OUT:
            participant.agents.board.enter(participant.phase)
            emit("phase", after=after)
            event = self._step()
            after = event.value
            self._history.append((participant.membership.iteration, participant.phase, after))
            participant.phase = next_phase(participant.phase, event)

    def _context(self) -> CallContext:
        participant = self._participant
        return CallContext(
            participant.job.calls,
            participant.job.moved,
            participant.agents.own_store,
            participant.hooks.wakes_nccl,
            self._patience,
        )

    def _patience(self) -> float | None:
        """For how long the main thread may show no progress now (seconds); None: for any time."""
        participant = self._participant
        return (
            participant.agents.board.patience(participant.options.soft_timeout)
            if participant.phase in RUNNING
            else None
        )

    def _raise_leaving(self) -> None:
        error, self._participant.leaving = self._participant.leaving, None
        assert error is not None
        if isinstance(error, RestartError):
            error.history = tuple(
                f"iteration {iteration}: {phase.value}: {event}" for iteration, phase, event in self._history
            )
        try:
            raise error
        finally:
            del error  # no cycle between this frame and the traceback

    def _detach(self) -> None:
        """In a process that the user's code has forked."""
        self._participant.agents.detach()
        self._participant.controls.detach()
        self._leave_signals.detach()

    def _end_with(self, closing: contextlib.ExitStack) -> None:
        """How the call ends, from the last to the first: each also where another one raises, or Ctrl-C cuts it short.
        Said before anything begins, since no line at the end is safe from that."""
        participant = self._participant
        closing.callback(self._leave_job)
        closing.callback(participant.parts.call_ended)
        closing.callback(self._clean_ups.join)
        participant.agents.end_with(closing, lambda: self._ending)
        closing.callback(self._end_parts)
        closing.callback(self._clean_ups.end)
        closing.callback(self._tell)
        closing.callback(self._let_go)
        closing.callback(participant.controls.end)
        closing.callback(self._leave_signals.end)
        closing.callback(forks.tell, None)
        closing.callback(set_current, None)

    def _let_go(self) -> None:
        participant = self._participant
        participant.store = None
        participant.failures.drop()
        participant.fn = _nothing  # the user's arguments must not live as long as this object

    def _tell(self) -> None:
        participant, ending = self._participant, self._ending
        emit("left", how=ending.how, why=ending.why, pings=participant.counts.pings)
        participant.tell_goodput(ending.how)

    @functools.cached_property
    def _ending(self) -> Ending:
        participant, error = self._participant, self._participant.leaving
        how = "completed" if error is None else "left" if self._says_nothing else "failed"
        how = how if participant.handover is None else "moved"
        return Ending(how, "" if error is None else in_words(error), how in ("failed", "moved") or participant.quietly)

    @property
    def _says_nothing(self) -> bool:
        """The others know that this rank leaves, or it has no part in the job."""
        return self._participant.said_so or self._participant.agents.thread.stays_out

    def _end_parts(self) -> None:
        participant = self._participant
        participant.parts.call_ends(CallEnd(participant.leaving, moved=participant.handover is not None))

    def _leave_job(self) -> None:
        participant = self._participant
        if participant.handover is None:
            participant.job.leave(participant.membership)

    def _step(self) -> Event:
        participant = self._participant
        try:
            self._leave_signals.look()
            return self._steps[participant.phase]()
        except (StoreLost, Fenced) as error:
            if participant.phase in WITHOUT_STORE:
                return self._quit(error)
            if participant.may_fail_over(error):
                participant.loss = participant.loss or error
                participant.note_interruption()
                return Event.LOST
            participant.leaving = participant.leaving or error
            return Event.CUT_OFF
        except BaseException as error:
            return self._quit(error)

    def _quit(self, error: BaseException) -> Event:
        """This rank leaves the job with ``error``; the others are told."""
        participant = self._participant
        if participant.leaving is not None:
            words = (in_words(participant.leaving), participant.phase.value, in_words(error))
            log.warning("while leaving with %s, the phase %r raised %s", *words)
            return Event.QUIT
        participant.leaving = error
        participant.agents.thread.leave_after_outcome()
        participant.quietly = self._leaves_quietly(error)
        if participant.quietly or participant.phase in TELLS_NOBODY:
            return Event.QUIT
        abort = ""  # the others go on
        if isinstance(error, Preempted):
            if self._leave_signals.told == participant.membership.iteration:
                return Event.QUIT
            record = record_of(participant, error)
        else:
            record = participant.record(Interruption.BASE_EXCEPTION, error, in_words(error))
            if participant.phase is Phase.INITIALIZE:
                abort = f"{participant.who}: initialize raised {in_words(error)}"
            elif isinstance(error, StateLost):
                abort = f"{participant.who}: {in_words(error)}"
        try:
            participant.interrupt(record, abort)
        except (StoreLost, Fenced) as lost:
            log.warning("the others could not be told that this rank leaves: %s", lost)
            return Event.CUT_OFF if (participant.phase, Event.CUT_OFF) in TRANSITIONS else Event.QUIT
        return Event.QUIT

    def _leaves_quietly(self, error: BaseException) -> bool:
        """A discarded rank is not missed, and neither is a reserve."""
        return isinstance(error, RankDiscarded) or self._participant.stands_by

    def _leave(self) -> Event:
        leaving = self._participant.leaving
        # where the others do not know yet, as in the joining, they wait until the monitor has told them
        hook = self._user.last_hook if self._says_nothing else self._user.hook
        try:
            if isinstance(leaving, Preempted):
                hook("on_preemption")
        finally:
            if leaving is not None:
                hook("terminate")
        return Event.OK


def _nothing() -> None:
    """In place of the wrapped function when the call is over."""
