"""The loop of one call of a wrapped function: one method per phase, walked by the table in ``protocol.phases``.

Each method does its phase and answers with an event. ``_step`` is the one place that turns exceptions into events.
Before the function they are in ``start``, around it in ``user_code``, after an interruption in ``restart``; what they
all know is in ``rank``.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inprocess.attribution import Interruption
from inprocess.call.agents import Agents
from inprocess.call.clean_ups import CleanUps
from inprocess.call.injection import Injector
from inprocess.call.instrument import Step
from inprocess.call.job import Job
from inprocess.call.launch_variables import run_dir
from inprocess.call.leaving import LeaveSignals, record_of
from inprocess.call.part import CallContext, CallEnd
from inprocess.call.rank import Handover, Hooks, Rank
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
        leaving: LeaveSignals,
        since: Handover | None = None,
    ) -> None:
        self._leave_signals = leaving
        rank = self._rank = Rank(options, hooks, job, since)
        user = self._user = UserCode(rank)
        contact = None if since is None else since.contact
        clean_ups = self._clean_ups = CleanUps(rank)
        rank.agents = Agents(
            options,
            job,
            rank.membership,
            user.abort,
            user.release,
            rank.parts.started,
            clean_ups.look,
            leaving.ends_by_sigterm,
            contact,
        )
        self._function = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__name__)}"
        rank.call = CallWrapper(rank.agents.board, rank.iteration_store)
        rank.controls = Controls(rank.call)
        counts = rank.counts
        rank.agents.board.steps = lambda: counts.pings
        bound_args, bound_kwargs = injector.bind(tuple(args), dict(kwargs), rank.call)
        rank.fn = lambda: fn(*bound_args, **bound_kwargs)
        start = Starting(rank, user)
        restart = Restarting(rank, user, start)
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
            self._steps = instrument.begin(rank, self._steps)
        self._history: deque[str] = deque(maxlen=HISTORY)

    @property
    def handover(self) -> Handover | None:
        """What another loop goes on with, over another store; None: the call is over."""
        return self._rank.handover

    def run(self) -> Any:
        """Walk the table. Returns the function's value (None on a reserve rank), or raises."""
        rank = self._rank
        try:
            locate(rank.position)
            observers.begin(run_dir(rank.options.run_dir), rank.job.launch.job, "rank", rank.job.slot)
            emit("call", function=self._function, world_size=rank.job.world_size, pid=os.getpid())
            forks.tell(self._detach, rank.options.leave_signals)
            rank.parts.call_begins(self._context())
            rank.agents.open()
            self._leave_signals.begin(rank)
            event = None
            while rank.phase is not Phase.OUT:
                rank.agents.board.enter(rank.phase)
                emit("phase", after="" if event is None else event.value)
                event = self._step()
                self._history.append(f"iteration {rank.membership.iteration}: {rank.phase.value}: {event.value}")
                rank.phase = next_phase(rank.phase, event)
        except BaseException as error:  # Ctrl-C between two phases; a port that is taken
            rank.leaving = rank.leaving or error
        finally:
            self._close()
        if rank.leaving is not None:
            self._raise_leaving()
        value, rank.value = rank.value, None  # this object lives until garbage is collected
        return value

    def _context(self) -> CallContext:
        rank = self._rank
        return CallContext(rank.job.calls, rank.job.moved, rank.agents.own_store, rank.hooks.wakes_nccl, self._patience)

    def _patience(self) -> float | None:
        """For how long the main thread may show no progress now (seconds); None: for any time."""
        rank = self._rank
        return rank.agents.board.patience(rank.options.soft_timeout) if rank.phase in RUNNING else None

    def _raise_leaving(self) -> None:
        error, self._rank.leaving = self._rank.leaving, None
        assert error is not None
        if isinstance(error, RestartError):
            error.history = tuple(self._history)
        try:
            raise error
        finally:
            del error  # no cycle between this frame and the traceback

    def _detach(self) -> None:
        """In a process that the user's code has forked."""
        self._rank.agents.detach()
        self._rank.controls.detach()
        self._leave_signals.detach()

    def _close(self) -> None:
        rank = self._rank
        set_current(None)
        forks.tell(None)
        self._leave_signals.end()
        rank.controls.end()
        rank.store = None
        rank.failures.drop()
        rank.fn = _nothing  # the user's arguments must not live as long as this object
        says_nothing = rank.said_so or rank.agents.thread.stays_out
        how = "completed" if rank.leaving is None else "left" if says_nothing else "failed"
        how = how if rank.handover is None else "moved"
        # a rank that goes quietly leaves its MonitorThread waiting for something that may come late or never
        why = "" if rank.leaving is None else in_words(rank.leaving)
        emit("left", how=how, why=why, pings=rank.counts.pings)
        rank.tell_goodput(how)
        with contextlib.ExitStack() as closing:  # from the last to the first, each also where another one raises
            closing.callback(rank.parts.call_ended)
            closing.enter_context(self._clean_ups)
            closing.callback(rank.agents.close, how, cut=how in ("failed", "moved") or rank.quietly, why=why)
            rank.parts.call_ends(CallEnd(rank.leaving, moved=rank.handover is not None))
        if rank.handover is None:
            rank.job.leave(rank.membership)

    def _step(self) -> Event:
        rank = self._rank
        try:
            self._leave_signals.look()
            return self._steps[rank.phase]()
        except (StoreLost, Fenced) as error:
            if rank.phase in WITHOUT_STORE:
                return self._quit(error)
            if rank.may_fail_over(error):
                rank.loss = rank.loss or error
                rank.note_interruption()
                return Event.LOST
            rank.leaving = rank.leaving or error
            return Event.CUT_OFF
        except BaseException as error:
            return self._quit(error)

    def _quit(self, error: BaseException) -> Event:
        """This rank leaves the job with ``error``; the others are told."""
        rank = self._rank
        if rank.leaving is not None:
            words = (in_words(rank.leaving), rank.phase.value, in_words(error))
            log.warning("while leaving with %s, the phase %r raised %s", *words)
            return Event.QUIT
        rank.leaving = error
        rank.agents.thread.leave_after_outcome()
        rank.quietly = self._leaves_quietly(error)
        if rank.quietly or rank.phase in TELLS_NOBODY:
            return Event.QUIT
        abort = ""  # the others go on
        if isinstance(error, Preempted):
            if self._leave_signals.told == rank.membership.iteration:
                return Event.QUIT
            record = record_of(rank, error)
        else:
            record = rank.record(Interruption.BASE_EXCEPTION, error, in_words(error))
            if rank.phase is Phase.INITIALIZE:
                abort = f"{rank.who}: initialize raised {in_words(error)}"
            elif isinstance(error, StateLost):
                abort = f"{rank.who}: {in_words(error)}"
        try:
            rank.interrupt(record, abort)
        except (StoreLost, Fenced) as lost:
            log.warning("the others could not be told that this rank leaves: %s", lost)
            return Event.CUT_OFF if (rank.phase, Event.CUT_OFF) in TRANSITIONS else Event.QUIT
        return Event.QUIT

    def _leaves_quietly(self, error: BaseException) -> bool:
        """A discarded rank is not missed, and neither is a reserve."""
        return isinstance(error, RankDiscarded) or (self._rank.phase is Phase.RUN and self._rank.is_reserve)

    def _leave(self) -> Event:
        if isinstance(self._rank.leaving, Preempted):
            self._user.hook("on_preemption")
        if self._rank.leaving is not None:
            self._user.hook("terminate")
        return Event.OK


def _nothing() -> None:
    """In place of the wrapped function when the call is over."""
