"""What went wrong in the function, or in `initialize`, of this rank: what the log and the last error say of it.

One object per call, used by the main thread alone. Whether an error is a repeat is decided in ``protocol.repeats``.
"""

from __future__ import annotations

from collections import deque

from inprocess.attribution import Interruption, InterruptionRecord, is_echo
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import Decision
from inprocess.system import clock
from inprocess.system.errors import ErrorSnapshot, inside
from inprocess.system.logs import get_logger

__all__ = ["Failures", "record_of"]

log = get_logger("inprocess")
#: how many different errors are remembered as told
TOLD = 64


class Failures:
    """The exceptions of one rank."""

    def __init__(self, limit: int | None) -> None:
        self._max_repeats = limit
        #: how many times in a row the error of this iteration may come; None: for ever
        self.limit = limit
        #: type and line of the errors whose traceback is in the log
        self._told: deque[tuple[str, str]] = deque(maxlen=TOLD)
        self._snapshot: ErrorSnapshot | None = None
        #: of the iteration that ends: how many times in a row its error is the same; 0: it has none, or none counts
        self.repeats = 0
        #: the last error, until the function runs again: its frames are empty by then, what it refers to itself is not
        self.error: BaseException | None = None

    def note(self, error: BaseException, membership: Membership, pings: int) -> InterruptionRecord:
        """The function of this iteration raised."""
        snapshot = self._snapshot = ErrorSnapshot(error)
        record = record_of(snapshot, membership, pings)
        self.error = error
        if self._max_repeats is not None:
            self.repeats = membership.streak.count_with(record)
            self.limit = membership.streak.limit_with(record, self._max_repeats)
        return record

    def lines(self) -> list[str]:
        """The traceback of the error that was noted last, without source lines; outermost first."""
        return [] if self._snapshot is None else self._snapshot.places()

    def tell(self, who: str, record: InterruptionRecord) -> None:
        """Log the traceback of an error that is new. Of one that may only be the echo of another rank's: later."""
        if not is_echo(record):
            self._tell(who)

    def _tell(self, who: str) -> None:
        assert self._snapshot is not None
        key = (self._snapshot.words.partition(":")[0], self._snapshot.where)
        if key in self._told:
            return
        self._told.append(key)
        log.warning("%s: an error that is new in this call; its traceback, once:", who, extra={"trace": self._snapshot})

    def settle(self, who: str, decision: Decision) -> None:
        """The end round has decided what it was that ended the iteration."""
        if self._snapshot is None:
            return
        if decision.records and all(map(is_echo, decision.records)):
            self._tell(who)
        if self.repeats == decision.repeats == 2:
            ends = f"the job ends after {self.limit} of them, unless it made progress before"
            log.warning(
                "%s: the same error again, 2 times in a row without progress. From the third time on each restart "
                "waits, and %s. Its traceback:",
                who,
                ends,
                extra={"trace": self._snapshot},
            )

    def cause(self, decision: Decision) -> BaseException | None:
        """Of the RestartAbort with which the job ends: what the function of this rank raised last.

        A row of the same error is not explained by an error that does not count in it.
        """
        if self.error is None or (decision.repeats and not self.repeats):
            return None
        return self.error.with_traceback(inside(self.error.__traceback__))

    def begin(self) -> None:
        """Another iteration begins; what it is interrupted for before the function runs may still be that error."""
        self.repeats, self.limit, self._snapshot = 0, self._max_repeats, None

    def drop(self) -> None:
        """The function runs again, or the call is over."""
        self.error = None


def record_of(snapshot: ErrorSnapshot, membership: Membership, pings: int) -> InterruptionRecord:
    """Of what the function of this iteration raises, noticed now."""
    record = InterruptionRecord(
        membership.rank,
        Interruption.EXCEPTION,
        initial_rank=membership.slot,
        message=snapshot.words,
        where=snapshot.where,
        pings=pings,
    )
    return record.noticed(clock.monotonic(), clock.name())
