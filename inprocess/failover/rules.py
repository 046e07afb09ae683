"""Whether a job goes on after the host of its store is lost, and with whom: what an arbiter decides. Pure.

An arbiter is in the monitor process of a standby. Each training process has a connection to it that lies idle, so the
kernel tells it who has certainly ended. A member that loses the store leaves its function, and then votes, once, at
the first standby that answers; it votes elsewhere only where the arbiter it voted at has certainly ended.

No two jobs come of that, and no function runs on beside the new one (I2):

* a member that votes has left its function, and one whose connection ended has ended;
* who is neither here nor certainly gone has been stopped by the time ``patience`` is over: where the store is lost for
  it as well, by its lease; where it still has the store, because a store that hears less than half of the members
  closes itself (``hears_enough``), which takes the lease from them;
* so the others go on without it only where they are more than half of those that may live: then the side with the
  store is less than half, and has closed it.

``gone`` must not count who ended *after* it had gone on with others, on whichever side: a member tells all arbiters and
its old store that it votes before it does, and all arbiters that it knows that it returns. A standby that has been
silent for ``heartbeat_timeout`` may not be among these any more: from then on, an end that it sees says nothing. One
that stood still for longer finds the ends of all those that have completed meanwhile. ``completed`` is no verdict of
its own either: only where more than half know of it.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from inprocess.attribution import ranges, stretches, within
from inprocess.protocol.messages import FailoverOutcome, Verdict, Vote

__all__ = [
    "Arbiter",
    "ENDED",
    "MAX_HELLO_BYTES",
    "MAX_MESSAGE_BYTES",
    "MAX_UNANSWERED",
    "hears_enough",
    "patience",
    "standbys",
]


def standbys(roster: Sequence[int], count: int, host: int) -> tuple[int, ...]:
    """The members whose monitors stand by in an iteration; the first to ask comes first.

    Spread evenly from the store's ``host`` on, and the last first: ranks of one host mostly follow each other.
    """
    size = len(roster)
    start = roster.index(host) if host in roster else 0
    chosen = {roster[(start + number * size // (count + 1)) % size] for number in range(1, count + 1) if size}
    return tuple(sorted(chosen - {host}, reverse=True))


def hears_enough(roster: Collection[int], heard: Collection[int], gone: Collection[int]) -> bool:
    """Whether whoever serves the store hears at least half of the members that may live. Otherwise the others may have
    gone on elsewhere, or are about to."""
    live = set(roster).difference(gone)
    return 2 * len(live.intersection(heard)) >= len(live)


def patience(heartbeat_timeout: float, heartbeat_interval: float) -> float:
    """Seconds after the loss of the store until whoever has not voted has certainly been stopped: the store closes
    itself, and then the last lease runs out."""
    return 2 * (heartbeat_timeout + heartbeat_interval)


@dataclass
class Arbiter:
    """One per standby. Told what happens, asked what follows; times in seconds of its own clock."""

    #: see `patience`
    patience: float
    #: after so long without a heartbeat of this standby the others go on without it (seconds)
    heartbeat_timeout: float
    #: whether any member has come
    met: bool = False
    #: those that have certainly ended, and did not go on with the old store before
    gone: set[int] = field(default_factory=set)
    votes: dict[int, Vote] = field(default_factory=dict)
    #: those that have voted at another one, which may go on with them: what becomes of them later says nothing here
    elsewhere: set[int] = field(default_factory=set)
    #: those that have read that an iteration is completed, and may have returned
    completed: set[int] = field(default_factory=set)
    #: that iteration
    last: int = -1
    #: when this standby lost the store
    lost_at: float = math.inf
    #: when somebody voted first
    asked_at: float = math.inf
    verdict: Verdict | None = None

    def lost(self, now: float) -> None:
        self.lost_at = min(self.lost_at, now)

    def meet(self, member: int) -> None:
        """A second process with this id is a new one only after the first has gone."""
        self.met = True
        self.gone.discard(member)

    def leave(self, member: int, now: float, heard: float | None, ended: bool = True) -> None:
        """Its connection ended: its process has ``ended``, or needs no store any more; or only the connection broke.

        ``heard``: when the last heartbeat of this standby that got through in time was begun; None: it has no lease.
        Who ends when that is too long ago, without a vote here, may have gone on without this standby, and others with
        it, that do so still: it does not make them fewer.
        """
        voted = self.votes.pop(member, None) is not None
        uncertain = self.elsewhere | self.completed
        counted_on = heard is None or now <= heard + self.heartbeat_timeout
        if ended and (voted or (member not in uncertain and counted_on)):
            self.gone.add(member)

    def turn_away(self, member: int) -> None:
        """It is about to vote at another one. It says so first: its end, should that follow, is seen later."""
        self.elsewhere.add(member)

    def vote(self, member: int, vote: Vote, now: float) -> None:
        self.asked_at = min(self.asked_at, now)
        self.elsewhere.discard(member)
        self.votes[member] = vote

    def complete(self, member: int, iteration: int) -> bool:
        """A member that is about to return says so, and from which iteration: only who returned from the same one may
        return as well. False: the others have gone on without it.

        From here on nobody goes on here. But others may, where nobody has said so: it may return only if all arbiters
        have taken it in or ended, or if it has the store still when one that hears too little has closed itself.
        """
        self.completed.add(member)
        self.last = max(self.last, iteration)
        return self.verdict is None or self.verdict.outcome is not FailoverOutcome.GO

    def decide(self, now: float) -> Verdict | None:
        """The verdict, once there is one; it never changes."""
        if self.verdict is None and self.votes:
            self.verdict = self._decide(now)
        return self.verdict

    def is_needed(self, connected: Collection[int], roster: Collection[int]) -> bool:
        """Whether any of those that are connected may yet learn something here, or goes on here.

        The connection of one that is cut off never ends. So it does not count by itself: only where those that may come
        here are enough for a verdict that lets anybody go on.
        """
        here = set(connected).intersection(roster) - self.elsewhere
        if self.verdict is not None:
            going_on = here.intersection(self.votes)
            return bool(
                {FailoverOutcome.GO: going_on, FailoverOutcome.COMPLETED: here - self.completed}.get(
                    self.verdict.outcome
                )
            )
        return bool(here) and 2 * len(here | self.completed) > len(set(roster) - self.gone)

    def wake_at(self) -> float:
        """When `decide` may have something new to say, should nothing happen until then."""
        if self.verdict is not None or not self.votes:
            return math.inf
        return (self.asked_at if math.isinf(self.lost_at) else self.lost_at) + self.patience

    def _decide(self, now: float) -> Verdict | None:
        overdue = now >= self.wake_at()
        newest = max((vote.roster for vote in self.votes.values()), key=lambda roster: roster.iteration)
        roster = set(within(newest.members))
        gone = roster.intersection(self.gone)
        present = roster.intersection(self.completed.union(self.votes))
        absent = roster - present - gone
        enough = bool(present) and 2 * len(present) > len(roster) - len(gone)
        if self.completed and enough:
            return Verdict(FailoverOutcome.COMPLETED, iteration=self.last)
        if math.isinf(self.lost_at):
            reason = "the store is lost for this rank alone: the others have it still"
            return Verdict(FailoverOutcome.REFUSED, reason=reason) if overdue else None
        if absent and not overdue:
            return None
        if enough:
            slots = [self.votes[member].slot for member in present]
            return Verdict(FailoverOutcome.GO, stretches(slots), newest.iteration)
        where = dict(newest.joined)
        missing = ranges(where.get(member, member) for member in absent)
        return Verdict(
            FailoverOutcome.REFUSED,
            reason=f"the store is lost, and only {len(present)} of {len(roster)} ranks met here: initial ranks "
            f"{missing} may go on elsewhere, so these must not",
        )


#: longest vote or verdict: the roster of a large job with many gaps (bytes)
MAX_MESSAGE_BYTES = 1 << 22
#: longest line of a client that has not shown yet that it is a member (bytes)
MAX_HELLO_BYTES = 1 << 10
#: most that a member says without waiting for an answer
MAX_UNANSWERED = 16
#: the other end's kernel says that nobody is there; an unreachable network, say, tells nothing
ENDED = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE})
