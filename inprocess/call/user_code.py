"""Running the user's code, the function and the hooks: what comes out of it, what ends it, what it leaves behind."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from inprocess.call.rank import Hook, Rank
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
from inprocess.system import clock
from inprocess.system.interpreter import interpreter
from inprocess.system.logs import get_logger
from inprocess.system.observers import emit

log = get_logger("inprocess")
#: so long inside the function is progress (seconds)
LONG_INSIDE = 60.0


class UserCode:
    """The phases of the function, and what the other phases need to run a hook."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        #: torch's of the main thread, before it last ran the user's code
        self._torch_state: torch_state.TorchState | None = None

    def run(self) -> Event:
        """The wrapped function; a reserve waits in its place."""
        rank = self._rank
        interpreter.relax()
        rank.failures.drop()
        size, reserve = rank.placed.active_world_size, rank.is_reserve
        now = clock.monotonic()
        emit("run", world_size=size, before=rank.size_before, reserve=reserve, **rank.fault.told(now))
        rank.goodput.called(now)
        rank.log_restart()
        if rank.is_reserve:
            return self._await_outcome(None)
        rank.parts.function_begins()
        set_current(rank.call)
        begin = rank.counts.entered = clock.monotonic()
        try:
            return self.in_window(rank.fn, keep=True)
        finally:
            rank.counts.ran_long = clock.monotonic() - begin >= LONG_INSIDE and not rank.stood_at_once()

    def finish(self) -> Event:
        """The function has returned here: wait for the others."""
        rank = self._rank
        if rank.is_reserve:
            return self._await_outcome(None)
        rank.has_returned = True
        rank.do(verbs.finish(rank.membership.iteration, rank.placed.active_world_size, rank.membership.roster))
        return self._await_outcome(rank.options.completion_timeout)

    def _await_outcome(self, timeout: float | None) -> Event:
        rank = self._rank
        outcome = rank.take("outcome", rank.membership.iteration, timeout, self._completion_overdue)
        if not outcome.completed:
            rank.note_interruption()
            return Event.INTERRUPTED
        rank.job.removed(outcome.removed)
        return Event.COMPLETED if rank.phase is Phase.FINISH else Event.OK

    def _completion_overdue(self, timeout: float) -> str:
        return (
            f"{self._rank.who} returned, and the others did not within completion_timeout={timeout:g}s; raise "
            "completion_timeout where ranks finish at very different times"
        )

    def complete(self) -> Event:
        """Everybody has returned."""
        # before anybody can see that it has returned: should the store be lost now, the others learn it there
        if self._rank.loss is None and not self._may_return():
            raise Fenced(f"{self._rank.who}: the store was lost, and the others may have gone on without this rank")
        self.hook("completion")
        return Event.OK

    def _may_return(self) -> bool:
        agents = self._rank.agents
        return agents.successor.may_return(self._rank.membership.iteration, lambda: agents.do(verbs.has_begun()))

    def in_window(self, fn: Callable[[], Any], keep: bool = False) -> Event:
        """Run user code that a restart may interrupt."""
        rank = self._rank
        gate = rank.agents.thread.enter()
        if gate is None:
            rank.note_interruption()
            return Event.INTERRUPTED
        if lease.remaining(rank.agents.board) <= 0:
            lease.kill_self()
        rank.controls.gate, gate.who = gate, rank.who
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
        rank = self._rank
        if isinstance(outcome, Returned):
            rank.value = outcome.value if keep else rank.value
            return Event.OK
        if isinstance(outcome, Interrupted):
            rank.note_interruption()
            rank.agents.mailbox.take("outcome", rank.membership.iteration)  # raises where the store is lost
            return Event.INTERRUPTED
        return self._raised(outcome.exception)

    def _raised(self, error: BaseException) -> Event:
        # of a hook every BaseException does
        ends = asks_for_end(error) if self._rank.phase is Phase.RUN else not isinstance(error, Exception)
        if ends and not isinstance(error, RankShouldRestart):
            raise error
        self._rank.note_interruption()
        counts = self._ask_for_restart(error) if isinstance(error, RankShouldRestart) else self._fail(error)
        if counts:
            return Event.INTERRUPTED
        self.forget_exception()
        return Event.OK  # a reserve's hook failed after the others had completed

    def _fail(self, error: BaseException) -> bool:
        rank = self._rank
        rank.state = dataclasses.replace(rank.state, fn_exception=error)  # before the abort, which may look at it
        record = rank.failures.note(error, rank.membership, rank.counts.pings)
        emit("raised", **record.to_dict(), lines=rank.failures.lines())
        try:
            return rank.interrupt(record)
        finally:  # once the others know; they and this rank's abort do not wait for the log
            rank.failures.tell(rank.who, record)

    def _ask_for_restart(self, request: RankShouldRestart) -> bool:
        """The function, or a hook before it, raised it by itself."""
        record = self._rank.request(request)
        let_go(request, sys.exc_info()[1])
        return self._rank.interrupt(record)

    def hook(self, name: str) -> None:
        """Run the user's hook of this name, if there is one."""
        rank = self._rank
        hook: Hook = getattr(rank.hooks, name)
        if hook is not None:
            rank.state = forks.guarded(hook, rank.state)

    def abort(self, iteration: int) -> None:
        """End waits on the iteration's own store, then the abort hook; in the MonitorThread.

        And once more in the main thread, for what was made meanwhile. A function that must not run on does not even
        unwind.
        """
        rank = self._rank
        lease.enforce(rank.agents.board)
        shut_connections(*rank.rendezvous)
        if rank.hooks.abort is None:
            return
        try:
            forks.guarded(rank.hooks.abort, rank.state)
        except BaseException:
            log.exception("%s: the abort hook failed in iteration %d; the restart goes on", rank.who, iteration)

    def release(self) -> None:
        """End waits on the iteration's own store, and what began after the abort; in the MonitorThread."""
        rank = self._rank
        shut_connections(*rank.rendezvous)
        if rank.hooks.abort is not None:
            shutdown_gloo_connections(rank.placed.world_size)
            lost_operations.release()
            bootstrap.cut()

    def forget_exception(self) -> None:
        """A kept traceback would keep the function's frames, and with them tensors and process groups, alive."""
        rank = self._rank
        for error in (rank.state.fn_exception, rank.failures.error):
            if error is not None:
                let_go(error, sys.exc_info()[1])
        if rank.state.fn_exception is not None:
            rank.state = dataclasses.replace(rank.state, fn_exception=None)

    def collect(self) -> None:
        """Free what is in reference cycles, as far as it matters."""
        torch_state.forget_backward()
        self._rank.parts.collect()
        self._restore_torch_state()  # again: something in a cycle may have changed it on its way out

    def _restore_torch_state(self) -> None:
        if self._torch_state is not None:
            self._torch_state.restore()
