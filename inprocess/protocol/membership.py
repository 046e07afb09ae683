"""What one member knows of the job: iteration, roster, its slot in the frame. Changed only by decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from inprocess.attribution import stretches, within
from inprocess.protocol.messages import FIRST_JOINER, Decision, Roster
from inprocess.protocol.repeats import ErrorStreak


@dataclass
class Membership:
    """One member's view. All live members of an iteration hold equal rosters (invariant I1).

    A founder's id is its *slot*: the rank it was started with. Who joins a running job gets an id that no member had
    before, and a slot that is free. Whenever somebody joins, the frame is the numbering of slots again.
    """

    #: this member's id, never used again
    member: int
    #: live members, ascending
    roster: tuple[int, ...]
    #: iteration in which this membership stands; -1 while joining
    iteration: int = -1
    #: this member's rank in the frame: the numbering of the last iteration that started, or of slots
    rank: int = 0
    #: number of ranks in the frame, reserves included
    world_size: int = 0
    #: ranks of the frame that are out of the job
    terminated: frozenset[int] = frozenset()
    #: ranks of the frame whose members joined since an iteration started
    fresh: frozenset[int] = frozenset()
    #: the last decision, for reports
    last: Decision = field(default_factory=Decision)
    #: members that the job has had; empty: the roster (that of a new monitor may be newer than its iteration)
    known: frozenset[int] = frozenset()
    #: the slots of those that joined: member -> slot
    slots: dict[int, int] = field(default_factory=dict)
    #: the errors of this call
    streak: ErrorStreak = field(default_factory=ErrorStreak)

    def __post_init__(self) -> None:
        self.known = self.known or frozenset(self.roster)

    @classmethod
    def founder(cls, member: int, founders: Iterable[int], world_size: int) -> Membership:
        """The membership at the start of a call: the frame is the numbering the processes were started with."""
        roster = tuple(sorted(founders))
        return cls(member, roster, rank=member, world_size=world_size)

    @classmethod
    def joiner(cls, member: int, roster: Roster) -> Membership:
        """The membership of a process that waits to join: it is not on the roster yet."""
        membership = cls(member, ())
        membership.jump(roster)
        return membership

    @property
    def slot(self) -> int:
        """This member's slot."""
        return self.slot_of(self.member)

    def slot_of(self, member: int) -> int:
        """The rank that a member has while everybody is there."""
        return self.slots.get(member, member)

    @property
    def taken(self) -> set[int]:
        """Places of live members."""
        return {self.slot_of(member) for member in self.roster}

    def apply(self, decision: Decision) -> None:
        """Go to the next iteration."""
        gone, joined = set(decision.removed), dict(decision.joined)
        stay = [member for member in self.roster if member not in gone]
        # applied twice, as by a monitor with a newer roster, it is the same
        self.roster = tuple(sorted({*stay, *joined}))
        self.known |= joined.keys()
        self.slots = self.slots | joined
        self.terminated, self.fresh = frozenset(decision.terminated), frozenset(decision.fresh)
        if joined:
            self.rank, self.world_size = self.slot, decision.slots
        self.iteration += 1
        self.last, self.streak = decision, self.streak.after(decision)

    def jump(self, roster: Roster) -> None:
        """Go to a much later iteration, as a monitor or before joining: what ranks have become it need not know."""
        before = set(self.roster)
        self.roster = within(roster.members)
        self.slots = self.slots | dict(roster.joined)
        self.known |= set(self.roster)
        self.iteration = roster.iteration
        self.last = Decision(removed=tuple(sorted(before.difference(self.roster))))

    def note(self, iteration: int) -> Roster:
        """The roster, for those who come later, or late."""
        joined = tuple((member, self.slots[member]) for member in self.roster if member in self.slots)
        return Roster(iteration, stretches(self.roster), joined)

    def strangers(self, decision: Decision) -> str:
        """What the decision names and this job cannot have, in words; empty where there is nothing."""
        members = sorted(set(decision.removed) - self.known)[:16]
        size = decision.slots or self.world_size
        ranks = [rank for rank in (*decision.terminated, *decision.fresh) if 0 < size <= rank][:16]
        stay = {self.slot_of(member) for member in set(self.roster).difference(decision.removed)}
        twice = [slot for member, slot in decision.joined if member not in self.roster and slot in stay][:16]
        found = [f"members {members}"] if members else []
        found += [f"ranks {ranks}"] if ranks else []
        return " and ".join(found + ([f"slots {twice} that are taken"] if twice else []))

    def started(self, rank: int, world_size: int) -> None:
        """The start round said go: the new numbering is the frame from here on."""
        self.rank, self.world_size, self.terminated, self.fresh = rank, world_size, frozenset(), frozenset()

    def become(self, other: Membership) -> None:
        """Take over everything from another membership: a process that joins did not know the job before."""
        vars(self).update(vars(other))

    @property
    def included(self) -> bool:
        """Whether this member is still in the job."""
        return self.member in self.roster

    @property
    def was_founder(self) -> bool:
        return self.member < FIRST_JOINER
