"""Running the user's code, the function and the hooks: what comes out of it, what ends it, what it leaves behind."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from inprocess.call.participant import Hook, Participant
from inprocess.call_wrapper import set_current
from inprocess.collectives.coalescing import contexts
from inprocess.collectives.gloo import shutdown_gloo_connections
from inprocess.collectives.gloo_lost import lost_operations
from inprocess.collectives.nccl_bootstrap import bootstrap
from inprocess.exception import Fenced, RankShouldRestart, asks_for_end
from inprocess.interrupt import forks, torch_state
from inprocess.interrupt.gate import Interrupted, Raised, Returned
from inprocess.interrupt.judging import let_go
from inprocess.monitor import lease
from inprocess.protocol import verbs
from inprocess.protocol.phases import Event, Phase
from inprocess.stores.connections import shut_connections
from inprocess.system import clock, descriptors
from inprocess.system.errors import in_words, is_ctrl_c
from inprocess.system.interpreter import interpreter
from inprocess.system.logs import get_logger
from inprocess.system.observers import emit

log = get_logger("inprocess")
#: so long inside the function is progress (seconds)
LONG_INSIDE = 60.0


class UserCode:
    """The phases of the function, and what the other phases need to run a hook."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        #: torch's of the main thread, before it last ran the user's code
        self._torch_state: torch_state.TorchState | None = None
        # of the abort: the iteration and the step that failed last
        self._failed = (-1, "")

    def run(self) -> Event:
        """The wrapped function; a reserve waits in its place."""
        participant = self._participant
        interpreter.relax()
        participant.failures.drop()
        size, reserve = participant.placed.active_world_size, participant.is_reserve
        now = clock.monotonic()
        emit("run", world_size=size, before=participant.size_before, reserve=reserve, **participant.fault.told(now))
        participant.goodput.called(now)
        participant.log_restart()
        if participant.is_reserve:
            return self._stand_by()
        participant.parts.function_begins()
        set_current(participant.call)
        begin = participant.counts.entered = clock.monotonic()
        try:
            return self.in_window(participant.fn, keep=True)
        finally:
            participant.counts.ran_long = clock.monotonic() - begin >= LONG_INSIDE and not participant.stood_at_once()

    def _stand_by(self) -> Event:
        """A reserve: `warm_up`, which the next restart ends, then the wait for that."""
        participant = self._participant
        if participant.hooks.warm_up is not None:
            begin = clock.monotonic()
            if (event := self.in_window(lambda: self.hook("warm_up"))) is not Event.OK:
                return event
            log.info("%s, a reserve, has warmed up in %.1f s", participant.who, clock.monotonic() - begin)
        return self._await_outcome(None)

    def finish(self) -> Event:
        """The function has returned here: wait for the others."""
        participant = self._participant
        if participant.is_reserve:
            return self._await_outcome(None)
        participant.has_returned = True
        participant.do(
            verbs.finish(
                participant.membership.iteration, participant.placed.active_world_size, participant.membership.roster
            )
        )
        return self._await_outcome(participant.options.completion_timeout)

    def _await_outcome(self, timeout: float | None) -> Event:
        participant = self._participant
        outcome = participant.take("outcome", participant.membership.iteration, timeout, self._completion_overdue)
        if not outcome.completed:
            participant.note_interruption()
            return Event.INTERRUPTED
        participant.job.removed(outcome.removed)
        return Event.COMPLETED if participant.phase is Phase.FINISH else Event.OK

    def _completion_overdue(self, timeout: float) -> str:
        return (
            f"{self._participant.who} returned, and the others did not within completion_timeout={timeout:g}s; raise "
            "completion_timeout where ranks finish at very different times"
        )

    def complete(self) -> Event:
        """Everybody has returned."""
        # before anybody can see that it has returned: should the store be lost now, the others learn it there
        if self._participant.loss is None and not self._may_return():
            raise Fenced(
                f"{self._participant.who}: the store was lost, and the others may have gone on without this rank"
            )
        self.last_hook("completion")
        return Event.OK

    def _may_return(self) -> bool:
        agents = self._participant.agents
        return agents.successor.may_return(self._participant.membership.iteration, lambda: agents.do(verbs.has_begun()))

    def in_window(self, fn: Callable[[], Any], keep: bool = False) -> Event:
        """Run user code that a restart may interrupt."""
        participant = self._participant
        gate = participant.agents.thread.enter()
        if gate is None:
            participant.note_interruption()
            return Event.INTERRUPTED
        if lease.remaining(participant.agents.board) <= 0:
            lease.kill_self()
        participant.controls.gate, gate.who = gate, participant.who
        self._torch_state = torch_state.capture()
        outcome = gate.run(fn)
        contexts.close()  # before the others are told, and the groups aborted
        del gate, fn  # this frame lives as long as a traceback of the function that somebody keeps
        try:
            return self._settle(outcome, keep)
        finally:
            if not isinstance(outcome, Returned):
                self._restore_torch_state()
            del outcome

    def _settle(self, outcome: Returned | Raised | Interrupted, keep: bool) -> Event:
        participant = self._participant
        if isinstance(outcome, Returned):
            participant.value = outcome.value if keep else participant.value
            return Event.OK
        if isinstance(outcome, Interrupted):
            participant.note_interruption()
            participant.agents.mailbox.take(
                "outcome", participant.membership.iteration
            )  # raises where the store is lost
            return Event.INTERRUPTED
        if outcome.instead:
            log.info(
                "%s: %s, in answer to an error that came out of a collective, counts as that error, and this rank "
                "restarts with the others. To leave the job, raise RestartAbort",
                participant.who,
                outcome.instead,
            )
        return self._raised(outcome.exception)

    def _raised(self, error: BaseException) -> Event:
        if self._participant.stands_by:
            raise error  # it leaves, and that is all
        # of a hook every BaseException does
        ends = asks_for_end(error) if self._participant.phase is Phase.RUN else not isinstance(error, Exception)
        if ends and not isinstance(error, RankShouldRestart):
            raise error
        self._participant.note_interruption()
        counts = self._ask_for_restart(error) if isinstance(error, RankShouldRestart) else self._fail(error)
        if counts:
            return Event.INTERRUPTED
        self.forget_exception()
        return Event.OK  # a reserve's hook failed after the others had completed

    def _fail(self, error: BaseException) -> bool:
        participant = self._participant
        participant.state = dataclasses.replace(
            participant.state, fn_exception=error
        )  # before the abort, which may look at it
        record = participant.failures.note(error, participant.membership, participant.counts.pings)
        emit("raised", **record.to_dict(), lines=participant.failures.lines())
        try:
            return participant.interrupt(record)
        finally:  # once the others know; they and this rank's abort do not wait for the log
            participant.failures.tell(participant.who, record)

    def _ask_for_restart(self, request: RankShouldRestart) -> bool:
        """The function, or a hook before it, raised it by itself."""
        record = self._participant.request(request)
        let_go(request, sys.exc_info()[1])
        return self._participant.interrupt(record)

    def hook(self, name: str) -> None:
        """Run the user's hook of this name, if there is one."""
        participant = self._participant
        hook: Hook = getattr(participant.hooks, name)
        if hook is not None:
            participant.state = forks.guarded(hook, participant.state)

    def last_hook(self, name: str) -> None:
        """One for which nobody waits: it may take its time, to copy files, say."""
        with self._participant.call.disable_hang_protection():
            self.hook(name)

    def abort(self, iteration: int) -> None:
        """End waits on the iteration's own store, then the abort hook; in the MonitorThread.

        And once more in the main thread, for what was made meanwhile. A function that must not run on does not even
        unwind.
        """
        participant = self._participant
        lease.enforce(participant.agents.board)
        with descriptors.more():
            self._attempt("the end of waits on this iteration's store", shut_connections, *participant.rendezvous)
            if (hook := participant.hooks.abort) is not None:
                self._attempt("the abort hook", forks.guarded, hook, participant.state)

    def release(self) -> None:
        """End waits on the iteration's own store, and what began after the abort; in the MonitorThread."""
        participant, release = self._participant, "the release of waits that began after the abort"
        with descriptors.more():
            self._attempt(release, shut_connections, *participant.rendezvous)
            if participant.hooks.abort is not None:
                self._attempt(release, shutdown_gloo_connections, participant.placed.world_size)
                self._attempt(release, lost_operations.release)
                self._attempt(release, bootstrap.cut)

    def _attempt(self, what: str, step: Callable[..., object], *args: Any) -> None:
        """Whatever it raises, the function has to be interrupted; said once in an iteration."""
        try:
            step(*args)
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            iteration = self._participant.membership.iteration
            if (iteration, what) != self._failed:
                self._failed = iteration, what
                why = descriptors.shortage(error) or in_words(error)
                words = "%s: %s failed in iteration %d; the restart goes on: %s"
                log.error(words, self._participant.who, what, iteration, why, exc_info=error)

    def forget_exception(self) -> None:
        """A kept traceback would keep the function's frames, and with them tensors and process groups, alive."""
        participant = self._participant
        for error in (participant.state.fn_exception, participant.failures.error):
            if error is not None:
                let_go(error, sys.exc_info()[1])
        if participant.state.fn_exception is not None:
            participant.state = dataclasses.replace(participant.state, fn_exception=None)

    def collect(self) -> None:
        """Free what is in reference cycles, as far as it matters."""
        torch_state.forget_backward()
        self._participant.parts.collect()
        self._restore_torch_state()  # again: something in a cycle may have changed it on its way out

    def _restore_torch_state(self) -> None:
        if self._torch_state is not None:
            self._torch_state.restore()
