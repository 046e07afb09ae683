"""The same error again and again: how many times in a row, how long the restart waits for that, and when it ends.

A repeat is an exception with the type, the line and the number of pings of the one before, in an iteration in which no
rank made progress. Each member counts by itself; what it finds travels with its entry in the end round, and the verdict
of that round makes it the same for all. Pure.

An iteration with progress sets the count back. One that ended for any other reason than exceptions (a death, a hang, a
process that joins) leaves it as it is, and so does the loss of the store. A standstill that an exception explains,
since its clean-up waited for the others, is an exception.

Hangs have a count of their own. One counts where, in an iteration of a call that never made progress, every rank stood
still nearly from the beginning, without a ping(), and none had returned; it is the same again where a rank stands at a
line where one stood in the iteration before. Of ranks that wait for others only then, where all do. Anything else that
ends an iteration, or changes the roster, sets that count back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from inprocess.attribution import (
    MESSAGE_LIMIT,
    RETURNED,
    Interruption,
    InterruptionRecord,
    is_error,
    standstill,
    summary,
)
from inprocess.protocol.messages import MAX_PAUSE_MS, Arrival, Decision

__all__ = [
    "TRIES",
    "Finding",
    "ErrorStreak",
    "explains_standstill",
    "find",
    "hangs",
    "hopeless_hang",
    "pause",
    "stood_at_once",
]

#: what only an edit of the program mends, in an iteration without a ping() of a call that never made progress: it may
#: come so many times in a row
MISTAKES = frozenset(
    {
        "AttributeError",
        "ImportError",
        "IndentationError",
        "ModuleNotFoundError",
        "NameError",
        "NotImplementedError",
        "OptionError",
        "RestartError",
        "SyntaxError",
        "TypeError",
        "UnboundLocalError",
    }
)
TRIES = 3
#: from which repeat on the restart waits, and how long at first; doubled with each more (ms)
PATIENCE, FIRST_PAUSE_MS = 3, 50
#: so long, and for half of its soft timeout, a rank may have run in the function before it hung: longer, and it is
#: perhaps a training without ping() (seconds)
AT_ONCE_S = 30.0
_PROGRESS = "Progress is a commit of a LiveState, an atomic() that was left, or 60 s inside the function"


class Error(NamedTuple):
    """What makes two exceptions the same."""

    kind: str
    where: str
    pings: int


@dataclass(frozen=True)
class ErrorStreak:
    """What a member knows of the errors of this call. Changed only by decisions."""

    #: iterations in a row that ended with the same error; 0: the last one that counts made progress, or none does yet
    count: int = 0
    #: the exceptions of the last of them
    errors: frozenset[Error] = frozenset()
    #: some iteration of this call has made progress
    progressed: bool = False
    #: iterations in a row up to now that ended with the same hang, and the lines where ranks hung in the last of them
    hangs: int = 0
    hung: frozenset[str] = frozenset()

    def count_with(self, record: InterruptionRecord) -> int:
        """How many times in a row it would be with this one."""
        return self.count + 1 if _identity(record) in self.errors else 1

    def limit_with(self, record: InterruptionRecord, limit: int) -> int:
        """How many times in a row it may come, where ``max_repeats`` is ``limit``."""
        return min(limit, TRIES) if not self.progressed and _is_mistake(record) else limit

    def hangs_with(self, where: str) -> int:
        """How many times in a row it would be where a rank, which had done nothing before, hangs at this line."""
        if self.progressed or not where or where == RETURNED:
            return 0
        return self.hangs + 1 if where in self.hung else 1

    def after(self, decision: Decision) -> ErrorStreak:
        """What is known with the verdict on an iteration."""
        progressed = self.progressed or decision.ran or decision.progressed
        if decision.progressed:
            return ErrorStreak(progressed=progressed)
        if decision.hangs:
            hung = frozenset(record.where for record in decision.stuck)
            return ErrorStreak(self.count, self.errors, progressed, decision.hangs, hung)
        if not decision.repeats:
            return ErrorStreak(self.count, self.errors, progressed)
        return ErrorStreak(decision.repeats, frozenset(map(_identity, _causes(decision.records))), progressed)


class Finding(NamedTuple):
    """What an end round finds out; see the fields of `Decision`."""

    repeats: int
    pause: int
    progressed: bool
    ran: bool
    abort: str


def find(alive: Iterable[Arrival], records: Sequence[InterruptionRecord]) -> Finding:
    """From what the members say that stay, and why the iteration ended."""
    said = list(alive)
    progressed = any(arrival.progressed for arrival in said)
    ran = any(arrival.ran for arrival in said)
    explained = explains_standstill(said, records)
    others = any(
        record.interruption is not Interruption.EXCEPTION
        and not (explained and record.interruption is Interruption.SOFT_TIMEOUT)
        for record in records
    )
    if progressed or others or not records:
        return Finding(0, 0, progressed, ran, "")
    repeats = max((arrival.repeats for arrival in said), default=0)
    # of those whose patience is at an end, the least patient one
    limit = min((arrival.limit for arrival in said if arrival.limit), default=0)
    if not limit:
        return Finding(repeats, pause(repeats), False, ran, "")
    return Finding(repeats, MAX_PAUSE_MS, False, ran, "" if ran else _hopeless(repeats, limit, records))


def explains_standstill(said: Iterable[Arrival], records: Sequence[InterruptionRecord]) -> bool:
    """Whether nobody made progress since a rank handled an error, while it and all others waited for each other."""
    waited = all(arrival.waits or arrival.where == RETURNED for arrival in said)
    return waited and any(map(is_error, records))


def stood_at_once(pings: int, ran: float, soft_timeout: float) -> bool:
    """Whether a rank that a soft timeout found had done nothing; ``ran``: from entry to standstill (seconds)."""
    return not pings and ran <= min(AT_ONCE_S, soft_timeout / 2)


def hangs(alive: Iterable[Arrival], records: Sequence[InterruptionRecord]) -> int:
    """How many times in a row a rank has hung at the same line, where all members stay; 0: it does not count."""
    said = list(alive)
    if any(record.interruption is not Interruption.SOFT_TIMEOUT for record in records):
        return 0
    # who waits outside of the program's code, as a reserve does, has nothing to say
    counts = all(arrival.hangs or (arrival.waits and not arrival.where) for arrival in said)
    if not counts or any(arrival.progressed or arrival.ran for arrival in said):
        return 0
    named = [arrival for arrival in said if not arrival.waits] or said
    return max((arrival.hangs for arrival in named), default=0)


def hopeless_hang(
    count: int, records: Sequence[InterruptionRecord], stuck: Sequence[InterruptionRecord], total: int, waiting: int
) -> str:
    """Why the job ends after so many hangs in a row; the rest as for `standstill`. Empty: it does not yet."""
    if count < TRIES:
        return ""
    return (
        f"the same hang {count} times in a row before the first ping(), and no iteration of this call ever made "
        f"progress: {standstill(records, stuck, total, waiting)}. What is waited for there never comes, such as a rank "
        "of a world size from before the restart: mend that. Where it only takes long, raise soft_timeout, or enclose "
        "it in call.section(name, timeout=...) or call.disable_hang_protection(). max_repeats=None restarts for ever. "
        f"{_PROGRESS}"
    )


def pause(count: int) -> int:
    """How long the restart waits after so many in a row (ms)."""
    if count < PATIENCE:
        return 0
    return min(MAX_PAUSE_MS, FIRST_PAUSE_MS << min(count - PATIENCE, 16))


def _hopeless(count: int, limit: int, records: Sequence[InterruptionRecord]) -> str:
    times = "once" if count == 1 else f"{count} times in a row"
    remedy = "Fix the error, or raise max_repeats; max_repeats=None restarts for ever. "
    if limit == TRIES and any(map(_is_mistake, _causes(records))):
        remedy = f"Fix the error: one of the program before its first ping() may come {TRIES} times at most. "
    return (
        f"the same error {times}, and no iteration of this call ever made progress (max_repeats={limit}): "
        f"{summary(_causes(records), longest=MESSAGE_LIMIT)}. {remedy}"
        f"{_PROGRESS}"
    )


def _identity(record: InterruptionRecord) -> Error:
    return Error(_kind(record), record.where, record.pings)


def _kind(record: InterruptionRecord) -> str:
    return record.message.partition(":")[0]


def _is_mistake(record: InterruptionRecord) -> bool:
    return not record.pings and _kind(record) in MISTAKES


def _causes(records: Sequence[InterruptionRecord]) -> Sequence[InterruptionRecord]:
    """Without what ranks see of another one's failure."""
    return list(filter(is_error, records)) or records
