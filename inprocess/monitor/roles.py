"""What a monitor does besides protecting its rank, where somebody implements it: see `StandbyRole` and `Witness`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from inprocess.monitor.board import Board
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.events import StacksWanted
from inprocess.protocol.membership import Membership

__all__ = ["JobView", "MonitorView", "NoWitness", "StandbyRole", "StandbyView", "Witness"]


class StandbyRole(Protocol):
    """For the case that the host of the store is lost: a place where members can ask where the job continues, and the
    store with which it does. Made with the monitor's configuration, the store that may be lost, and a `StandbyView`."""

    @property
    def patience(self) -> float:
        """For how long members may come that lost the store (seconds)."""

    @property
    def is_needed(self) -> bool:
        """Whether there are members that may ask here, or use the store of this one."""

    @property
    def serves(self) -> bool:
        """Whether the job continues here."""

    def lose(self) -> None:
        """The store is lost: members may come."""

    def go_on(self, membership: Membership) -> None:
        """The member goes to another iteration."""

    def stand_by(self, connection: Any, again: bool) -> None:
        """Say over this connection that members can ask here, if that is so; ``again``: also where it was said."""


class JobView(Protocol):
    """What a monitor knows of the job, and does in it."""

    @property
    def membership(self) -> Membership:
        """Its member's view; replaced, not changed."""

    @property
    def heartbeat_at(self) -> float | None:
        """When its last heartbeat was begun (s); None: none has come through in time."""

    def with_store(self, action: Callable[[Any], object]) -> Any:
        """Do something over a connection of its own; blocks."""


class StandbyView(JobView, Protocol):
    """What a standby needs beside that."""

    #: the job has ended, or goes on without this member
    ended: threading.Event

    def heard(self) -> float | None:
        """When the last heartbeat that got through in time was begun (s); None: there is no lease."""

    def spawn(self, fn: Callable[..., object], *args: Any) -> None:
        """Call this in a thread of its own; what it raises ends the monitor."""

    def standby_changed(self) -> None:
        """`StandbyRole.is_needed` may have changed, or `serves`."""

    def stop_serving(self) -> None:
        """End the store that is served here."""


@dataclass(frozen=True)
class MonitorView:
    """What there is to know in a monitor."""

    config: MonitorConfig
    board: Board
    job: JobView
    #: pidfd of the training process
    training: int
    #: ask the main thread for the rank's stacks
    post: Callable[[StacksWanted], None]
    #: so many seconds from now call this, in the main thread
    at: Callable[[float, Callable[[], None]], None]


class Witness(Protocol):
    """Writes down how the rank is, and what has happened. In the main thread of the monitor; nothing here blocks."""

    def start(self) -> None:
        """The rank is protected."""

    def decided(self, iteration: int, before: Membership, now: Membership | None, failed: Collection[int]) -> None:
        """An iteration was interrupted.

        Args:
            iteration: that one.
            before: who was in it.
            now: who is in the next one; None: that is not decided yet, and this rank is dead.
            failed: initial ranks that are known to have failed.
        """

    def on_incident(self, iteration: int, turn: int) -> None:
        """All know how it goes on, or this rank is dead; ``turn``: members that come before this one."""

    def leave(self) -> bool:
        """The monitor ends: write what is not yet written. False: a disk does not answer, and a thread stays."""

    def last(self, completed: bool, can_end: bool) -> list[str] | None:
        """The program that the monitor becomes, None: it ends.

        Args:
            completed: whether the call is.
            can_end: what `leave` has returned.
        """


class NoWitness:
    """Nobody wants to know."""

    def start(self) -> None:
        pass

    def decided(self, iteration: int, before: Membership, now: Membership | None, failed: Collection[int]) -> None:
        pass

    def on_incident(self, iteration: int, turn: int) -> None:
        pass

    def leave(self) -> bool:
        return True

    def last(self, completed: bool, can_end: bool) -> None:
        return None
