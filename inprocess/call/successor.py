"""What the call asks where its store is lost: whether the job continues elsewhere. See `Successor`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from inprocess.exception import StoreLost
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.process import MonitorProcess
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import Verdict
from inprocess.stores.spec import StoreSpec
from inprocess.system import extensions

__all__ = ["Contact", "Found", "NoSuccessor", "Successor", "is_known", "successor"]


class Contact(Protocol):
    """The one over which the job has been moved, for whoever asks next; opaque to the call."""

    @property
    def host(self) -> str: ...


class Found(Protocol):
    """The job continues over another store."""

    @property
    def verdict(self) -> Verdict: ...
    @property
    def contact(self) -> Contact: ...


class Successor(Protocol):
    """Of one call over one store. `meet` runs in the MonitorThread, `close` wherever the call ends, everything else in
    the main thread.

    Made with: the store that may be lost, the monitor's configuration, the monitor, whether the call has been moved
    before, and the contact over which it was.
    """

    #: whether `meet` has been called
    has_met: bool

    def meet(self, membership: Membership, store: Any) -> None:
        """In each iteration, over the store that works still: get to know those who will say where the job continues.
        The first time before this rank enters the function."""

    @property
    def can_ask(self) -> bool:
        """Whether there is anybody to ask."""

    def fail_over(self, membership: Membership, loss: StoreLost, who: str, done: bool) -> Found | None:
        """Ask, once. This rank has left the function.

        Args:
            membership: of this member.
            loss: the loss of the store.
            who: how messages name this rank.
            done: whether nothing is left to do for this rank in the iteration.

        Returns:
            Where the job continues; None: it is completed.

        Raises:
            StoreLost: ``loss`` where nobody answers, or why the job does not continue.
            Fenced: it continues without this rank.
        """

    def may_return(self, iteration: int, is_store_there: Callable[[], bool]) -> bool:
        """This iteration is completed. False: the others may have continued elsewhere without this rank."""

    def close(self) -> None:
        """The call is over. More than once is fine."""


class NoSuccessor:
    """A store that is lost stays lost."""

    has_met = True
    can_ask = False

    def meet(self, membership: Membership, store: Any) -> None:
        pass

    def fail_over(self, membership: Membership, loss: StoreLost, who: str, done: bool) -> None:
        raise loss

    def may_return(self, iteration: int, is_store_there: Callable[[], bool]) -> bool:
        return True

    def close(self) -> None:
        pass


#: makes one; imported now: in a call there may be no descriptor left for that
_MAKE = extensions.first("Successor")


def is_known() -> bool:
    """Whether there may be a successor at all."""
    return _MAKE is not None


def successor(
    spec: StoreSpec, config: MonitorConfig, monitor: MonitorProcess, moved: bool, before: Contact | None
) -> Successor:
    """That of a call."""
    if _MAKE is None:
        return NoSuccessor()
    found: Successor = _MAKE(spec, config, monitor, moved, before)
    return found
