"""What one member knows of the job: iteration, roster, its place in the frame. Changed only by decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from inprocess.protocol.messages import Decision


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

    def started(self, rank: int, world_size: int) -> None:
        """The start round said go: the new numbering is the frame from here on."""
        self.rank, self.world_size, self.terminated = rank, world_size, frozenset()

    @property
    def included(self) -> bool:
        """Whether this member is still in the job."""
        return self.member in self.roster
