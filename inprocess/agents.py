"""Everything that works beside the main thread during a call, opened and closed together, in one order.

Board, environment, signal handler, monitor process, store connection, MonitorThread, ProgressWatchdog. ``close`` puts
all of it back whatever happened; each step is tried even where another failed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from inprocess import clock, coordinator, strict_json
from inprocess.board import LEASE, Board
from inprocess.environment import Borrowed, Launch
from inprocess.exception import OptionError, RestartError, StoreLost, TimeoutError
from inprocess.interrupt import Interrupter
from inprocess.job import Job
from inprocess.monitor_process import MonitorConfig, MonitorProcess
from inprocess.monitor_thread import Mailbox, MonitorThread
from inprocess.options import Options
from inprocess.policy import SILENCE_SHARE
from inprocess.progress_watchdog import ProgressWatchdog
from inprocess.protocol.book import Book
from inprocess.protocol.ops import Verb
from inprocess.store import StoreSpec, TCPStore, connect, connect_to, drive, numeric_address

log = logging.getLogger(__name__)
T = TypeVar("T")
#: how long the monitor is listened to before the board is looked at again (seconds); what it says wakes at once
LOOK = 0.05
#: TCPStore's, here and in torch
_TCP_ARGUMENTS = frozenset(
    {"host_name", "port", "timeout", "is_master", "bind", "world_size", "wait_for_workers", "use_libuv", "multi_tenant"}
)


class Agents:
    """What one call of a wrapped function needs beside the main thread."""

    def __init__(
        self, options: Options, job: Job, book: Book, abort: Callable[[int], None], release: Callable[[], None]
    ) -> None:
        self._options, self._job, self._book = options, job, book
        self.environment = Borrowed()
        self._spec = _store_spec(options, job)
        self._interrupter = Interrupter(options.interrupt_signal)
        config = self._monitor_config()
        self.thread = MonitorThread(
            self._spec,
            book,
            job.me,
            self._interrupter.new_gate,
            abort,
            release,
            options.monitor_thread_interval,
            options.barrier_timeout,
        )
        self.board = Board.create()  # from here on there is something to close
        self._monitor = MonitorProcess(config, self.board)
        self._watchdog = ProgressWatchdog(
            self.board, options.progress_watchdog_interval, self._monitor, self._monitor_died
        )
        self._store: Any = None

    @property
    def mailbox(self) -> Mailbox:
        return self.thread.mailbox

    def open(self) -> None:
        """Start everything. Raises OptionError for a port that is taken, TimeoutError where nobody serves the store."""
        self._interrupter.install()
        self._monitor.start()
        self._watchdog.start()
        if self._hosts_store():
            self._monitor.wait_serving(self._options.barrier_timeout)
        self.thread.start()

    def connect(self, timeout: float) -> None:
        """The main thread's own connection, once everybody has joined (or somebody has to be named who did not)."""
        self._store = self._store or connect(self._spec, timeout)

    def await_lease(self, iteration: int, timeout: float) -> None:
        """Wait for the monitor's first heartbeat, unless the iteration is interrupted meanwhile.

        The others judge this rank by its heartbeats: without one there would be no lease to stop it when they give it
        up. Raises TimeoutError, or why there is no monitor.
        """
        deadline = clock.monotonic() + timeout
        alive = True  # else it has nothing to say, and the watchdog is starting another
        while not self.board.slots[LEASE] and not self.mailbox.take("start", iteration, 0.0 if alive else LOOK):
            self._monitor.check()
            if clock.monotonic() >= deadline:
                raise TimeoutError(
                    f"the monitor process sent no heartbeat within barrier_timeout={timeout:g}s; its log has more "
                    "(monitor_process_logfile)"
                )
            alive = self._monitor.listen(LOOK)

    def do(self, verb: Verb[T]) -> T:
        """Carry out a verb in the calling thread."""
        return drive(verb, self._store)

    def numeric(self, address: str) -> tuple[str, int]:
        """Host and port of an iteration's store server; ``@`` stands for the host of the base store."""
        host, _, port = address.rpartition(":")
        if not port.isdigit():
            raise StoreLost(f"the address of an iteration's store is not host:port: {address[:80]!r}")
        return (numeric_address(self._store) if host == "@" else host), int(port)

    def connect_to(self, host: str, port: int) -> Any:
        return connect_to(host, port, self._options.barrier_timeout)

    def close(self, how: str, cut: bool, why: str = "") -> None:
        """Put everything back.

        ``how``: completed, left (the others know), failed (the monitor tells them, and ``why``). ``cut``: the
        MonitorThread waits for something that may never come.
        """
        with contextlib.ExitStack() as stack:  # runs from the last to the first, each even where another raised
            stack.callback(self.board.close)
            stack.callback(self.environment.restore)
            stack.callback(self._interrupter.restore)
            stack.callback(self._monitor.bye, how, why=why)
            stack.callback(self._drop_store)
            stack.callback(self._say_gone, how)
            stack.callback(self.thread.stop, cut)
            stack.callback(self._watchdog.stop)
            self.board.leave()

    def _say_gone(self, how: str) -> None:
        """Its monitor says so too, but may have died; the store's host would wait for it."""
        if self._store is not None and how != "failed":
            with contextlib.suppress(StoreLost):
                self.do(coordinator.gone(self._book.member, self._monitor.config.members))

    def _drop_store(self) -> None:
        self._store = None

    def _hosts_store(self) -> bool:
        return self._serves() and self._job.host == self._job.launch.rank

    def _serves(self) -> bool:
        """Whether a monitor of this library serves the base store; otherwise it is torchrun's agent or the user's."""
        return not self._spec.factory and not _is_agents(self._spec.host, self._spec.port, self._job.launch)

    def _monitor_config(self) -> MonitorConfig:
        options = self._options
        return MonitorConfig(
            member=self._book.member,
            roster=self._book.roster,
            members=len(self._book.roster),
            founders=self._book.roster,
            store=self._spec.to_json(),
            serve_port=self._spec.port if self._hosts_store() else None,
            serve_host=self._spec.host,
            bind=_bind(options, self._serves()),
            rendezvous=("always" if self._hosts_store() else "never") if self._serves() else "smallest",
            rendezvous_host="@" if self._serves() else _own_address(self._spec),
            monitor_process_interval=options.monitor_process_interval,
            heartbeat_interval=options.heartbeat_interval,
            heartbeat_timeout=options.heartbeat_timeout,
            soft_timeout=options.soft_timeout,
            hard_timeout=options.hard_timeout,
            barrier_timeout=options.barrier_timeout,
            termination_grace_time=options.termination_grace_time,
            logfile=options.logfile_for(self._book.member),
            pidfile=options.pidfile_for(self._book.member),
        )

    def _monitor_died(self) -> None:
        """In the watchdog's thread."""
        if self._hosts_store():
            log.error("the monitor process of rank %d, which serves the store, is gone", self._book.member)
            return  # the MonitorThread notices that the store is gone
        log.warning("the monitor process of initial rank %d is gone; starting a new one", self._book.member)
        # a roster newer than the iteration does no harm: decisions only take members away, so applying one twice is
        # the same
        try:
            self._monitor.replace(Book(self._book.member, self._book.roster, self._book.iteration))
        except RestartError as error:
            if self._book.iteration == coordinator.JOINING:
                self.mailbox.fail(error)  # a wrong option, say: told at once, not when the others miss this rank
            raise


def _store_spec(options: Options, job: Job) -> StoreSpec:
    """Which store the ranks agree through, in a form that the monitor process understands."""
    if options.store_factory is None or options.store_factory is TCPStore:
        return _tcp_spec(options, job)
    factory, kwargs = options.store_factory, dict(options.store_kwargs)
    module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", "")
    if module in ("", "__main__") or not _importable(module, name, factory):
        raise OptionError(
            f"store_factory={factory!r} must be a class or function at the top level of an importable module other "
            "than the main script: the monitor process imports it by name"
        )
    for key, value in kwargs.items():
        _check_travels(key, value)
    return StoreSpec(factory=f"{module}:{name}", kwargs=kwargs, host=job.launch.host, prefix=job.prefix)


def _bind(options: Options, serves: bool) -> str:
    """The address to which the stores are bound; empty: the library chooses."""
    bind = "" if options.store_factory not in (None, TCPStore) else options.store_kwargs.get("bind") or ""
    if not isinstance(bind, str):
        raise OptionError(f"store_kwargs: bind={bind!r} must be the address of an interface as a string, or its name")
    if bind and not serves:
        raise OptionError(
            f"store_kwargs: bind={bind!r} cannot be kept: torchrun's agent serves the store, on all interfaces. Leave "
            "bind out, or give the library a port of its own with store_kwargs={'port': ..., 'bind': ...}"
        )
    return bind


def _tcp_spec(options: Options, job: Job) -> StoreSpec:
    kwargs = options.store_kwargs
    if unknown := sorted(set(kwargs) - _TCP_ARGUMENTS):
        raise OptionError(
            f"store_kwargs: TCPStore has no argument {unknown[0]!r}; use host_name, port, bind or timeout"
        )
    host, port = str(kwargs.get("host_name") or job.launch.host), int(kwargs.get("port") or job.launch.port)
    stale_key = "" if _is_agents(host, port, job.launch) else job.stale_key
    silence = SILENCE_SHARE * options.heartbeat_timeout
    return StoreSpec(host=host, port=port, prefix=job.prefix, stale_key=stale_key, silence=silence)


def _is_agents(host: str, port: int, launch: Launch) -> bool:
    """Whether torchrun's agent serves this store."""
    return launch.agent_store and (host, port) == (launch.host, launch.port)


def _check_travels(key: str, value: object) -> None:
    """The arguments reach the monitor process as JSON."""
    try:
        strict_json.parse(json.dumps({"kwargs": {key: value}}))
    except (TypeError, ValueError, RecursionError):
        raise OptionError(
            f"store_kwargs: {key}={value!r} cannot travel to the monitor process as JSON: pass a string, a number, a "
            "list or a dict, and let a store_factory of your own make anything else from it. A timeout is not needed: "
            "the library sets its own before each wait"
        ) from None


def _importable(module: str, name: str, factory: Any) -> bool:
    return getattr(sys.modules.get(module), name, None) is factory


def _own_address(spec: StoreSpec) -> str:
    """The address under which the other ranks reach this host: that of the route to MASTER_ADDR."""
    family, kind, _, _, where = socket.getaddrinfo(spec.host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing
        return str(probe.getsockname()[0])
