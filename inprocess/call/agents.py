"""Everything that works beside the main thread during a call, opened and closed together, in one order.

Board, environment, signal handler, monitor process, store connection, MonitorThread, ProgressWatchdog. ``end_with``
puts all of it back whatever happened; each step is tried even where another failed. What the making of it has opened
goes last, with ``opened``, also where the making fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from inprocess.call import successor
from inprocess.call.base_store import bind, is_agents, own_address, store_spec, try_factory
from inprocess.call.job import Job
from inprocess.call.launch_variables import run_dir
from inprocess.call.mailbox import Mailbox
from inprocess.call.thread import JoinRequest, MonitorThread
from inprocess.call.waiting import Absentees
from inprocess.collectives import nccl
from inprocess.collectives.results import results
from inprocess.exception import OptionError, RestartError, StoreLost, TimeoutError
from inprocess.interrupt.signals import Interrupter
from inprocess.monitor.board import LEASE, PROGRESS, Board
from inprocess.monitor.policy import LeaseWatch
from inprocess.monitor.process import MonitorConfig, MonitorProcess
from inprocess.monitor.process_one import LentSignal
from inprocess.monitor.stacks import StackMemory
from inprocess.monitor.watchdog import ProgressWatchdog
from inprocess.options import Options
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import JoinMode
from inprocess.protocol.ops import Verb
from inprocess.stores.connecting import connect, connect_to, prefixed
from inprocess.stores.connections import numeric_address, published_at, shut_connections
from inprocess.stores.driver import execute
from inprocess.stores.owner import Access, access, find_owner, remedy
from inprocess.system import descriptors
from inprocess.system.environment import Borrowed, StandardStreams
from inprocess.system.logs import get_logger

log = get_logger(__name__)
T = TypeVar("T")
#: how long a server that has our port may take to show that it is that of our job (seconds)
PROBE = 5.0


@dataclass(frozen=True)
class Ending:
    """How a call ends for this rank."""

    #: completed, left (the others know), failed (the monitor tells them), moved (to another store)
    how: str
    #: what the monitor tells them
    why: str
    #: whether the MonitorThread waits for something that may come late or never
    cut: bool


class Agents:
    """What one call of a wrapped function needs beside the main thread."""

    @descriptors.explained("the call of the wrapped function cannot begin")
    def __init__(
        self,
        options: Options,
        job: Job,
        membership: Membership,
        abort: Callable[[int], None],
        release: Callable[[], None],
        started: Callable[[], None],
        on_standstill: Callable[[], None],
        ends_by_sigterm: bool,
        interrupts: Callable[[int, int], bool],
        opened: contextlib.ExitStack,
        before: successor.Contact | None = None,
    ) -> None:
        self._options, self._job, self._membership = options, job, membership
        self.environment = Borrowed(nccl.settings(os.environ))
        #: a connection to a store of the user's, until the main thread needs one
        self._tried = try_factory(options)
        self._spec = store_spec(options, job)
        self._interrupter = Interrupter(options.interrupt_signal, results.raised)
        config = dataclasses.replace(self._monitor_config(), ends_by_sigterm=ends_by_sigterm)
        self._streams = StandardStreams()  # from here on there is something to close
        opened.callback(self._streams.close)
        self._lent = LentSignal()
        opened.callback(self._lent.close)
        config = dataclasses.replace(config, deadly_signal=self._lent.open(self._interrupter.signum))
        self._stacks = StackMemory()
        opened.callback(self._stacks.close)
        if config.run_dir is not None:
            signum, fd = self._stacks.open()
            config = dataclasses.replace(config, stacks_signal=signum, stacks_fd=fd)
        self.board = Board.create()
        opened.callback(self.board.close)
        self._monitor = MonitorProcess(config, self.board)
        self.successor = successor.successor(self._spec, config, self._monitor, job.moved, before)
        opened.callback(self.successor.close)
        self.thread = MonitorThread(
            self._spec,
            membership,
            JoinRequest(job.entry, job.ticket, interrupts, job.owner, self._is_host_a_member()),
            self._monitor,
            self.successor,
            self._interrupter.new_gate,
            abort,
            release,
            started,
            lambda: self.board.slots[PROGRESS] / 1e9,
            options.monitor_thread_interval,
            options.barrier_timeout,
        )
        self._watchdog = ProgressWatchdog(
            self.board,
            options.progress_watchdog_interval,
            self._monitor,
            self._monitor_died,
            LeaseWatch(options.heartbeat_timeout),
            self._silent if config.standby_stores else None,
            on_standstill,
        )
        opened.callback(self._watchdog.stop)
        self._store: Any = None

    @property
    def mailbox(self) -> Mailbox:
        return self.thread.mailbox

    @property
    def served_port(self) -> int | None:
        """Of the base store, where a monitor of this library serves it."""
        return self._spec.port if self._serves() else None

    @property
    def own_store(self) -> bool:
        """Whether the ranks agree through another store than their launcher's."""
        return bool(self._spec.factory) or not self._is_agents

    @descriptors.explained("the call of the wrapped function cannot begin")
    def open(self) -> None:
        """Start everything. Raises OptionError for a port that is taken, TimeoutError where nobody serves the store."""
        nccl.advise(aloud=self._job.launch.rank == 0)
        self._interrupter.install()
        self.board.hold()
        self._monitor.start()
        self._watchdog.start()
        if self._hosts_store():
            self._wait_serving()
        self.thread.start()

    def _wait_serving(self) -> None:
        try:
            self._monitor.wait_serving(self._options.barrier_timeout)
        except OptionError as error:
            if not self._is_served(error):
                raise
            # rank 0 died, and its monitor serves on
            self._monitor.step_aside()

    def _is_served(self, error: OptionError) -> bool:
        """Whether a store of this call is where this process was to serve it. Raises OptionError for another job's."""
        mine, entry, where = self._job.owner, self._job.entry, str(self._spec)
        with contextlib.suppress(StoreLost, TimeoutError):
            store = connect(self._spec, PROBE)
            if (owner := find_owner(store)) is None:
                return False
            granted = access(owner, mine, entry) is Access.GRANTED
            if granted and entry is not JoinMode.FOUND:
                return execute(verbs.has_begun(), store)
            if granted and not mine.name and owner.is_kin(mine):
                execute(verbs.refuse_founding(f"{owner.by} and {mine.by} both have RANK=0"), store)
            raise OptionError(f"{error} {remedy(where)}") from None
        return False

    def connect(self, timeout: float) -> None:
        """The main thread's own connection, once everybody has joined (or somebody has to be named who did not)."""
        if self._store is None and self._tried is not None:
            self._store, self._tried = prefixed(self._spec, self._tried), None
        self._store = self._store or connect(self._spec, timeout)

    def connect_anew(self, timeout: float, stopped: threading.Event) -> Any:
        """A connection of the caller's own, for another thread; given up where ``stopped`` is set meanwhile."""
        return connect(self._spec, timeout, stopped)

    def nudge(self) -> None:
        """Have the main thread look for signals where it waits: one that comes just before a wait does not end it."""
        self._interrupter.nudge()

    def absentees(self, membership: Membership, name: str) -> Absentees:
        """Says who has not come yet to the round of this name."""
        return Absentees(self._spec, membership, name)

    def await_lease(self, iteration: int, timeout: float) -> None:
        """Wait for the monitor's first heartbeat, unless the iteration is interrupted meanwhile.

        The others judge this rank by its heartbeats: without one there would be no lease to stop it when they give it
        up. Raises TimeoutError, or why there is no monitor.
        """
        self._monitor.await_until(
            lambda: bool(self.board.slots[LEASE]) or self.mailbox.take("start", iteration, 0.0) is not None,
            timeout,
            f"the monitor process sent no heartbeat within barrier_timeout={timeout:g}s; its log has more "
            "(monitor_process_logfile)",
        )

    def do(self, verb: Verb[T]) -> T:
        """Carry out a verb in the calling thread."""
        return execute(verb, self._store)

    def numeric(self, address: str) -> tuple[str, int]:
        """Host and port of an iteration's store server, from how it is published."""
        return published_at(address, lambda: numeric_address(self._store))

    def connect_to(self, host: str, port: int) -> Any:
        return connect_to(host, port, self._options.barrier_timeout)

    def end_with(self, closing: contextlib.ExitStack, ending: Callable[[], Ending]) -> None:
        """Have ``closing`` put back what `open` has begun: from the last to the first, each even where another one
        raised."""
        closing.callback(self.environment.restore)
        closing.callback(self._interrupter.restore)
        closing.callback(lambda: self._monitor.bye(ending().how, why=ending().why))
        closing.callback(self._drop_store)
        closing.callback(lambda: self._say_gone(ending().how))
        closing.callback(lambda: self.thread.stop(ending().cut))
        closing.callback(self._watchdog.stop)
        closing.callback(self.board.leave)

    def detach(self) -> None:
        """In a process that the user's code has forked: whatever that does, it is not this rank."""
        self.board.detach()
        self._interrupter.detach()

    def _say_gone(self, how: str) -> None:
        """Its monitor says so too, but may have died; the store's host would wait for it."""
        if self._store is not None and how not in ("failed", "moved"):
            with contextlib.suppress(StoreLost):
                self.do(verbs.gone(self._membership.member, len(self._membership.known)))

    def _drop_store(self) -> None:
        self._store = self._tried = None

    def _hosts_store(self) -> bool:
        return self._is_host_a_member() and self._job.host == self._job.slot and not self._job.outside

    def _serves(self) -> bool:
        """Whether a monitor of this library serves the base store; otherwise it is torchrun's agent or the user's."""
        return not self._spec.factory and not self._is_agents

    @property
    def _is_agents(self) -> bool:
        return is_agents(self._spec.host, self._spec.port, self._job.launch)

    def _monitor_config(self) -> MonitorConfig:
        options = self._options
        return MonitorConfig(
            member=self._membership.member,
            call=self._job.calls - 1,
            rank=self._membership.member,
            me=self._job.me,
            identified=False,
            roster=self._membership.roster,
            store=self._spec.to_json(),
            serve_port=self._spec.port if self._hosts_store() else None,
            owner=self._job.owner_to_serve.to_json() if self._hosts_store() else "",
            serve_host=self._spec.host,
            bind=bind(options, self._serves()),
            rendezvous=("always" if self._hosts_store() else "never") if self._is_host_a_member() else "smallest",
            rendezvous_host="@" if self._is_host_a_member() else own_address(self._spec, options.barrier_timeout),
            monitor_process_interval=options.looks_every,
            progress_watchdog_interval=options.progress_watchdog_interval,
            heartbeat_interval=options.beats_every,
            heartbeat_timeout=options.heartbeat_timeout,
            soft_timeout=options.soft_timeout,
            hard_timeout=options.hard_timeout,
            barrier_timeout=options.barrier_timeout,
            termination_grace_time=options.termination_grace_time,
            standby_stores=options.standby_stores if self._serves() and successor.is_known() else 0,
            store_host=self._job.host,
            logfile=options.logfile_for(self._membership.member),
            pidfile=self._pidfile(),
            run_dir=run_dir(options.run_dir),
            job=self._job.launch.job,
        )

    def _is_host_a_member(self) -> bool:
        """Whether the store is served by the monitor of a rank: then that also serves the iterations' own stores."""
        return self._serves() and not self._job.moved

    def _pidfile(self) -> str | None:
        """The monitor of the process that this one replaces may still be there, and serve the store."""
        path = self._options.pidfile_for(self._membership.member)
        return path if path is None or self._job.entry in (JoinMode.FOUND, JoinMode.EITHER) else f"{path}.{os.getpid()}"

    def _silent(self) -> None:
        """In the watchdog's thread."""
        log.warning("no heartbeat of initial rank %d gets through: the store counts as lost", self._job.slot)
        self.thread.cut()
        if self._store is not None and not self._spec.factory:
            shut_connections(numeric_address(self._store), self._spec.port)

    def _monitor_died(self) -> bool:
        """In the watchdog's thread. Returns whether there is another one now."""
        if self._monitor.config.serve_port is not None:
            if self._monitor.failed is None:
                log.error("the monitor process of rank %d, which serves the store, is gone", self._membership.member)
            return False  # the MonitorThread notices that the store is gone
        log.warning("the monitor process of initial rank %d is gone; starting a new one", self._membership.member)
        # the iteration first: with a newer roster a decision is applied twice, which is the same
        iteration = self._membership.iteration
        try:
            return self._monitor.replace(dataclasses.replace(self._membership, iteration=iteration))
        except RestartError as error:
            if self._membership.iteration == verbs.JOINING:
                self.mailbox.fail(error)  # a wrong option, say: told at once, not when the others miss this rank
            raise
