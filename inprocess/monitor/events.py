"""What threads of a monitor process tell its main thread, which decides what follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from inprocess.protocol.membership import Membership

__all__ = [
    "Connected",
    "Crashed",
    "Decided",
    "Dying",
    "Event",
    "HalfLoaded",
    "Interrupted",
    "Joined",
    "LinkLost",
    "Over",
    "Serving",
    "Spoken",
    "StacksWanted",
    "StandbyChanged",
    "Unbegun",
    "Woken",
]


@dataclass(frozen=True)
class Serving:
    """The base store is up."""

    port: int


@dataclass(frozen=True)
class Connected:
    """The store has been reached: heartbeats can begin as soon as the rank is in the job."""


@dataclass(frozen=True)
class Joined:
    """The first heartbeat is there."""


@dataclass(frozen=True)
class LinkLost:
    """The store is gone."""

    text: str


@dataclass(frozen=True)
class Crashed:
    """A thread ended with an error; ``option``: because of a wrong option or environment variable."""

    text: str
    option: bool = False


@dataclass(frozen=True)
class Decided:
    """Who is in the next iteration (``now``), after this one was interrupted; ``failed``: initial ranks."""

    iteration: int
    before: Membership
    now: Membership
    failed: frozenset[int]


@dataclass(frozen=True)
class Dying:
    """The main thread of the rank ends."""


@dataclass(frozen=True)
class HalfLoaded:
    """torch can only be imported by a new program."""


@dataclass(frozen=True)
class Woken:
    """Something changed that the rules look at."""


@dataclass(frozen=True)
class Interrupted:
    """All have agreed on how it goes on after this iteration; ``turn``: members in the roster before this one."""

    iteration: int
    turn: int


@dataclass(frozen=True)
class Unbegun:
    """Not everybody has joined yet."""


@dataclass(frozen=True)
class Spoken:
    """All has been said for a member, the store is not needed for it any more."""

    member: int


@dataclass(frozen=True)
class StandbyChanged:
    """Somebody more, or less, may need this standby."""


@dataclass(frozen=True)
class Over:
    """No member needs this host any more (``True``), or it has waited long enough."""

    complete: bool


@dataclass(frozen=True)
class StacksWanted:
    """The rank does not answer: somebody waits for its stacks from outside."""

    answer: Callable[[list[dict[str, Any]]], None]


Event: TypeAlias = (
    Serving
    | Connected
    | Joined
    | LinkLost
    | Crashed
    | Decided
    | Dying
    | HalfLoaded
    | Interrupted
    | Woken
    | Unbegun
    | Spoken
    | StandbyChanged
    | Over
    | StacksWanted
)
