"""What one member knows of the job: iteration, roster, its place in the frame. Changed only by decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from inprocess.protocol.messages import Decision, Roster


@dataclass
class Book:
    """One member's view. All live members of an iteration hold equal rosters (invariant I1)."""

    #: this member's id: a founder's initial rank, never reused
    member: int
    #: live members, ascending
    roster: tuple[int, ...]
    #: iteration in which this book stands; -1 while joining
    iteration: int = -1
    #: this member's rank in the frame: the numbering of the last iteration that started
    rank: int = 0
    #: number of ranks in the frame, reserves included
    world_size: int = 0
    #: ranks of the frame that are out of the job
    terminated: frozenset[int] = frozenset()
    #: the last decision, for reports
    last: Decision = field(default_factory=Decision)
    #: members that the call began with; empty: the roster (that of a new monitor may be newer than its iteration)
    founders: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.founders = self.founders or frozenset(self.roster)

    @classmethod
    def founder(cls, member: int, founders: Iterable[int], world_size: int) -> Book:
        """The book at the start of a call: the frame is the numbering the processes were started with."""
        roster = tuple(sorted(founders))
        return cls(member, roster, rank=member, world_size=world_size)

    def apply(self, decision: Decision) -> None:
        """Go to the next iteration."""
        gone = set(decision.removed)
        self.roster = tuple(member for member in self.roster if member not in gone)
        self.terminated = frozenset(decision.terminated)
        self.iteration += 1
        self.last = decision

    def jump(self, roster: Roster) -> None:
        """Go to a much later iteration, as a monitor: what ranks have become meanwhile it need not know."""
        gone = set(roster.removed)
        self.roster = tuple(member for member in sorted(self.founders) if member not in gone)
        self.iteration = roster.iteration
        self.last = Decision(removed=roster.removed)

    def strangers(self, decision: Decision) -> str:
        """Members and ranks that the decision names and the job never had, in words; empty where there are none."""
        members = sorted(set(decision.removed) - self.founders)[:16]
        ranks = [rank for rank in decision.terminated if 0 < self.world_size <= rank][:16]
        found = [f"members {members}"] if members else []
        return " and ".join(found + ([f"ranks {ranks}"] if ranks else []))

    def started(self, rank: int, world_size: int) -> None:
        """The start round said go: the new numbering is the frame from here on."""
        self.rank, self.world_size, self.terminated = rank, world_size, frozenset()

    @property
    def included(self) -> bool:
        """Whether this member is still in the job."""
        return self.member in self.roster
