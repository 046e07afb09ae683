"""What does something of its own at the moments of a call: see `Part`. `parts` has those of the core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inprocess.state import FrozenState

__all__ = ["CallContext", "CallEnd", "IterationContext", "Part"]


@dataclass(frozen=True)
class CallContext:
    """What a call begins with."""

    #: how many calls of wrapped functions there have been in this process, this one included
    number: int
    #: it continues over another store
    moved: bool
    #: the ranks do not agree through their launcher's store
    own_store: bool
    #: whether the abort wakes NCCL's threads
    wakes_nccl: bool
    #: for how long the main thread may show no progress where it is now (seconds); None: for any time
    patience: Callable[[], float | None]


@dataclass(frozen=True)
class IterationContext:
    """What an iteration begins with; rank, world size and addresses are in the environment by now."""

    state: FrozenState
    #: host and port of the iteration's own store
    rendezvous: tuple[str, int]


@dataclass(frozen=True)
class CallEnd:
    """How this rank leaves a call."""

    #: with which it leaves; None: all have completed, or it is moved
    error: BaseException | None
    #: the call continues over another store, and begins there
    moved: bool = False


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Part:
    """Something in this process that has to know of a call: what is replaced in torch or Python for its time, what a
    library keeps per process, whoever is to be told. In the order of the fields, and in the main thread, except for
    `started`."""

    #: before the store is connected
    call_begins: Callable[[CallContext], object] = _nothing
    #: the next iteration is decided, the first one of the call included: nobody is in the function
    next_iteration: Callable[[], object] = _nothing
    #: the ranks are assigned, and no code of the user's has run; on a reserve, too
    iteration_begins: Callable[[IterationContext], object] = _nothing
    #: the same; in the MonitorThread, so that it keeps no function from beginning
    started: Callable[[], object] = _nothing
    #: the function is about to be entered; not on a reserve
    function_begins: Callable[[], object] = _nothing
    #: the iteration was interrupted, its groups are aborted, and the function was left: what it has made ends
    function_left: Callable[[], object] = _nothing
    #: after all others have done that: what is in reference cycles is freed
    collect: Callable[[], object] = _nothing
    #: the end round has decided that the call ends with an error on all ranks
    everybody_leaves: Callable[[], object] = _nothing
    #: this rank leaves the call; monitor and threads still work
    call_ends: Callable[[CallEnd], object] = _nothing
    #: nothing of the call works any more: what was replaced is put back
    call_ended: Callable[[], object] = _nothing
