"""What a training process does for the case that the host of the store is lost. The call asks this object, nobody else.

``meet`` runs in the MonitorThread, ``close`` wherever the call ends, everything else in the main thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inprocess.exception import Fenced, StoreLost, TimeoutError
from inprocess.failover import rules
from inprocess.failover.arbiter_client import ArbiterClient, ArbiterClients, Door
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.process import MonitorProcess
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import FailoverOutcome, Verdict, Vote
from inprocess.stores.connecting import connect
from inprocess.stores.connections import numeric_address, published_at
from inprocess.stores.driver import execute
from inprocess.stores.spec import StoreSpec
from inprocess.system import clock
from inprocess.system.interpreter import SLICE, sleep_with_progress
from inprocess.system.logs import get_logger

__all__ = ["FailoverClient"]

log = get_logger("inprocess.failover")
#: how long the first entry waits for contacts (seconds): a standby may not answer
CONNECT_PAUSE_S = 1.0
#: in shares of heartbeat_timeout: by then a store that hears too few members has closed itself
OUTLASTS = 1.25
#: first pause between two looks for where an arbiter is; doubled each time (seconds)
FIRST_PAUSE_S = 0.05


@dataclass(frozen=True)
class Found:
    """The job continues over another store."""

    verdict: Verdict
    #: with the one that serves it, which stays open: its end would say that this process has ended
    contact: ArbiterClient


class FailoverClient:
    """A training process, as the arbiters of its job see it.

    Args:
        spec: the store that may be lost.
        settings: of this rank's monitor.
        monitor: of this rank.
        moved: the call has been moved to the store of a standby before: then its host is not an arbiter any more.
        before: the contact over which it was.
    """

    def __init__(
        self,
        spec: StoreSpec,
        settings: MonitorConfig,
        monitor: MonitorProcess,
        moved: bool,
        before: ArbiterClient | None,
    ) -> None:
        self._spec, self._settings, self._monitor, self._moved = spec, settings, monitor, moved
        self._contacts = ArbiterClients(settings.store_host, self._find, before)
        #: the address at which this process reaches the store
        self._store_address = ""
        #: whether it has looked for arbiters
        self.has_met = False

    # --- in the MonitorThread -----------------------------------------------------------------------------------

    def meet(self, membership: Membership, store: Any) -> None:
        """In each iteration: make contact with those who can say where the job continues.

        By now the monitors that stand by have sent a heartbeat, and said before that where their arbiter is. Those that
        do so since this iteration may not have said it yet. The first time it waits for the contacts: should this
        process end, only an arbiter that it had contact with would know it at once. Where all are in contact, as in
        most restarts, nobody is asked.
        """
        first, self.has_met = not self.has_met, True
        host = self._settings.store_host
        chosen = rules.standbys(membership.roster, self._settings.standby_stores, host)
        asked = (*chosen, host) if chosen and not self._moved else chosen
        if not asked or self._contacts.have_met(asked):
            return
        self._store_address = numeric_address(store)
        self._contacts.make(membership.member, {member: execute(verbs.find_standby(member), store) for member in asked})
        if first:
            self._contacts.are_made(CONNECT_PAUSE_S)

    def _find(self, member: int, door: str) -> Door | None:
        """In the thread of the contacts; None where that member cannot stand by. Who has only just become one may not
        have published where it is: a wait for the key could not be ended with the call."""
        closing, seconds = self._contacts.closing, self._settings.heartbeat_timeout
        connection = None if door else connect(self._spec, seconds, closing)
        until, pause = clock.monotonic() + seconds, FIRST_PAUSE_S
        while not door and (left := until - clock.monotonic()) > 0 and not closing.wait(min(pause, left)):
            door, pause = execute(verbs.find_standby(member), connection), min(2 * pause, SLICE)
        if not door:
            raise TimeoutError(f"initial rank {member} has not said where its arbiter is")
        if door == "-":
            return None
        key, _, address = door.partition("@")
        return *published_at(address, lambda: self._store_address), key

    # --- in the main thread -------------------------------------------------------------------------------------

    @property
    def can_ask(self) -> bool:
        """Whether there is anybody to ask. Waits for contacts that are being made."""
        return self._contacts.some

    def fail_over(self, membership: Membership, loss: StoreLost, who: str, done: bool) -> Found | None:
        """See `inprocess.call.successor.Successor`."""
        self._monitor.moves()
        settings = self._settings
        seconds = rules.patience(settings.heartbeat_timeout, settings.heartbeat_interval)
        vote = Vote.of(membership.slot, membership.note(membership.iteration))
        answer = self._contacts.vote(vote, seconds + settings.termination_grace_time)
        if answer is None:
            raise loss
        verdict, contact = answer
        if verdict.outcome is FailoverOutcome.COMPLETED and verdict.iteration == membership.iteration and done:
            return None
        if verdict.outcome is FailoverOutcome.REFUSED:
            raise StoreLost(f"{loss}. The job does not go on over another store: {verdict.reason}")
        if verdict.outcome is not FailoverOutcome.GO or membership.slot not in verdict.members:
            raise Fenced(f"{who} was given up by the others, and must not run again")
        self._contacts.keep(contact)
        if verdict.host == membership.slot:
            self._monitor.serves(verdict.port)
        return Found(verdict, contact)

    def may_return(self, iteration: int, is_store_there: Callable[[], bool]) -> bool:
        """Tell the arbiters that this iteration is completed. False: the others may have gone on without this rank.

        Where one of them may not know it, others may go on there; unless the store is still there when one that hears
        too little has closed itself.
        """
        if (known := self._contacts.say_completed(iteration)) is not None:
            return known
        log.warning("a standby does not answer; waiting until the others have certainly not gone on without it")
        sleep_with_progress(OUTLASTS * self._settings.heartbeat_timeout)
        with contextlib.suppress(StoreLost):
            return is_store_there()
        return False

    def close(self) -> None:
        """The call is over. More than once is fine."""
        self._contacts.close()
