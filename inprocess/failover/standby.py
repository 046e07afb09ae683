"""What a monitor does for the case that the host of the store is lost: an arbiter, and the store with which the job
goes on. And whoever serves a store looks whether it still hears enough members. See `inprocess.failover.rules`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import OptionError, StoreLost, TimeoutError
from inprocess.failover import rules
from inprocess.failover.arbiter_server import ArbiterServer
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.roles import StandbyView
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import Verdict
from inprocess.protocol.timing import SILENCE_SHARE
from inprocess.protocol.verbs import watching
from inprocess.stores import connecting, connections, driver, serving
from inprocess.stores.spec import StoreSpec
from inprocess.system import clock, descriptors
from inprocess.system.logs import get_logger

__all__ = ["StandbyRole"]

log = get_logger("inprocess.monitor")
#: so often within heartbeat_timeout whoever serves a store looks whom it hears
LOOKS = 10


class StandbyRole:
    """The part of one member's monitor in failover: whether it stands by, and with what.

    Args:
        config: of the monitor.
        spec: the store that may be lost.
        job: the monitor's view of it.
    """

    def __init__(self, config: MonitorConfig, spec: StoreSpec, job: StandbyView) -> None:
        self._config, self._spec, self._job = config, spec, job
        #: where members meet when the store is lost, if this is a standby, or serves the store
        self._standby: Standby | None = None
        self._standing = threading.Lock()
        membership = job.membership
        #: of the last iteration that started, and of those since then
        self._rosters = {membership.iteration: membership.roster}
        self._moving = threading.Lock()

    @property
    def patience(self) -> float:
        """How long members that lost the store wait for each other at most, and then some (seconds)."""
        return 2 * rules.patience(self._config.heartbeat_timeout, self._config.heartbeat_interval)

    @property
    def is_needed(self) -> bool:
        """Whether there are members that may ask this standby, or use its store. Whoever serves the old one is not."""
        if self._standby is None or self._config.serve_port is not None:
            return False
        return self._standby.server.is_needed(self._job.membership.roster)

    @property
    def serves(self) -> bool:
        """Whether the job goes on here."""
        return self._standby is not None and self._standby.serves

    def lose(self) -> None:
        """The store is lost: members may come to this standby."""
        if self._standby is not None:
            self._standby.server.lost()

    def go_on(self, membership: Membership) -> None:
        """The member goes to another iteration."""
        with self._moving:
            self._rosters[membership.iteration] = membership.roster

    def stand_by(self, connection: Any, again: bool) -> None:
        """Open an arbiter as soon as this member is one of those that stand by, and say where it is; ``again``: also
        where it has said so. It stays, those who stand by change."""
        if self._standby is not None and not again:
            return
        config, roster = self._config, self._job.membership.roster
        hosts = config.serve_port is not None
        chosen = rules.standbys(roster, config.standby_stores, config.store_host)
        with self._standing:
            if self._standby is None:
                membership = self._job.membership
                if not chosen or not (hosts or membership.member in chosen):
                    return
                descriptors.raise_limit()
                try:
                    standby = Standby(config, membership, self._spec, self._job)
                except OptionError as error:
                    log.warning("this host cannot stand by for that of the store: %s", error)
                    driver.execute(verbs.publish_standby(membership.member, "-"), connection)
                    return
                standby.server.start()
                self._standby = standby
                if hosts:
                    self._job.spawn(self._job.with_store, self._keep_store)
            self._standby.publish(connection)

    def _keep_store(self, connection: Any) -> None:
        assert self._standby is not None
        keep(self._config, connection, lambda: self._known_rosters(connection), self._standby.server, self._job.ended)
        if not self._job.ended.is_set():
            self._job.stop_serving()

    def _known_rosters(self, connection: Any) -> list[tuple[int, ...]]:
        membership = self._job.membership
        started = membership.iteration > verbs.JOINING and driver.execute(
            verbs.has_started(membership.iteration), connection
        )
        with self._moving:
            if started:
                later = {number: roster for number, roster in self._rosters.items() if number > membership.iteration}
                self._rosters = {membership.iteration: membership.roster, **later}
            return list(self._rosters.values())


class Standby:
    """One in the monitor of each member that stands by, and of the one that serves the store.

    Args:
        config: of the monitor.
        membership: of its member.
        spec: the store that may be lost.
        job: the monitor's view of it.
    """

    def __init__(self, config: MonitorConfig, membership: Membership, spec: StoreSpec, job: StandbyView) -> None:
        self._config, self._member, self._spec, self._job = config, membership.member, spec, job
        timeout = config.heartbeat_timeout
        arbiter = rules.Arbiter(rules.patience(timeout, config.heartbeat_interval), timeout)
        self._place = serving.place_of(config.serve_host, config.bind)
        listener = serving.listen(self._place)
        self.server = ArbiterServer(
            listener, membership.slot, arbiter, job.heard, self._serve, self._left, job.standby_changed
        )
        #: the store with which the job goes on, how it is reached from here, and with whom
        self._server: Any = None
        self._there: StoreSpec | None = None
        self._members: tuple[int, ...] = ()

    def publish(self, connection: Any) -> None:
        """Say in the store where the arbiter is."""
        door = f"{self.server.key}@{connections.own_address(self._spec.port)}:{self.server.port}"
        driver.execute(verbs.publish_standby(self._member, door), connection)

    @property
    def serves(self) -> bool:
        """Whether the job goes on here."""
        return bool(self._members)

    # --- in the thread of the arbiter -----------------------------------------------------------------------------

    def _serve(self, verdict: Verdict) -> int:
        log.warning("the store is lost; the job goes on with one that is served here, ranks %s", verdict.slots)
        self._server = serving.serve_at(self._place)
        self._members = verdict.members
        spec = dataclasses.replace(
            self._spec, host=connections.numeric_address(self._server), port=self._server.port, stale_key=""
        )
        self._job.spawn(self._keep, spec)
        self._there = spec
        return int(spec.port)

    def _left(self, slot: int) -> None:
        """A member's process has ended, perhaps before it had a monitor that speaks for it in the new store."""
        if slot in self._members and self._there is not None:
            self._job.spawn(self._speak, slot, self._there)

    # --- threads of their own -------------------------------------------------------------------------------------

    def _keep(self, spec: StoreSpec) -> None:
        with contextlib.suppress(StoreLost, TimeoutError):
            connection = connecting.connect(spec, self._config.barrier_timeout)
            keep(self._config, connection, lambda: [self._members], self.server, ended=threading.Event())  # never
        self._server = None  # torch shuts it down when the last reference goes

    def _speak(self, slot: int, spec: StoreSpec) -> None:
        record = InterruptionRecord(
            slot, Interruption.TERMINATED, initial_rank=slot, message="ended while the job moved to another store"
        )
        by = f"the monitor of initial rank {self._config.rank} on {socket.gethostname()}"
        with contextlib.suppress(StoreLost, TimeoutError):
            connection = connecting.connect(spec, self._config.barrier_timeout)
            if not driver.execute(verbs.has_begun(), connection):
                membership = Membership.founder(slot, self._members, max(self._members) + 1)
                driver.execute(watching.report_death(membership, slot, record, by), connection)


def keep(
    config: MonitorConfig,
    connection: Any,
    rosters: Callable[[], Sequence[Sequence[int]]],
    server: ArbiterServer,
    ended: threading.Event,
) -> None:
    """Until less than half of the members are heard: the others may go on elsewhere. Or until ``ended``.

    ``rosters``: that of the last iteration that started, which all its members know, and those since then: who is cut
    off may know any of them.
    """
    # sooner than anybody is declared dead for being silent
    heard = watching.HeartbeatTracker(SILENCE_SHARE * config.heartbeat_timeout)
    pause = config.heartbeat_timeout / LOOKS
    looked = awake = clock.monotonic()
    while not ended.wait(pause):
        now = clock.monotonic()
        awake = now if now - looked > 2 * pause else awake  # it stood still, perhaps with all others
        looked = now
        known = rosters()
        members = sorted(set().union(*known))
        counters = driver.execute(verbs.read_beats(members), connection)
        heard.note(dict(zip(members, counters, strict=True)), clock.monotonic())
        there = set(heard.members(clock.monotonic())) - server.elsewhere
        if now - awake < 2 * config.heartbeat_interval:
            continue
        if server.met and not all(rules.hears_enough(roster, there, server.gone) for roster in known):
            log.error("less than half of %d members are heard: the store that is served here ends", len(members))
            return
