"""The store operations that verbs yield. ``stores.driver`` carries them out over a store, the simulator over a dict."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar


@dataclass(frozen=True)
class Set:
    key: str
    value: str


@dataclass(frozen=True)
class Add:
    """Add ``amount`` to a counter (absent counts as 0); returns the new value. Adding 0 reads it."""

    key: str
    amount: int


@dataclass(frozen=True)
class Claim:
    """Compare-and-set: write ``value`` if the key is absent, or holds ``instead``. Returns what it holds then (bytes).

    Nobody waits for a key that is written ``instead`` of something, or is not ``awaited``: such a claim is one
    operation in every store, so nothing that is written after it is lost.
    """

    key: str
    value: str
    instead: str = ""
    awaited: bool = True


@dataclass(frozen=True)
class Read:
    """What the key holds (bytes), or None if it is absent. Never waits."""

    key: str


@dataclass(frozen=True)
class ReadAll:
    """What all these keys hold (list of bytes); each of them is known to exist."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class Exist:
    """Whether all these keys exist."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class Wait:
    """Wait until the key exists; returns what it holds (bytes), or None after ``timeout`` seconds (None: no limit).

    Only followers and guardians yield it: it occupies their connection.
    """

    key: str
    timeout: float | None = None


@dataclass(frozen=True)
class Delete:
    key: str


@dataclass(frozen=True)
class Pause:
    """Let ``seconds`` pass. Only guardians yield it, and those that wait to join."""

    seconds: float


@dataclass(frozen=True)
class Now:
    """The driver's monotonic clock, in seconds."""


Op: TypeAlias = Set | Add | Claim | Read | ReadAll | Exist | Wait | Delete | Pause | Now
T = TypeVar("T")
#: a verb: yields operations, is sent their answers, returns its result
Verb: TypeAlias = Generator[Op, Any, T]
