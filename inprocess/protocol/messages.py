"""What members write into the store: frozen dataclasses, JSON on the wire. Parsing is strict; nothing here does IO.

Values come over the network, and whoever reaches the store can write into it. So each field is checked, alone and
against the others, an unknown one is refused, and what is not a value of ours is a ``BadMessage`` that names the key.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from inprocess.attribution import WHERE_LIMIT, InterruptionRecord, one_line, within
from inprocess.exception import BadMessage

__all__ = [
    "MAX_RANKS",
    "MAX_RECORDS",
    "MAX_STUCK",
    "Arrival",
    "BadMessage",
    "Decision",
    "JoinMode",
    "FailoverOutcome",
    "ArrivalKind",
    "Outcome",
    "Roster",
    "Spot",
    "Start",
    "Ticket",
    "Verdict",
    "Vote",
    "dump",
]

#: a decision names at most this many interruption records; the rest are counted
MAX_RECORDS = 32
MAX_RANKS = 1 << 24
#: a decision names at most this many members that did not wait
MAX_STUCK = 8
#: members from here on joined a running job; below it are founders, whose ids are ranks
FIRST_JOINER = 1 << 20

#: longest reason for which everybody leaves, and longest name of a writer (characters)
REASON_LIMIT, BY_LIMIT = 2000, 400


#: no counter of ours comes near it
MAX_COUNT = 1 << 53
#: longest wait before an iteration (ms)
MAX_PAUSE_MS = 5000


class JoinMode(enum.Enum):
    """How a process comes to the job, as its launcher says."""

    #: together with the others, and into no job that runs
    FOUND = "found"
    #: together with the others, or after one that died: the launcher names the job, and does not tell which
    EITHER = "either"
    #: after one that died: in its place, whether the job has begun or not
    REPLACE = "replace"
    #: beside those that there are: only once the job has begun
    GROW = "grow"


class ArrivalKind(enum.Enum):
    """How a member is accounted for in a round."""

    #: start round: took a rank (active or reserve)
    RANK = "rank"
    #: start round: the rank assignment discarded it
    DISCARDED = "discarded"
    #: end round: goes on
    ALIVE = "alive"
    #: end round (and start round): goes away by its own decision
    LEFT = "left"
    #: said by its monitor, or by the member that watches it
    DEAD = "dead"


@dataclass(frozen=True)
class Arrival:
    """One member's entry in a round."""

    kind: ArrivalKind
    #: start round: the rank taken; end round: the rank in the last numbering that started (the frame)
    rank: int | None = None
    #: number of ranks in that numbering, reserves included
    world_size: int | None = None
    #: start round: number of ranks that will call the function
    active_world_size: int | None = None
    #: start round: the rank among the active ones, None for a reserve
    active_rank: int | None = None
    #: who wrote this entry; tells two processes apart that speak for the same member
    by: str = ""
    #: end round: the rank that this member has while everybody is there
    slot: int | None = None
    #: end round: it joined, and no iteration has started since
    fresh: bool = False
    #: end round: it raised an exception, the same one for so many times in a row; 0: it raised none
    repeats: int = 0
    #: end round: its ``max_repeats``, where that is reached; 0: it is not
    limit: int = 0
    #: end round: it made progress in this iteration; some iteration of this call did before
    progressed: bool = False
    ran: bool = False
    #: end round, after a soft timeout: where its main thread was when it learned of that, and whether it waited there
    where: str = ""
    waits: bool = False
    #: end round, after a soft timeout: it stood there nearly from the beginning, and so ended so many iterations in a
    #: row; 0: it had done something, has returned, or does not count
    hangs: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "by", one_line(self.by, BY_LIMIT))
        object.__setattr__(self, "where", one_line(self.where, WHERE_LIMIT))


@dataclass(frozen=True)
class Spot:
    """Where a member's main thread is, such as ``train.py:41 in step``, and whether it waits for others there."""

    where: str = ""
    waits: bool = False


@dataclass(frozen=True)
class Start:
    """The start round's verdict."""

    go: bool
    #: number of ranks that call the function; 0 where ``go`` is false, or where all are reserves that wait
    active_world_size: int = 0


@dataclass(frozen=True)
class Outcome:
    """How an iteration ended: one compare-and-set, the same for everybody."""

    completed: bool
    #: the first interruption that was recorded
    cause: InterruptionRecord | None = None
    #: completed: members (reserves) that were gone by then
    removed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The end round's verdict: who is in the next iteration, as a difference to the last roster."""

    #: members that are out of the job
    removed: tuple[int, ...] = ()
    #: ranks of the frame whose members are out; everything since the frame began
    terminated: tuple[int, ...] = ()
    #: interruption records of the iteration, the first MAX_RECORDS
    records: tuple[InterruptionRecord, ...] = ()
    #: number of records, also beyond the cap
    record_count: int = 0
    #: not empty: everybody leaves, for this reason
    abort: str = ""
    #: members that join now, each with its slot: (member, slot). Then everybody is back in its slot, so the frame
    #: is the numbering of slots ...
    joined: tuple[tuple[int, int], ...] = ()
    #: ... with so many of them (0: nobody joins, the frame stays), free ones are ``terminated``
    slots: int = 0
    #: ranks of the frame whose members have joined since an iteration started
    fresh: tuple[int, ...] = ()
    #: the iteration ended with the same error for so many times in a row; 0: it does not count
    repeats: int = 0
    #: how long the next iteration waits before it starts (ms)
    pause: int = 0
    #: some member made progress in this iteration; some member knows that one before did
    progressed: bool = False
    ran: bool = False
    #: after a soft timeout: who did not wait for others, the first MAX_STUCK, each with its place in the code; empty
    #: there: it could not say
    stuck: tuple[InterruptionRecord, ...] = ()
    #: number of those, also beyond the cap, and of members that waited
    stuck_count: int = 0
    waiting: int = 0
    #: the iteration ended with the same hang, before anybody had done anything, for so many times in a row; 0: it does
    #: not count
    hangs: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "abort", one_line(self.abort, REASON_LIMIT))


@dataclass(frozen=True)
class Roster:
    """Who is in the job at an iteration: for a process that was out of reach while the verdicts before it went, and
    for one that joins."""

    #: -1: before the first
    iteration: int = -1
    #: the members, as closed ranges: (first, last)
    members: tuple[tuple[int, int], ...] = ()
    #: those of them that joined, each with its slot: (member, slot)
    joined: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Ticket:
    """A process that wants to join a running job."""

    #: its RANK: the slot it takes if that is free
    slot: int
    #: its WORLD_SIZE: it takes any free slot below, where its own is taken
    world_size: int
    by: str = ""
    #: it has joined, or does not want to any more
    closed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "by", one_line(self.by, BY_LIMIT))


@dataclass(frozen=True)
class Vote:
    """A member that has lost the store, and left its function."""

    #: the rank that it has while everybody is there
    slot: int
    #: the roster that it knows, as in `Roster`
    iteration: int = -1
    members: tuple[tuple[int, int], ...] = ()
    joined: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, slot: int, roster: Roster) -> Vote:
        return cls(slot, roster.iteration, roster.members, roster.joined)

    @property
    def roster(self) -> Roster:
        return Roster(self.iteration, self.members, self.joined)


class FailoverOutcome(enum.Enum):
    """What becomes of a job whose store is lost."""

    #: it goes on with another store
    GO = "go"
    #: it was completed before
    COMPLETED = "completed"
    #: it does not go on here
    REFUSED = "refused"


@dataclass(frozen=True)
class Verdict:
    """What an arbiter decides, the same for all that ask it."""

    outcome: FailoverOutcome
    #: go: the slots of the members that go on, as closed ranges
    slots: tuple[tuple[int, int], ...] = ()
    #: go: the last iteration that one of them knew of
    iteration: int = -1
    #: go: where the new store is served: the standby's slot, and the port
    host: int = 0
    port: int = 0
    #: refused: why
    reason: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", one_line(self.reason, REASON_LIMIT))

    @property
    def members(self) -> tuple[int, ...]:
        """Go: who begins anew, by slot."""
        return within(self.slots)


Message: TypeAlias = Arrival | Start | Outcome | Decision | Roster | Ticket | Vote | Verdict | InterruptionRecord


def dump(message: Message) -> str:
    """The message as compact JSON."""
    return _ENCODER.encode(_encode(message))


_ENCODER = json.JSONEncoder(separators=(",", ":"), sort_keys=True)
#: of each kind of message: names of its fields, and their defaults
_DEFAULTS: dict[type, list[tuple[str, Any]]] = {
    kind: [(field.name, field.default) for field in dataclasses.fields(kind)] for kind in get_args(Message)
}


def _encode(message: Message) -> dict[str, Any]:
    """Only the fields that do not have their default."""
    if isinstance(message, InterruptionRecord):
        return message.to_dict()
    return {
        name: _encode_value(value)
        for name, default in _DEFAULTS[type(message)]
        if (value := getattr(message, name)) != default
    }


def _encode_value(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, InterruptionRecord):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_encode_value(item) for item in value]
    return value
