"""What a rank knows about itself and the job, as user hooks see it. Plain data: nothing here decides anything."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

__all__ = ["FrozenState", "Mode", "State", "Status"]


@enum.unique
class Mode(enum.Enum):
    """What a rank does in an iteration."""

    INITIALIZED = "initialized"  #: started; no ranks have been assigned yet
    ACTIVE = "active"  #: calls the wrapped function
    INACTIVE = "inactive"  #: a reserve rank: waits, ready to be activated by a restart
    TERMINATED = "terminated"  #: out of the job for good


class Status(enum.Enum):
    """The older generation's word for :class:`Mode`; ``state.status`` and ``state.mode`` always agree."""

    UNINITIALIZED = "initialized"
    INITIALIZED = "initialized"  # another name of the member above, so either reads naturally
    ACTIVE = "active"
    INACTIVE = "inactive"
    TERMINATED = "terminated"


@dataclasses.dataclass(kw_only=True)
class State:
    """A rank's place in the job. Mutable: rank assignments write to it.

    ``freeze()`` gives the read-only form that is passed to all other hooks.
    """

    #: rank among all members of this iteration, active and inactive: 0 .. world_size - 1
    rank: int
    #: number of members of this iteration, active and inactive
    world_size: int
    #: rank among those that call the function, 0 .. active_world_size - 1; None on a reserve rank
    active_rank: int | None = None
    #: number of members that call the function; 0 before ranks have been assigned
    active_world_size: int = 0
    #: the rank this process was started with
    initial_rank: int
    #: the world size this process was started with
    initial_world_size: int
    #: counts the runs of the function within one call: 0, 1, 2, ...
    iteration: int = 0
    #: what this rank does in this iteration
    mode: Mode = Mode.INITIALIZED
    #: what the function raised on this rank in this iteration, if it did; never copied
    fn_exception: BaseException | None = dataclasses.field(default=None, repr=False)

    @property
    def status(self) -> Status:
        """The older generation's view of ``mode``; setting it sets ``mode``."""
        return Status(self.mode.value)

    @status.setter
    def status(self, value: Status) -> None:
        self.mode = Mode(Status(value).value)

    def freeze(self) -> FrozenState:
        """A read-only shallow copy."""
        return FrozenState(**_fields(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenState:
    """The read-only form of :class:`State`, with the same fields. ``dataclasses.replace`` makes a changed copy."""

    rank: int
    world_size: int
    active_rank: int | None = None
    active_world_size: int = 0
    initial_rank: int
    initial_world_size: int
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: BaseException | None = dataclasses.field(default=None, repr=False)

    @property
    def status(self) -> Status:
        """The older generation's view of ``mode``."""
        return Status(self.mode.value)

    def freeze(self) -> FrozenState:
        """The state itself: it is read-only already."""
        return self

    def thaw(self) -> State:
        """A mutable shallow copy."""
        return State(**_fields(self))


def _fields(state: State | FrozenState) -> dict[str, Any]:
    # dataclasses.asdict would copy the exception, which not every exception survives
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
