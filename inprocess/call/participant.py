"""What one rank knows in a call, and what all of its phases need: to ask the others, to tell them, to wait for them.

The phases are in ``start``, ``user_code`` and ``restart``; ``loop`` walks them. Only the main thread writes here.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

from inprocess.attribution import Interruption, InterruptionRecord, name_of, ranges
from inprocess.call.agents import Agents
from inprocess.call.failures import Failures
from inprocess.call.fault import Fault
from inprocess.call.goodput import Goodput
from inprocess.call.hooks import AdaptedAssignment
from inprocess.call.job import Job
from inprocess.call.parts import Parts
from inprocess.call.successor import Contact
from inprocess.call.untold_restarts import UntoldRestarts
from inprocess.call_wrapper import CallWrapper, Controls, Counts
from inprocess.exception import BadMessage, Fenced, RankShouldRestart, StoreLost, TimeoutError
from inprocess.monitor.board import PING
from inprocess.options import Options
from inprocess.protocol import verbs
from inprocess.protocol.ops import Verb
from inprocess.protocol.phases import TRANSITIONS, Event, Phase
from inprocess.protocol.repeats import stood_at_once
from inprocess.state import FrozenState, Mode
from inprocess.system import clock
from inprocess.system.errors import in_words, where
from inprocess.system.logs import Position, get_logger

log = get_logger("inprocess")
T = TypeVar("T")
Hook = Callable[[FrozenState], FrozenState] | None
#: how long a rank that gives up tries to find out who is missing (seconds)
NAMING = 1.0


@dataclasses.dataclass(frozen=True)
class Hooks:
    """The user's callables, adapted to one form."""

    assign: AdaptedAssignment
    initialize: Hook
    abort: Hook
    finalize: Hook
    health_check: Hook
    completion: Hook
    terminate: Hook
    on_preemption: Hook
    warm_up: Hook
    #: whether the abort has NCCL's threads woken
    wakes_nccl: bool = False


@dataclasses.dataclass(frozen=True)
class Handover:
    """What another loop goes on with, over another store."""

    #: with the standby that serves it
    contact: Contact
    #: the loss, and with how many active ranks
    fault: Fault
    active_world_size: int
    failures: Failures
    goodput: Goodput


class Participant:
    """This process in one call: what more than one group of phases reads or changes."""

    #: set once, by the loop, before the first phase
    agents: Agents
    call: CallWrapper
    controls: Controls
    #: the user's function with its arguments
    fn: Callable[[], Any]

    def __init__(self, options: Options, hooks: Hooks, job: Job, since: Handover | None) -> None:
        self.options, self.hooks, self.job = options, hooks, job
        self.membership = job.membership()
        self.state = job.state()
        self.phase = Phase.JOIN
        self.parts = Parts()
        self.failures = Failures(options.max_repeats) if since is None else since.failures
        self.goodput = Goodput(clock.monotonic()) if since is None else since.goodput
        self.value: Any = None
        #: the exception with which this rank leaves the job
        self.leaving: BaseException | None = None
        #: the last assignment that the start round accepted; hooks may change ``state``, not this
        self.placed = self.state
        #: where this iteration's own store is, and the connection to it
        self.rendezvous = ("", 0)
        self.store: Any = None
        #: whether this rank has arrived in the start round of this iteration
        self.arrived = False
        #: whether the others know that this rank is leaving; otherwise its monitor tells them
        self.said_so = False
        #: whether it leaves without an interruption
        self.quietly = False
        #: whether this rank's function has returned in this iteration
        self.has_returned = False
        self.fault = Fault() if since is None else since.fault
        self.size_before = 0 if since is None else since.active_world_size
        #: restarts that are still to be logged; over another store iteration 0 is one
        self.untold = UntoldRestarts(0 if since is None else -1)
        #: the loss of the store
        self.loss: StoreLost | None = None
        #: the call goes on in another loop
        self.handover: Handover | None = None

    @property
    def who(self) -> str:
        """How messages name this rank."""
        return name_of(self.state.rank, self.state.initial_rank)

    @property
    def counts(self) -> Counts:
        return self.controls.counts

    def position(self) -> Position:
        """For log lines."""
        job, membership = self.job, self.membership
        return Position(job.calls - 1, membership.iteration, membership.rank, membership.slot, self.phase.value)

    def joining_helps(self, members: int, later: int) -> bool:
        """Whether an iteration of so many members should end for this process to join, which makes them so many: where
        it would be a reserve like others, and no more ranks active, it waits for the next restart."""
        if self.options.join != "now":
            return False
        helps = self.hooks.assign.gains(members, later)
        if not helps:
            log.warning("%s: no more ranks would be active with this process; it joins at the next restart", self.who)
        return helps

    def note_interruption(self) -> None:
        """The restart begins, unless it has begun already."""
        if not self.fault:
            self.size_before = self.state.active_world_size
        now, (iteration, heard) = clock.monotonic(), self.agents.thread.heard
        self.fault.interrupted(min(now, heard) if iteration == self.membership.iteration else now)

    def explain(self, records: Sequence[InterruptionRecord]) -> None:
        """What everybody knows of the interruption: when the first process noticed it."""
        self.fault.explain(records, clock.name(), clock.monotonic())

    def account(self, stood_still: bool = False) -> None:
        """The iteration was interrupted; ``stood_still``: nobody had made progress for a while."""
        at = self.fault.at or clock.monotonic()
        ping = self.agents.board.slots[PING] / 1e9
        at = min(ping or at - self.fault.silent, at) if stood_still else at
        self.goodput.interrupted(at, self.counts.pings, self.counts.kept)

    def tell_goodput(self, how: str) -> None:
        """The last line of a call, on the first rank; none where nothing interrupted it."""
        if self.goodput.interruptions and self.handover is None:
            level = logging.INFO if self.level() == logging.WARNING else logging.DEBUG
            log.log(level, "the call %s after %s", how, self.goodput.line(clock.monotonic()))

    @property
    def is_reserve(self) -> bool:
        return self.placed.mode is Mode.INACTIVE

    @property
    def stands_by(self) -> bool:
        """A reserve, while the others run the function: nobody waits for it."""
        return self.phase is Phase.RUN and self.is_reserve

    @property
    def is_cut_off(self) -> bool:
        """It leaves, and there is nobody left to talk to."""
        return isinstance(self.leaving, StoreLost | Fenced)

    def may_fail_over(self, error: StoreLost | Fenced) -> TypeGuard[StoreLost]:
        """Whether there is somebody to ask where the job goes on."""
        if not isinstance(error, StoreLost) or isinstance(error, BadMessage) or self.leaving is not None:
            return False
        return (self.phase, Event.LOST) in TRANSITIONS and self.agents.successor.can_ask

    def do(self, verb: Verb[T]) -> T:
        """Carry out a verb of the protocol in the main thread."""
        return self.agents.do(verb)

    def take(self, name: str, iteration: int, timeout: float | None, overdue: Callable[[float], str]) -> Any:
        """Wait for what the MonitorThread reads. Raises TimeoutError with the words of ``overdue``."""
        letter = self.agents.mailbox.take(name, iteration, timeout)
        if letter is None:
            assert timeout is not None
            raise TimeoutError(overdue(timeout))
        return letter

    def take_round(self, name: str, iteration: int, timeout: float | None, among: str) -> Any:
        """As `take`, for what is decided when all have arrived in a round (``among``). Says meanwhile who has not."""
        begin, waiting = clock.monotonic(), self.agents.absentees(self.membership, among)
        left = timeout
        while left is None or left > waiting.progress.left:
            letter = self.agents.mailbox.take(name, iteration, max(0.0, waiting.progress.left))
            if letter is not None:
                return letter
            waiting.look()
            left = None if timeout is None else timeout - (clock.monotonic() - begin)
        return self.take(name, iteration, max(0.0, left), self.name_missing(among))

    def name_missing(self, name: str) -> Callable[[float], str]:
        """For `take`: who has not arrived in the round of this name."""

        def overdue(_: float) -> str:
            timeout = self.options.barrier_timeout
            try:
                self.agents.connect(NAMING)
                absent = self.do(verbs.missing(self.membership.iteration, name, self.membership.roster))
            except (StoreLost, TimeoutError) as error:
                return f"nobody arrived within barrier_timeout={timeout:g}s: {error}"
            membership = self.membership
            who = f"initial rank{'s' if len(absent) > 1 else ''} {ranges(map(membership.slot_of, absent))}"
            when = self.phase.value + (f", iteration {membership.iteration}" if membership.iteration >= 0 else "")
            remedy = (
                "Check that all of them were started with the same WORLD_SIZE, or raise barrier_timeout."
                if membership.iteration < 0
                else "It hangs, is in a hook or in atomic() for long, or its host is gone: its log and its monitor's "
                "(monitor_process_logfile) say where it is. Raise barrier_timeout where it only needs longer."
            )
            return (
                f"{who} did not arrive within barrier_timeout={timeout:g}s ({when}, {len(membership.roster)} members). "
                f"{remedy}"
            )

        return overdue

    def iteration_store(self) -> Any:
        """This iteration's own store, connected on first use."""
        if self.store is None:
            self.store = self.agents.connect_to(*self.rendezvous)
        return self.store

    def record(self, how: Interruption, error: BaseException, words: str) -> InterruptionRecord:
        """Of an exception that interrupts this iteration."""
        place = where(error) or where(error.__cause__ or error)
        record = InterruptionRecord(self.membership.rank, how, self.membership.slot, words, where=place)
        return record.noticed(clock.monotonic(), clock.name())

    def request(self, error: RankShouldRestart) -> InterruptionRecord:
        """Of a restart that the function, or a hook before it, asks for."""
        words = in_words(error).removeprefix(RankShouldRestart.__name__).removeprefix(": ")
        return self.record(Interruption.REQUESTED, error, words)

    def interrupt(self, record: InterruptionRecord, abort: str = "") -> bool:
        """Tell the others; False: everybody had finished, so it changes nothing."""
        counts = self.do(verbs.interrupt(self.membership.iteration, record, abort))
        if not counts:
            log.warning("%s failed after everybody had finished, which changes nothing: %s", self.who, record)
        return counts

    def stood_at_once(self) -> bool:
        """Whether a soft timeout ended this iteration, and this rank had stood still nearly from its beginning."""
        until, entered = self.agents.thread.ran_until(self.membership.iteration), self.counts.entered
        if until is None:
            return False
        return stood_at_once(self.counts.pings, until - (entered or until), self.options.soft_timeout)

    def level(self) -> int:
        """What all ranks know is logged once, by the first rank."""
        first = self.placed.active_rank == 0 or (self.placed.active_world_size == 0 and self.placed.rank == 0)
        return logging.WARNING if first else logging.DEBUG

    def log_restart(self) -> None:
        """One line for every restart, on the first rank; that may be a process that has just joined."""
        took = self.fault.took(clock.monotonic())
        self.fault = Fault()
        if not (told := self.untold.tell(self.job.before)):
            return
        now, before = self.placed.active_world_size, self.size_before
        size = f"{now} rank{'s' if now != 1 else ''}{f' ({before} before)' if before else ''}"
        size = f"{now} of {before} rank{'s' if before != 1 else ''}" if now <= before else size
        log.log(self.level(), "%s; continuing with %s%s", told, size, took)
