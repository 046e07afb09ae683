"""What a rank knows about itself and the job, as user hooks see it. Plain data: nothing here decides anything."""

from __future__ import annotations

import dataclasses
import enum
import os
from typing import Any

from .exception import OptionError

__all__ = ["FrozenState", "Mode", "State", "Status"]


@enum.unique
class Mode(enum.Enum):
    """What a rank does in an iteration."""

    INITIALIZED = "initialized"  #: started; no ranks have been assigned yet
    ACTIVE = "active"  #: calls the wrapped function
    INACTIVE = "inactive"  #: a reserve rank: waits, ready to be activated by a restart
    TERMINATED = "terminated"  #: out of the job for good


class Status(enum.Enum):
    """nvidia-resiliency-ext 0.2's word for :class:`Mode`; ``state.status`` and ``state.mode`` always agree."""

    INITIALIZED = "initialized"
    UNINITIALIZED = "initialized"  # another name of the member above, so either reads naturally
    ACTIVE = "active"
    INACTIVE = "inactive"
    TERMINATED = "terminated"
    ABORTING = "aborting"  #: Mode.ACTIVE where it is set; the library never does
    ABORTED = "aborted"  #: likewise


_MODES = {status: Mode.ACTIVE for status in (Status.ABORTING, Status.ABORTED)}
_LATER: Any = None  # the default of what __post_init__ fills in


@dataclasses.dataclass
class State:
    """A rank's place in the job. Mutable: rank assignments write to it.

    ``State(rank, world_size)`` is a rank before the assignment, with initial values equal to these. ``State()``, as in
    nvidia-resiliency-ext 0.2, reads ``RANK`` and ``WORLD_SIZE`` (default 0 and 1), and every rank is active, though its
    mode still says INITIALIZED. ``freeze()`` gives the read-only form that is passed to all other hooks.

    Raises:
        TypeError: `rank` is given and `world_size` is not.
        OptionError: a variable that is read is no integer.
    """

    #: rank among all members of this iteration, active and inactive: 0 .. world_size - 1
    rank: int = _LATER
    #: number of members of this iteration, active and inactive
    world_size: int = _LATER
    #: rank among those that call the function, 0 .. active_world_size - 1; None on a reserve rank
    active_rank: int | None = None
    #: number of members that call the function; 0 before ranks have been assigned
    active_world_size: int = 0
    #: the rank this process was started with
    initial_rank: int = _LATER
    #: the world size this process was started with
    initial_world_size: int = _LATER
    #: counts the runs of the function within one call: 0, 1, 2, ...
    iteration: int = 0
    #: what this rank does in this iteration
    mode: Mode = Mode.INITIALIZED
    #: what the function, or a hook before it, raised on this rank in this iteration, if it did; never copied
    fn_exception: BaseException | None = dataclasses.field(default=None, repr=False)
    #: the iteration's own store, while an assignment in the form of version 0.2 runs; such a one that is called
    #: without a Wrapper talks over whatever store is set here
    store: Any = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        given: tuple[int | None, int | None] = (self.rank, self.world_size)
        if given == (None, None):
            self.rank, self.world_size = _variable("RANK", "0"), _variable("WORLD_SIZE", "1")
            self.active_rank, self.active_world_size = self.rank, self.world_size
        elif given[1] is None:
            raise TypeError(f"State(rank={self.rank!r}) lacks world_size: pass both, or none to read the environment")
        _complete(self)

    @classmethod
    def from_env(cls) -> State:
        """``State(rank, world_size)`` with the values of ``RANK`` and ``WORLD_SIZE`` (default 0 and 1)."""
        return cls(_variable("RANK", "0"), _variable("WORLD_SIZE", "1"))

    @property
    def status(self) -> Status:
        """nvidia-resiliency-ext 0.2's view of ``mode``. Setting it sets ``mode``, and ``active_rank``, which 0.2
        does not have: the rank where it is active, else None."""
        return Status(self.mode.value)

    @status.setter
    def status(self, value: Status) -> None:
        status = Status(value)
        self.mode = _MODES.get(status) or Mode(status.value)
        self.active_rank = self.rank if self.mode is Mode.ACTIVE else None

    def activate_all_ranks(self) -> None:
        """Every rank is active under its own rank."""
        self.status, self.active_world_size = Status.ACTIVE, self.world_size

    def freeze(self) -> FrozenState:
        """A read-only shallow copy."""
        return FrozenState(**_fields(self))


@dataclasses.dataclass(frozen=True)
class FrozenState:
    """The read-only form of :class:`State`, with the same fields. ``dataclasses.replace`` makes a changed copy."""

    rank: int
    world_size: int
    active_rank: int | None = None
    active_world_size: int = 0
    initial_rank: int = _LATER
    initial_world_size: int = _LATER
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: BaseException | None = dataclasses.field(default=None, repr=False)
    store: Any = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        _complete(self)

    @property
    def status(self) -> Status:
        """nvidia-resiliency-ext 0.2's view of ``mode``."""
        return Status(self.mode.value)

    def freeze(self) -> FrozenState:
        """The state itself: it is read-only already."""
        return self

    def thaw(self) -> State:
        """A mutable shallow copy."""
        return State(**_fields(self))


def _variable(name: str, default: str) -> int:
    value = os.environ.get(name, "").strip() or default
    try:
        return int(value)
    except ValueError:
        raise OptionError(f"{name}={value!r} must be an integer: State() reads it from the environment") from None


def _complete(state: State | FrozenState) -> None:
    """Initial values that are not given are those of now."""
    for name in ("rank", "world_size"):
        if getattr(state, f"initial_{name}") is None:
            object.__setattr__(state, f"initial_{name}", getattr(state, name))


def _fields(state: State | FrozenState) -> dict[str, Any]:
    # dataclasses.asdict would copy the exception, which not every exception survives
    return {name: getattr(state, name) for name in _NAMES}


_NAMES = tuple(field.name for field in dataclasses.fields(State))
