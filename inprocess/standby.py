"""What a monitor does for the case that the host of the store is lost: an arbiter, and the store with which the job
goes on. And whoever serves a store looks whether it still hears enough members. See ``protocol.arbitration``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from inprocess import clock, coordinator, guardian, store
from inprocess.arbiter import Desk
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import OptionError, StoreLost, TimeoutError
from inprocess.logs import get_logger
from inprocess.monitor_config import MonitorConfig
from inprocess.policy import SILENCE_SHARE
from inprocess.protocol import arbitration
from inprocess.protocol.book import Book
from inprocess.protocol.messages import Verdict

__all__ = ["Standby", "keep"]

log = get_logger("inprocess.monitor")
#: so often within heartbeat_timeout whoever serves a store looks whom it hears
LOOKS = 10

Spawn = Callable[..., None]


class Standby:
    """One in the monitor of each member that stands by, and of the one that serves the store.

    Args:
        config: of the monitor.
        place: of its rank.
        spec: the store that may be lost.
        spawn: starts a thread: ``spawn(function, *arguments)``.
        changed: called when whoever may ask has changed, or `serves`.
    """

    def __init__(
        self, config: MonitorConfig, place: int, spec: store.StoreSpec, spawn: Spawn, changed: Callable[[], None]
    ) -> None:
        self._config, self._spec, self._spawn = config, spec, spawn
        times = (config.heartbeat_timeout, config.heartbeat_interval)
        arbiter = arbitration.Arbiter(arbitration.patience(*times), arbitration.grace(*times))
        listener = store.listen(config.serve_host, config.bind)
        self.desk = Desk(listener, spec.prefix, place, arbiter, self._serve, self._left, changed)
        #: the store with which the job goes on, how it is reached from here, and with whom
        self._server: Any = None
        self._there: store.StoreSpec | None = None
        self._members: tuple[int, ...] = ()

    @classmethod
    def make(
        cls,
        config: MonitorConfig,
        place: int,
        spec: store.StoreSpec,
        spawn: Spawn,
        changed: Callable[[], None],
    ) -> Standby | None:
        """Open an arbiter; None where this host cannot."""
        try:
            standby = cls(config, place, spec, spawn, changed)
        except OptionError as error:
            log.warning("this host cannot stand by for that of the store: %s", error)
            return None
        standby.desk.start()
        return standby

    def publish(self, connection: Any) -> None:
        """Say in the store where the arbiter is."""
        address = f"{store.own_address(self._spec.port)}:{self.desk.port}"
        store.drive(coordinator.publish_standby(self._config.member, address), connection)

    @property
    def serves(self) -> bool:
        """Whether the job goes on here."""
        return bool(self._members)

    # --- in the thread of the arbiter -----------------------------------------------------------------------------

    def _serve(self, verdict: Verdict) -> int:
        log.warning("the store is lost; the job goes on with one that is served here, ranks %s", verdict.places)
        self._server = store.serve(self._config.serve_host, 0, self._config.bind)
        self._members = verdict.members
        spec = dataclasses.replace(
            self._spec, host=store.numeric_address(self._server), port=self._server.port, stale_key=""
        )
        self._spawn(self._keep, spec)
        self._there = spec
        return int(spec.port)

    def _left(self, place: int) -> None:
        """A member's process has ended, perhaps before it had a monitor that speaks for it in the new store."""
        if place in self._members and self._there is not None:
            self._spawn(self._speak, place, self._there)

    # --- threads of their own -------------------------------------------------------------------------------------

    def _keep(self, spec: store.StoreSpec) -> None:
        with contextlib.suppress(StoreLost, TimeoutError):
            connection = store.connect(spec, self._config.barrier_timeout)
            keep(self._config, connection, lambda: [self._members], self.desk, ended=threading.Event())  # never
        self._server = None  # torch shuts it down when the last reference goes

    def _speak(self, place: int, spec: store.StoreSpec) -> None:
        record = InterruptionRecord(
            place, Interruption.TERMINATED, initial_rank=place, message="ended while the job moved to another store"
        )
        by = f"the monitor of initial rank {self._config.rank} on {socket.gethostname()}"
        with contextlib.suppress(StoreLost, TimeoutError):
            connection = store.connect(spec, self._config.barrier_timeout)
            if not store.drive(coordinator.has_begun(), connection):
                book = Book.founder(place, self._members, max(self._members) + 1)
                store.drive(guardian.stand_in(book, place, record, by), connection)


def keep(
    config: MonitorConfig,
    connection: Any,
    rosters: Callable[[], Sequence[Sequence[int]]],
    desk: Desk,
    ended: threading.Event,
) -> None:
    """Until less than half of the members are heard: the others may go on elsewhere. Or until ``ended``.

    ``rosters``: that of the last iteration that started, which all its members know, and those since then: who is cut
    off may know any of them.
    """
    # sooner than anybody is declared dead for being silent
    heard = guardian.Heard(SILENCE_SHARE * config.heartbeat_timeout)
    pause = config.heartbeat_timeout / LOOKS
    looked = awake = clock.monotonic()
    while not ended.wait(pause):
        now = clock.monotonic()
        awake = now if now - looked > 2 * pause else awake  # it stood still, perhaps with all others
        looked = now
        known = rosters()
        members = sorted(set().union(*known))
        counters = store.drive(coordinator.read_beats(members), connection)
        heard.note(dict(zip(members, counters, strict=True)), clock.monotonic())
        there = set(heard.members(clock.monotonic())) - desk.elsewhere
        if now - awake < 2 * config.heartbeat_interval:
            continue
        if desk.met and not all(arbitration.hears_enough(roster, there, desk.gone) for roster in known):
            log.error("less than half of %d members are heard: the store that is served here ends", len(members))
            return
