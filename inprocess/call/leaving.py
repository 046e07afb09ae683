"""Leaving in time: a signal asks this rank to go, as a scheduler does before it kills.

The handler only notes it. A thread that waits for nothing else then

1. tells the others, and lets the training run on for a second: where a host or the whole job is asked to leave, all of
   its ranks are by then, and they leave in one restart;
2. waits until a step has ended (``ping()``, or ``atomic()`` that was left), or, where all ranks leave, until LiveState
   has written a last checkpoint; a function that never says where a step ends is not waited for;
3. interrupts the iteration, as any fault does, so the others restart without this rank.

A call that completes before this rank has left leaves the signal to the next one, which leaves as it begins.

The main thread leaves between two phases: after the function where an iteration is interrupted, whoever interrupted
it, and before it where there is nothing to wait for. Reserves, and processes that wait to join, leave at once. The
protocol knows nothing of all this: the rank arrives in the end round and says ``left``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import TracebackType
from typing import Any, ClassVar

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.call.participant import Participant
from inprocess.call_wrapper import Leaving
from inprocess.exception import Preempted, signal_name
from inprocess.monitor.board import ENDING
from inprocess.options import Options
from inprocess.protocol import verbs
from inprocess.protocol.ops import Verb
from inprocess.protocol.phases import BEFORE, INTERRUPTED, Phase
from inprocess.protocol.verbs import leaving
from inprocess.stores.driver import execute
from inprocess.system import clock
from inprocess.system.logs import get_logger
from inprocess.system.noted_signals import NotedSignals
from inprocess.system.observers import emit

__all__ = ["LeaveSignals"]

log = get_logger("inprocess")
#: within this time all that leave together are asked to (seconds); a quarter of the grace, where that is less
TOGETHER_S = 1.0
#: between two looks at this process, and between the first two at the store, later twice as long (seconds)
LOOK_S, FIRST_ASK_S = 0.005, 0.05
#: between two looks of the main thread for signals, while the end of a step is waited for (seconds)
NUDGE_EVERY_S = 1.0
#: how long to connect to the store may take (seconds)
CONNECT_LIMIT_S = 5.0


class LeaveSignals:
    """One per call of a wrapped function, around all its loops. A context manager; main thread."""

    #: the process that was asked, the signal, and when, where the last call did not heed it any more
    _unheeded: ClassVar[tuple[int, int, float] | None] = None

    def __init__(self, options: Options) -> None:
        self._grace, self._signums = options.leave_grace, options.leave_signals
        self._signals = NotedSignals(options.leave_signals, self._note)
        #: what the function sees; None: nobody has asked
        self.asked: Leaving | None = None
        #: whether the call before was asked, and has left it to this one
        self._is_carried = False
        # written by the handler: when it was asked, and whether it was asked again
        self._asked_at, self._is_urgent = 0.0, False
        #: the iteration whose end this rank has explained to the others by now
        self.told: int | None = None
        # written by the thread: nothing is to be waited for any more
        self._is_due = False
        self._participant: Participant | None = None
        self._over = threading.Event()
        self._wake = threading.Lock()  # held until there is something to do: a handler may release it, and no more
        self._wake.acquire()
        self._thread = threading.Thread(target=self._work, name="inprocess-leaving", daemon=True)
        self._store: Any = None

    def __enter__(self) -> LeaveSignals:
        self._signals.install()
        if (unheeded := LeaveSignals._unheeded) is not None:
            pid, signum, at = unheeded
            if pid == os.getpid() and signum in self._signums:  # not in a process that was forked since
                LeaveSignals._unheeded, self._asked_at = None, at
                self.asked, self._is_carried = Leaving(signum, at + self._grace), True
                self._is_due = True  # whoever is to leave together has been asked by now
                self._rouse()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.restore()
        self._over.set()
        self._rouse()
        if self._thread.ident is not None:
            self._thread.join(CONNECT_LIMIT_S)
        if self.asked is not None and kind is None:
            log.warning("%s: the call completed before this rank left; the next one leaves as it begins", self._name)
            LeaveSignals._unheeded = (os.getpid(), self.asked.signum, self._asked_at)

    @property
    def ends_by_sigterm(self) -> bool:
        """Whether SIGTERM ends this process at once or is for a handler of the program's, as without this."""
        return not self._signals.takes(signal.SIGTERM)

    def begin(self, participant: Participant) -> None:
        """The loop of this rank begins."""
        self._participant = participant
        participant.controls.leave_by(lambda: self.asked, _Deputy(participant))
        participant.agents.mailbox.look = self.look
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """It is over; another one may follow, over another store."""
        if (participant := self._participant) is not None:
            participant.controls.last.deputy = None  # it has the rank, and the rank has the call
        self._participant = self._store = None

    def detach(self) -> None:
        """In a process that the user's code has forked."""
        self._participant = None
        self._signals.restore()

    def look(self) -> None:
        """Main thread, between two phases and while it waits: raises Preempted where this rank is to leave now."""
        participant, asked = self._participant, self.asked
        if asked is None or participant is None or participant.leaving is not None:
            return
        # what the call before has left to this one waits for the others: they would wait for this rank
        idle = (participant.phase is Phase.JOIN and not self._is_carried) or participant.stands_by
        if idle or participant.phase is Phase.RECHECK or (self._is_due and participant.phase in BEFORE):
            raise Preempted(asked.signum)

    # --- the handler ----------------------------------------------------------------------------------------------

    def _note(self, signum: int) -> None:
        """Takes no lock: whatever the main thread is at may hold it."""
        participant = self._participant
        if participant is not None and participant.agents.board.slots[ENDING]:
            return  # its monitor ends it: that is no request of a scheduler's
        if self.asked is None:
            self._asked_at = clock.monotonic()
            self.asked = Leaving(signum, self._asked_at + self._grace)
        else:
            self._is_urgent = True
        self._rouse()

    def _rouse(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is released already
            self._wake.release()

    # --- the thread -----------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        assert self.asked is not None
        return signal_name(self.asked.signum)

    def _work(self) -> None:
        self._wake.acquire()
        asked, participant = self.asked, self._participant
        if asked is None:
            return
        if participant is not None:
            words = "%s: %s asks this rank to leave the job; it does after its step, within %g s"
            log.warning(words, participant.who, self._name, self._grace)
            emit("leaving", signal=self._name, seconds=self._grace)
        self._gather(asked)
        self._await_step(asked)
        self._is_due = True
        while self._is_at_work:
            self._get_out()
            self._pause(10 * LOOK_S)

    @property
    def _is_at_work(self) -> bool:
        participant = self._participant
        return not self._over.is_set() and (participant is None or participant.leaving is None)

    def _waits(self, until: float) -> bool:
        """Whether there is something to wait for, until this moment."""
        participant = self._participant
        if participant is not None and participant.stands_by:
            return False
        return self._is_at_work and not self._is_urgent and clock.monotonic() < until

    def _pause(self, seconds: float) -> None:
        # released by another signal, and by the end of the call
        self._wake.acquire(timeout=seconds)

    def _gather(self, asked: Leaving) -> None:
        """Give the others a moment to be asked as well."""
        until = self._asked_at + min(TOGETHER_S, self._grace / 4)
        pause, said, more = FIRST_ASK_S, -1, True
        while more and not asked.everybody:
            more = self._waits(until)  # the last look is when the time is over
            participant = self._participant
            if participant is not None and participant.phase is Phase.RUN:
                iteration = participant.membership.iteration
                if said != iteration and self._do(leaving.say(iteration, leaving.WANTED)) is not None:
                    said = iteration
                self._ask(participant, asked)
            self._pause(min(pause, max(0.0, until - clock.monotonic())))
            pause *= 2

    def _ask(self, participant: Participant, asked: Leaving) -> None:
        """Whether all active ranks leave. If so, LiveState is told, and the others are told at which commit it is."""
        iteration = participant.membership.iteration
        heard = self._do(leaving.heard(iteration, leaving.WANTED))
        asked.everybody = heard is not None and heard[0] >= participant.placed.active_world_size
        last = participant.controls.last
        if asked.everybody and last.wanted:
            self._do(leaving.say(iteration, leaving.STEP, last.commits + 1))  # counted after it was told

    def _await_step(self, asked: Leaving) -> None:
        """Until the function has come to the end of a step."""
        deadline = clock.monotonic() + asked.seconds_left
        seen, nudge_at = self._steps(), 0.0
        while self._waits(deadline):
            if (participant := self._participant) is not None and clock.monotonic() >= nudge_at:
                participant.agents.nudge()  # for a second signal
                nudge_at = clock.monotonic() + NUDGE_EVERY_S
            steps, last = self._steps(), None if self._participant is None else self._participant.controls.last
            saves = last is not None and asked.everybody and last.wanted and not asked.is_saved
            if not saves and (asked.is_saved or steps is None or steps != seen):
                return
            self._pause(LOOK_S)

    def _steps(self) -> tuple[int, int, int] | None:
        """What changes with each step, where the function is at work and says so."""
        participant = self._participant
        if (
            participant is None
            or participant.phase is not Phase.RUN
            or not (participant.counts.pings or participant.counts.sections)
        ):
            return None
        return participant.membership.iteration, participant.counts.pings, participant.counts.sections

    def _get_out(self) -> None:
        """Have the main thread leave what it is at."""
        participant, asked = self._participant, self.asked
        if participant is None or asked is None:
            return
        participant.agents.mailbox.poke()
        if participant.stands_by:
            participant.agents.thread.end_hook()
        iteration = participant.membership.iteration
        if participant.phase in INTERRUPTED and not participant.is_reserve and self.told != iteration:
            self.told = iteration
            if self._do(verbs.interrupt(iteration, record_of(participant, Preempted(asked.signum)))) is None:
                self.told = None

    def _do(self, verb: Verb[Any]) -> Any:
        """Over a connection of this thread's own. None where the store does not answer: another attempt follows."""
        participant = self._participant
        try:
            if participant is None:
                return None
            self._store = self._store or participant.agents.connect_anew(CONNECT_LIMIT_S, self._over)
            answer = execute(verb, self._store)
            return True if answer is None else answer
        except Exception as error:
            log.debug(
                "%s: the store does not answer while this rank is to leave: %s",
                participant.who if participant else "",
                error,
            )
            self._store = None
            return None


def record_of(participant: Participant, error: Preempted) -> InterruptionRecord:
    """Why the iteration ends, for the others."""
    record = InterruptionRecord(
        participant.membership.rank, Interruption.PREEMPTED, participant.membership.slot, str(error)
    )
    return record.noticed(clock.monotonic(), clock.name())


class _Deputy:
    """See `call_wrapper.Deputy`."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant

    def say(self, what: str) -> None:
        self._participant.do(leaving.say(self._participant.membership.iteration, what))

    def agree(self, what: str) -> int | None:
        count, value = self._participant.do(leaving.heard(self._participant.membership.iteration, what))
        return value if count >= self._participant.placed.active_world_size else None
