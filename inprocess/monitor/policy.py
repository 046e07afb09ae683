"""What a monitor process does about its rank: rules over what it knows, as data. Nothing here looks at a clock or acts.

Each rule says from which moment on it applies. ``decide`` returns those whose moment has come, ``wake_at`` the next
one, so the monitor can sleep until then; both read the same rules and cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.protocol.phases import AFTERWARDS, LEAVING, Phase
from inprocess.protocol.timing import LEASE_SHARE, SILENCE_SHARE, SURE_SHARE

__all__ = ["Action", "Kill", "Timeouts", "Report", "Snapshot", "LeaseWatch", "View", "decide", "wake_at"]


#: seconds between two questions of the watchdog to the main thread, at most
PACE_S = 0.5
#: whose limit it was, where it was no option's
BY_SECTION = "(limit of a section, in place of soft_timeout)"
MOVED_BY_SECTION = "(hard_timeout, moved by the limit of a section)"
IN_SECTION = "(in a section: halfway from hard_timeout to barrier_timeout, for which the others wait)"


@dataclass
class LeaseWatch:
    """Whether heartbeats do not get through, though no connection is lost: the store's host may stand still. It counts
    as lost at the same time as a connection that is silent. Times in seconds."""

    heartbeat_timeout: float
    #: since when it is looked closely
    since: float | None = None

    def look_at(self, left: float) -> float:
        """How long before that it is to be asked, with so much of the lease left."""
        return max(0.0, left - self._early)

    def is_sure(self, left: float, now: float) -> bool:
        if left > self._early:
            self.since = None
            return False
        self.since = now if self.since is None else self.since
        return now - self.since >= SURE_SHARE * self.heartbeat_timeout

    @property
    def _early(self) -> float:
        return (LEASE_SHARE - SILENCE_SHARE + SURE_SHARE) * self.heartbeat_timeout


@dataclass(frozen=True)
class Snapshot:
    """What the board shows of a rank, one consistent copy; times in ns of the monotonic clock."""

    progress: int
    ping: int = 0
    iteration: int = -1
    phase: Phase = Phase.JOIN
    reserve: bool = False
    atomic: bool = False
    hang_protection: bool = True
    #: 0: the option's value
    soft_timeout: int = 0
    answered: int = -2
    rank: int = 0
    left: bool = False
    #: for people only, nothing is decided by these
    steps: int = 0
    active: int = 0
    reserves: int = 0
    #: when the main thread was last asked whether it runs
    question: int = 0


@dataclass(frozen=True)
class Timeouts:
    """The options that matter here; all in nanoseconds."""

    soft: int
    hard: int
    lease: int
    #: between two questions to the main thread
    pace: int = 0
    #: within it the others wait for a rank, although it is in a section
    patience: int = 0

    @classmethod
    def of(
        cls,
        soft_timeout: float,
        hard_timeout: float,
        heartbeat_timeout: float,
        pace: float = 0.0,
        barrier_timeout: float = 0.0,
    ) -> Timeouts:
        """From seconds; ``pace`` is ``progress_watchdog_interval``."""
        patience = max(hard_timeout, (hard_timeout + barrier_timeout) / 2)  # then there is time to end it
        seconds = (soft_timeout, hard_timeout, LEASE_SHARE * heartbeat_timeout, min(pace, PACE_S), patience)
        return cls(*(int(each * 1e9) for each in seconds))

    def beaten_at(self, lease_until: int | None) -> float | None:
        """When the heartbeat was begun from which the lease counts (s); None: there is no lease."""
        return None if lease_until is None else (lease_until - self.lease) / 1e9


@dataclass(frozen=True)
class View:
    """What the monitor knows besides the board; times in ns of the same clock."""

    member: int
    limits: Timeouts
    #: iteration of the monitor's own membership
    iteration: int = -1
    #: when it saw that iteration interrupted; None: it is not
    interrupted_at: int | None = None
    #: when it last saw the rank inside ``atomic()`` since the interruption
    atomic_at: int = 0
    #: until when the others do not go on without this rank: ``limits.lease`` after the last successful heartbeat was
    #: begun; None: there was none yet, or there never were others
    lease_until: int | None = None
    #: since when the rank has had nobody to talk to: the store is lost, or the others removed this member
    cut_off_at: int | None = None
    #: no silence counts that began before this: the monitor itself had been stopped (a suspended job, say)
    awake_since: int = 0
    #: the last iteration for which a missing answer was reported
    reported: int = -2
    #: the rank is being killed already
    killed: bool = False


@dataclass(frozen=True)
class Report:
    """Interrupt this iteration."""

    iteration: int
    record: InterruptionRecord


@dataclass(frozen=True)
class Kill:
    """End the training process."""

    record: InterruptionRecord
    #: it must not run one step further: SIGKILL at once instead of SIGTERM and a time of grace
    at_once: bool = False


Action: TypeAlias = Report | Kill
#: from when on it applies, and what is to be done then: made only then, since a monitor asks several times per restart
Rule: TypeAlias = tuple[int, Callable[[], Action]]


def decide(now: int, seen: Snapshot, view: View) -> list[Action]:
    """What to do now, the first reason for each kind of action: at most one Report and one Kill."""
    due: dict[type, Action] = {}
    for moment, act in _rules(seen, view):
        if moment <= now:
            action = act()
            due.setdefault(type(action), action)
    return list(due.values())


def wake_at(seen: Snapshot, view: View) -> int | None:
    """The next moment at which `decide` has something to say, should nothing change until then."""
    return min((moment for moment, _ in _rules(seen, view)), default=None)


def _rules(seen: Snapshot, view: View) -> Iterator[Rule]:
    if seen.left or view.killed:
        return
    yield from _lease(seen, view)
    yield from _hard(seen, view)
    yield from _soft(seen, view)


def _soft(seen: Snapshot, view: View) -> Iterator[Rule]:
    """No progress: everybody restarts. Once per iteration, and not where it is interrupted already, or nobody waits."""
    iteration = max(seen.iteration, view.iteration)
    interrupted = view.interrupted_at is not None and view.iteration == iteration
    stands_by = seen.reserve and seen.phase is Phase.RUN
    if iteration < 0 or iteration <= view.reported or interrupted or stands_by or not seen.hang_protection:
        return
    soft, _ = _timeouts(seen, view)
    by = "(soft_timeout)" if soft == view.limits.soft else BY_SECTION
    yield _still_since(seen, view) + soft, partial(_report, seen, view, "no progress for", soft, by)
    if seen.ping and seen.phase is Phase.RUN:
        yield max(seen.ping, view.awake_since) + soft, partial(_report, seen, view, "no ping() for", soft, by)


def _hard(seen: Snapshot, view: View) -> Iterator[Rule]:
    """No progress, or no answer to an interruption: the process is ended. A rank that only waited for the others is
    released by the abort, makes progress again and answers."""
    soft, hard = _timeouts(seen, view)
    by = "(hard_timeout)" if soft == view.limits.soft else MOVED_BY_SECTION
    if seen.hang_protection:
        yield _still_since(seen, view) + hard, partial(_kill, seen, view, "no progress for", hard, by)
    if view.interrupted_at is None or _answered(seen, view.iteration) or seen.atomic:
        return
    if hard > view.limits.patience:
        hard, by = view.limits.patience, IN_SECTION
    moment = max(view.interrupted_at, view.atomic_at, view.awake_since) + hard
    yield moment, partial(_kill, seen, view, "asked to leave the function, it did not within", hard, by)


def _lease(seen: Snapshot, view: View) -> Iterator[Rule]:
    """The others are about to go on without this rank (or have done so): it must not run any more."""
    if seen.phase in LEAVING:
        return
    cut_off = view.cut_off_at is not None
    # a store that this rank has lost may be there for the others; who has left the function may take its time
    if view.lease_until is not None and not (cut_off and seen.phase in AFTERWARDS):
        yield view.lease_until, partial(_end_of_lease, seen, view)
    # who joins is in nobody's way, and waits for the store by itself, as long as barrier_timeout allows
    if view.cut_off_at is not None and seen.phase is not Phase.JOIN:
        act = partial(_kill, seen, view, "cut off from the others, it did not leave within", view.limits.hard)
        yield view.cut_off_at + view.limits.hard, act


def _still_since(seen: Snapshot, view: View) -> int:
    """From when on it is certain that the main thread does not run; no later than ``pace`` after it last did.

    A stamp is older than the last progress: it may have run until the question that it did not answer, or, where the
    watchdog cannot ask since the interpreter lock is held, until the next question was due.
    """
    asked = seen.question if seen.question > seen.progress else seen.progress + view.limits.pace
    return max(asked, seen.ping, view.awake_since)


def _timeouts(seen: Snapshot, view: View) -> tuple[int, int]:
    """Soft and hard timeout of a rank that nobody has interrupted; a section's own soft timeout moves the hard one by
    as much."""
    soft = seen.soft_timeout or view.limits.soft
    return soft, view.limits.hard + soft - view.limits.soft


def _answered(seen: Snapshot, iteration: int) -> bool:
    if seen.answered >= iteration or seen.iteration > iteration:
        return True
    return seen.iteration == iteration and seen.phase in AFTERWARDS


# --- what is to be done; ``what`` took so many nanoseconds, and whose limit that was


def _report(seen: Snapshot, view: View, what: str, took: int, by: str) -> Report:
    record = _record(seen, view, Interruption.SOFT_TIMEOUT, what, took, by)
    return Report(max(seen.iteration, view.iteration), record)


def _kill(seen: Snapshot, view: View, what: str, took: int, by: str = "(hard_timeout)") -> Kill:
    return Kill(_record(seen, view, Interruption.HARD_TIMEOUT, what, took, by))


def _end_of_lease(seen: Snapshot, view: View) -> Kill:
    what, by = "no heartbeat got through for", "(0.9 * heartbeat_timeout)"
    return Kill(_record(seen, view, Interruption.UNRESPONSIVE, what, view.limits.lease, by), at_once=True)


def _record(seen: Snapshot, view: View, kind: Interruption, what: str, took: int, by: str) -> InterruptionRecord:
    where = f"in phase {seen.phase.value!r}{', inside atomic()' if seen.atomic else ''}"
    message = f"{what} {took / 1e9:g} s {by}, {where}"
    return InterruptionRecord(seen.rank, kind, initial_rank=view.member, message=message, pings=seen.steps)
