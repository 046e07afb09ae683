"""Everything that works beside the main thread during a call, opened and closed together, in one order.

Board, environment, signal handler, monitor process, store connection, MonitorThread, ProgressWatchdog. ``close`` puts
all of it back whatever happened; each step is tried even where another failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from inprocess import clock, coordinator, descriptors, environment, nccl, strict_json
from inprocess.arbiter import Contact, Contacts
from inprocess.board import LEASE, Board
from inprocess.environment import Borrowed, Launch, StandardStreams
from inprocess.exception import OptionError, RestartError, StoreLost, TimeoutError
from inprocess.failures import Failures
from inprocess.finalize import run_in_thread
from inprocess.held import held
from inprocess.interpreter import SLICE, pass_time
from inprocess.interrupt import Interrupter
from inprocess.job import Job
from inprocess.logs import get_logger
from inprocess.monitor_process import MonitorConfig, MonitorProcess
from inprocess.monitor_thread import Mailbox, MonitorThread, WayIn
from inprocess.options import Options
from inprocess.policy import SILENCE_SHARE, Unheard
from inprocess.progress_watchdog import ProgressWatchdog
from inprocess.protocol.arbitration import patience, standbys
from inprocess.protocol.book import Book
from inprocess.protocol.messages import Entry, Fate, Verdict, Vote
from inprocess.protocol.ops import Verb
from inprocess.store import (
    Seat,
    StoreSpec,
    TCPStore,
    await_name,
    connect,
    connect_to,
    drive,
    numeric_address,
    prefixed,
    shut_connections,
)
from inprocess.watch import announce_wrapped

log = get_logger(__name__)
T = TypeVar("T")
#: how long the monitor is listened to before the board is looked at again (seconds); what it says wakes at once
LOOK = 0.05
#: how long the first entry waits for contacts (seconds): a standby may not answer
MEET = 1.0
#: how long a server that has our port may take to show that it is that of our job (seconds)
PROBE = 5.0
#: in shares of heartbeat_timeout: by then a store that hears too few members has closed itself
OUTLASTS = 1.25
#: where rank 0 is, if only the port of the store is known
THIS_HOST = "127.0.0.1"
#: TCPStore's, here and in torch
_TCP_ARGUMENTS = frozenset(
    {"host_name", "port", "timeout", "is_master", "bind", "world_size", "wait_for_workers", "use_libuv", "multi_tenant"}
)


@dataclasses.dataclass(frozen=True)
class Lost:
    """What goes on in a call whose store was lost."""

    #: of the standby that serves the store now
    contact: Contact
    #: when that began (s), and with how many active ranks
    at: float
    active_world_size: int
    failures: Failures


class Agents:
    """What one call of a wrapped function needs beside the main thread."""

    @descriptors.explained("the call of the wrapped function cannot begin")
    def __init__(
        self,
        options: Options,
        job: Job,
        book: Book,
        abort: Callable[[int], None],
        release: Callable[[], None],
        lost: Lost | None = None,
    ) -> None:
        self._options, self._job, self._book = options, job, book
        self.environment = Borrowed(nccl.settings(os.environ))
        #: a connection to a store of the user's, until the main thread needs one
        self._tried = _try_factory(options)
        self._spec = _store_spec(options, job)
        self._interrupter = Interrupter(options.interrupt_signal, held.raised)
        config = self._monitor_config()
        self.thread = MonitorThread(
            self._spec,
            book,
            WayIn(
                job.entry,
                job.ticket,
                options.join == "now",
                self._await_monitor,
                self._identify,
                self._arbiters,
                self._meet,
            ),
            self._interrupter.new_gate,
            abort,
            release,
            options.monitor_thread_interval,
            options.barrier_timeout,
        )
        self._streams = StandardStreams()  # from here on there is something to close
        self.board = Board.create()
        before = lost.contact if lost is not None else None
        self.contacts = Contacts(job.prefix, job.host, self._find_standby, before)
        self._monitor = MonitorProcess(config, self.board)
        self._watchdog = ProgressWatchdog(
            self.board,
            options.progress_watchdog_interval,
            self._monitor,
            self._monitor_died,
            Unheard(options.heartbeat_timeout),
            self._silent if self._standbys() else None,
        )
        self._store: Any = None
        #: of the standby with which the job goes on
        self.kept: Contact | None = None

    @property
    def mailbox(self) -> Mailbox:
        return self.thread.mailbox

    @descriptors.explained("the call of the wrapped function cannot begin")
    def open(self) -> None:
        """Start everything. Raises OptionError for a port that is taken, TimeoutError where nobody serves the store."""
        spec, launch = self._spec, self._job.launch
        nccl.advise(aloud=launch.rank == 0)
        announce_wrapped(own_store=bool(spec.factory) or not _is_agents(spec.host, spec.port, launch))
        self._interrupter.install()
        self._monitor.start()
        self._watchdog.start()
        if self._hosts_store():
            self._wait_serving()
        self.thread.start()

    def _wait_serving(self) -> None:
        try:
            self._monitor.wait_serving(self._options.barrier_timeout)
        except OptionError:
            if not self._is_served():
                raise
            # rank 0 died, and its monitor serves on
            self._monitor.step_aside()

    def _is_served(self) -> bool:
        """Whether a store of this call is where this process was to serve it."""
        with contextlib.suppress(StoreLost, TimeoutError):
            return drive(coordinator.has_begun(), connect(self._spec, PROBE))
        return False

    def _identify(self, member: int) -> None:
        self._monitor.identify(member)

    def _meet(self, addresses: dict[int, str], wait: bool) -> None:
        """In the MonitorThread, in each iteration: make contact with those who can say where the job goes on.

        Should this process end, it is known at once only where it had contact: so it waits before it enters first.
        """
        if addresses:
            self.contacts.make(self._book.member, addresses)
            if wait:
                self.contacts.are_made(MEET)

    def _arbiters(self, roster: Sequence[int]) -> Sequence[int]:
        """Those that stand by, in the order in which they are asked, and the host of the store."""
        host = self._job.host
        chosen = standbys(roster, self._standbys(), host)
        return (*chosen, host) if chosen and not self._job.moved else chosen

    def _find_standby(self, member: int, address: str) -> tuple[str, int] | None:
        """In the thread of the contacts; None where that member cannot stand by. Who has only just become one may not
        have published where it is: a wait for the key could not be ended with the call."""
        closing, seconds = self.contacts.closing, self._options.heartbeat_timeout
        connection = None if address else connect(self._spec, seconds, closing)
        until, pause = clock.monotonic() + seconds, LOOK
        while not address and (left := until - clock.monotonic()) > 0 and not closing.wait(min(pause, left)):
            address, pause = drive(coordinator.find_standby(member), connection), min(2 * pause, SLICE)
        if not address:
            raise TimeoutError(f"initial rank {member} has not said where its arbiter is")
        return None if address == "-" else self.numeric(address)

    def vote(self) -> tuple[Verdict, str] | None:
        """The store is lost: whether the job goes on elsewhere, and on which host. None: nobody answers."""
        self._monitor.moves()
        book, options = self._book, self._options
        vote = Vote.of(book.place, book.note(book.iteration))
        seconds = patience(options.heartbeat_timeout, options.heartbeat_interval) + options.termination_grace_time
        found = self.contacts.vote(vote, seconds)
        if found is None:
            return None
        verdict, contact = found
        if verdict.fate is Fate.GO and book.place in verdict.members:
            self.contacts.keep(contact)
            self.kept = contact
            if verdict.host == book.place:
                self._monitor.serves(verdict.port)
        return verdict, contact.host

    def may_return(self, iteration: int) -> bool:
        """Tell the arbiters that this iteration is completed. False: the others may have gone on without this rank.

        Where one of them may not know it, others may go on there; unless the store is still there when one that hears
        too little has closed itself.
        """
        known = self.contacts.say_completed(iteration)
        if known is None:
            log.warning("a standby does not answer; waiting until the others have certainly not gone on without it")
            pass_time(OUTLASTS * self._options.heartbeat_timeout)
            known = self.do(coordinator.has_begun())
        return known

    def _await_monitor(self) -> None:
        """Before a running job is interrupted to let this process in: the others would wait for its heartbeats."""
        timeout = self._options.barrier_timeout
        missing = f"the monitor process did not reach the store within barrier_timeout={timeout:g}s"
        self._await(lambda: self._monitor.connected, timeout, missing)

    def connect(self, timeout: float) -> None:
        """The main thread's own connection, once everybody has joined (or somebody has to be named who did not)."""
        if self._store is None and self._tried is not None:
            self._store, self._tried = prefixed(self._spec, self._tried), None
        self._store = self._store or connect(self._spec, timeout)

    def await_lease(self, iteration: int, timeout: float) -> None:
        """Wait for the monitor's first heartbeat, unless the iteration is interrupted meanwhile.

        The others judge this rank by its heartbeats: without one there would be no lease to stop it when they give it
        up. Raises TimeoutError, or why there is no monitor.
        """
        self._await(
            lambda: bool(self.board.slots[LEASE]) or self.mailbox.take("start", iteration, 0.0) is not None,
            timeout,
            f"the monitor process sent no heartbeat within barrier_timeout={timeout:g}s; its log has more "
            "(monitor_process_logfile)",
        )

    def _await(self, ready: Callable[[], bool], timeout: float, missing: str) -> None:
        """Wait until the monitor, or the one that the watchdog starts in its place, has come so far."""
        deadline = clock.monotonic() + timeout
        while not ready():
            self._monitor.check()
            if clock.monotonic() >= deadline:
                raise TimeoutError(missing)
            self._monitor.listen(LOOK)

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

        ``how``: completed, left (the others know), failed (the monitor tells them, and ``why``), moved (to another
        store). ``cut``: the MonitorThread waits for something that may never come.
        """
        with contextlib.ExitStack() as stack:  # runs from the last to the first, each even where another raised
            stack.callback(self._streams.close)
            stack.callback(self.board.close)
            stack.callback(self.environment.restore)
            stack.callback(self._interrupter.restore)
            stack.callback(self.contacts.close)
            stack.callback(self._monitor.bye, how, why=why)
            stack.callback(self._drop_store)
            stack.callback(self._say_gone, how)
            stack.callback(self.thread.stop, cut)
            stack.callback(self._watchdog.stop)
            self.board.leave()

    def detach(self) -> None:
        """In a process that the user's code has forked: whatever that does, it is not this rank."""
        self.board.detach()
        self._interrupter.detach()

    def _say_gone(self, how: str) -> None:
        """Its monitor says so too, but may have died; the store's host would wait for it."""
        if self._store is not None and how not in ("failed", "moved"):
            with contextlib.suppress(StoreLost):
                self.do(coordinator.gone(self._book.member, len(self._book.known)))

    def _drop_store(self) -> None:
        self._store = self._tried = None

    def _hosts_store(self) -> bool:
        return self._is_host_a_member() and self._job.host == self._job.place and not self._job.outside

    def _standbys(self) -> int:
        return self._options.standby_stores if self._serves() and len(self._book.roster) > 1 else 0

    def _serves(self) -> bool:
        """Whether a monitor of this library serves the base store; otherwise it is torchrun's agent or the user's."""
        return not self._spec.factory and not _is_agents(self._spec.host, self._spec.port, self._job.launch)

    def _monitor_config(self) -> MonitorConfig:
        options = self._options
        return MonitorConfig(
            member=self._book.member,
            rank=self._book.member,
            me=self._job.me,
            identified=False,
            roster=self._book.roster,
            store=self._spec.to_json(),
            serve_port=self._spec.port if self._hosts_store() else None,
            serve_host=self._spec.host,
            bind=_bind(options, self._serves()),
            rendezvous=("always" if self._hosts_store() else "never") if self._is_host_a_member() else "smallest",
            rendezvous_host="@" if self._is_host_a_member() else _own_address(self._spec, options.barrier_timeout),
            monitor_process_interval=options.monitor_process_interval,
            heartbeat_interval=options.heartbeat_interval,
            heartbeat_timeout=options.heartbeat_timeout,
            soft_timeout=options.soft_timeout,
            hard_timeout=options.hard_timeout,
            barrier_timeout=options.barrier_timeout,
            termination_grace_time=options.termination_grace_time,
            standby_stores=self._standbys(),
            store_host=self._job.host,
            logfile=options.logfile_for(self._book.member),
            pidfile=self._pidfile(),
        )

    def _is_host_a_member(self) -> bool:
        """Whether the store is served by the monitor of a rank: then that also serves the iterations' own stores."""
        return self._serves() and not self._job.moved

    def _pidfile(self) -> str | None:
        """The monitor of the process that this one replaces may still be there, and serve the store."""
        path = self._options.pidfile_for(self._book.member)
        return path if path is None or self._job.entry is Entry.FOUND else f"{path}.{os.getpid()}"

    def _silent(self) -> None:
        """In the watchdog's thread."""
        log.warning("no heartbeat of initial rank %d gets through: the store counts as lost", self._job.place)
        self.thread.cut()
        if self._store is not None and not self._spec.factory:
            shut_connections(numeric_address(self._store), self._spec.port)

    def _monitor_died(self) -> bool:
        """In the watchdog's thread. Answers whether there is another one now."""
        if self._monitor.config.serve_port is not None:
            if self._monitor.failed is None:
                log.error("the monitor process of rank %d, which serves the store, is gone", self._book.member)
            return False  # the MonitorThread notices that the store is gone
        log.warning("the monitor process of initial rank %d is gone; starting a new one", self._book.member)
        # the iteration first: with a newer roster a decision is applied twice, which is the same
        iteration = self._book.iteration
        try:
            return self._monitor.replace(dataclasses.replace(self._book, iteration=iteration))
        except RestartError as error:
            if self._book.iteration == coordinator.JOINING:
                self.mailbox.fail(error)  # a wrong option, say: told at once, not when the others miss this rank
            raise


def _try_factory(options: Options) -> Any:
    """A connection to a store of the user's; None where the store is another one, or is asked for its arguments first.

    Before anything else, so what its constructor raises is what the call raises, whatever else is wrong with it. It is
    kept: a store that is served where it is made first would go with it.

    Raises TimeoutError where that takes longer than barrier_timeout; for this, and for Ctrl-C, it is done in a thread.
    """
    factory = options.store_factory
    if factory is None or factory is TCPStore or hasattr(factory, "inprocess_enter"):
        return None
    overdue = (
        f"store_factory={factory!r} has made no store within barrier_timeout={options.barrier_timeout:g}s: check that "
        "what it connects to is there, and is waited for no longer than that"
    )
    with contextlib.closing(StandardStreams()):
        made = run_in_thread("store", options.barrier_timeout, lambda: factory(**options.store_kwargs), overdue)
    if not all(hasattr(made, name) for name in ("get", "set", "add")):
        raise OptionError(f"store_factory={factory!r} returned {made!r}, which is no store of torch.distributed")
    return made


def _store_spec(options: Options, job: Job) -> StoreSpec:
    """Which store the ranks agree through, in a form that the monitor process understands."""
    if options.store_factory is None or options.store_factory is TCPStore:
        return _tcp_spec(options, job)
    factory, kwargs = options.store_factory, dict(options.store_kwargs)
    module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", "")
    if module in ("", "__main__") or not _importable(module, name, factory):
        raise OptionError(
            f"store_factory={factory!r} must be a class or function at the top level of an importable module other "
            "than the main script: the monitor process imports it by name. Move it to a module of its own, and pass "
            "what a closure would know in store_kwargs"
        )
    for key, value in kwargs.items():
        _check_travels(key, value)
    if (enter := getattr(factory, "inprocess_enter", None)) is not None:
        seat = Seat(job.place, job.me, job.launch.attempt, job.entry, lambda: job.members, lambda: job.last)
        kwargs, founds = enter(kwargs, seat, options.barrier_timeout)
        job.outside = not founds
    return StoreSpec(factory=f"{module}:{name}", kwargs=kwargs, host=_own_host(options, job.launch), prefix=job.prefix)


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
    host, port = job.base or (_host(kwargs, job.launch), _port(kwargs, job.launch))
    stale_key = "" if _is_agents(host, port, job.launch) else job.stale_key
    silence = SILENCE_SHARE * options.heartbeat_timeout
    return StoreSpec(host=host, port=port, prefix=job.prefix, stale_key=stale_key, silence=silence)


def _host(kwargs: Mapping[str, Any], launch: Launch) -> str:
    """Where the library's own store is served."""
    given = kwargs.get("host_name")
    if given is not None:
        if not isinstance(given, str) or not given.strip():
            raise OptionError(
                f"store_kwargs: host_name={given!r} is no name: pass a name or an address of rank 0's host as a "
                "string, or leave it out, for MASTER_ADDR"
            )
        return given.strip()
    if launch.host or kwargs.get("port") is None:  # the launcher forgot one of two
        return launch.host or environment.master_addr()
    _check_alone(launch, f"store_kwargs: port={kwargs['port']!r} comes without host_name", "host_name in store_kwargs")
    return THIS_HOST


def _port(kwargs: Mapping[str, Any], launch: Launch) -> int:
    given = kwargs.get("port")
    if given is None:
        return launch.port or environment.master_port()
    port = environment.whole(str(given), 1, 65535)
    if port is None:
        raise OptionError(
            f"store_kwargs: port={given!r} is no port: pass a number in 1..65535, the same on all ranks, or leave it "
            "out, for MASTER_PORT"
        )
    return port


def _own_host(options: Options, launch: Launch) -> str:
    """By the route to which the others find this host, where the store is the user's."""
    if launch.host or hasattr(options.store_factory, "inprocess_enter"):  # such a one is for jobs of many hosts
        return launch.host or environment.master_addr()
    if isinstance(given := options.store_kwargs.get("host_name"), str) and given:
        return given
    _check_alone(launch, f"store_factory={options.store_factory!r} does not tell where rank 0 is", "")
    if launch.rank == 0 and launch.world_size > 1:
        log.warning(
            "MASTER_ADDR is not set: all ranks are taken to be on this host. Set it to the address of rank 0's host, "
            "on every rank, where they are not"
        )
    return THIS_HOST


def _check_alone(launch: Launch, why: str, instead: str) -> None:
    """Without an address all ranks are on this host: raises OptionError where they cannot be."""
    if split := environment.elsewhere(launch):
        raise OptionError(
            f"{why}, and MASTER_ADDR is not set, so all ranks would have to be on this host; but {split} means that "
            f"they are not. Set MASTER_ADDR{instead and f', or {instead},'} to the address of rank 0's host, the same "
            "on all ranks"
        )


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


def _own_address(spec: StoreSpec, timeout: float) -> str:
    """The address under which the other ranks reach this host: that of the route to MASTER_ADDR."""
    await_name(spec.host, timeout)
    try:
        family, kind, _, _, where = socket.getaddrinfo(spec.host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        if descriptors.shortage(error):
            raise
        raise OptionError(
            f"MASTER_ADDR={spec.host!r}: this host has no route to it ({error.strerror}). Set it to an address of rank "
            "0's host that this host reaches: by the way there the others find the address of this host."
        ) from None
