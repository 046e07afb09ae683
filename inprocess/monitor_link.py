"""The store side of a monitor process: its threads, each with its own connection, and what they have learned so far.

They carry out verbs of ``coordinator`` and ``guardian`` and serve stores. They decide nothing about the rank and never
end the process: what matters is posted to the main thread as an event. Nothing of torch is imported before ``start``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from inprocess import clock, coordinator, guardian, light_torch, policy
from inprocess.attribution import InterruptionRecord
from inprocess.board import LEASE, Board
from inprocess.exception import BadMessage, OptionError, StoreLost, TimeoutError
from inprocess.monitor_config import MonitorConfig
from inprocess.protocol.book import Book
from inprocess.protocol.messages import Decision
from inprocess.protocol.ops import Verb

if TYPE_CHECKING:
    from inprocess.store import StoreSpec

__all__ = ["Crashed", "Event", "HalfLoaded", "Joined", "Link", "Lost", "Over", "Serving", "Spoken", "Woken"]

T = TypeVar("T")
log = logging.getLogger("inprocess.monitor")
#: how long a finished host waits for the others before it tells its training process not to wait for it (seconds)
SHORTLY = 0.05
#: pause before a lost connection is made again, while joining (seconds)
RECONNECT = 0.05
#: longest try to make a lost connection again, once the job has begun (seconds)
AGAIN = 1.0


@dataclass(frozen=True)
class Serving:
    """The base store is up."""

    port: int


@dataclass(frozen=True)
class Joined:
    """The store has been reached: the first heartbeat is there."""


@dataclass(frozen=True)
class Lost:
    """The store is gone."""

    text: str


@dataclass(frozen=True)
class Crashed:
    """A thread ended with an error; ``option``: because of a wrong option or environment variable."""

    text: str
    option: bool = False


@dataclass(frozen=True)
class HalfLoaded:
    """torch can only be imported by a new program."""


@dataclass(frozen=True)
class Woken:
    """Something changed that the rules look at."""


@dataclass(frozen=True)
class Spoken:
    """All has been said for a member, the store is not needed for it any more."""

    member: int


@dataclass(frozen=True)
class Over:
    """No member needs this host any more (``True``), or it has waited long enough."""

    complete: bool


Event: TypeAlias = Serving | Joined | Lost | Crashed | HalfLoaded | Woken | Spoken | Over


class Link:
    """Threads and connections of one monitor. Each field has one writing thread; ``book`` is replaced, not changed."""

    def __init__(
        self, config: MonitorConfig, board: Board, post: Callable[[Event], None], predecessor: int = -1
    ) -> None:
        self._config, self._board, self._post, self._predecessor = config, board, post, predecessor
        self._by = f"the monitor of initial rank {config.member} on {socket.gethostname()}"
        self._spec: StoreSpec
        self._imported = threading.Event()
        self._give_up = threading.Event()
        self._base: Any = None
        self._rendezvous = _Rendezvous(config.rendezvous_host, config.serve_host, config.bind)
        #: the member's view of the job
        self.book = Book(config.member, config.roster, iteration=config.iteration, founders=frozenset(config.founders))
        #: the last iteration that was seen interrupted, and when (ns)
        self.interrupted: tuple[int, int] = (-2, 0)
        #: when this member was found off the roster (ns)
        self.removed_at: int | None = None
        self.limits = policy.Limits.of(config.soft_timeout, config.hard_timeout, config.heartbeat_timeout)
        self._beats = False
        #: the job has ended, or goes on without this member
        self.ended = threading.Event()
        #: members for which it has begun to speak and is not done
        self.speaking: set[int] = set()

    # --- what the main thread asks for; nothing here blocks -----------------------------------------------------

    def start(self) -> None:
        """Import torch, serve if this is the host, connect, follow the job and send heartbeats."""
        self._spawn(self._join)

    def report(self, iteration: int, record: InterruptionRecord) -> None:
        """Interrupt an iteration."""
        self._spawn(self._with_store, self._driving(lambda: coordinator.interrupt(iteration, record)))

    def speak(self, record: InterruptionRecord) -> None:
        """Account for the dead training process until it is off the roster or the job has ended; posts Spoken."""
        self._speak_for(self._config.member, record)

    def say_gone(self) -> None:
        """The rank has said all by itself; posts Spoken."""
        self._spawn(self._say_gone)

    def linger(self) -> None:
        """Wait until the others need this host no more; posts Over, perhaps twice."""
        self._spawn(self._linger)

    def give_up(self) -> None:
        """Stop waiting for a store that is not up."""
        self._give_up.set()

    @property
    def lease_until(self) -> int | None:
        """Until when the others do not go on without this member, a predecessor's heartbeats included (ns)."""
        return self._board.slots[LEASE] or None

    @property
    def is_host(self) -> bool:
        """Whether others use a store that is served here."""
        return self._config.serve_port is not None or (self._rendezvous.serving and self.book.included)

    # --- threads ------------------------------------------------------------------------------------------------

    def _spawn(self, action: Callable[..., object], *args: object) -> None:
        # daemon: a thread that waits inside torch cannot be asked to end
        threading.Thread(target=self._guarded, args=(action, *args), name=action.__name__, daemon=True).start()

    def _guarded(self, action: Callable[..., object], *args: object) -> None:
        try:
            action(*args)
        except BadMessage as error:
            self._spoiled(error)
        except (StoreLost, TimeoutError) as error:
            self._post(Lost(str(error)))
        except OptionError as error:
            self._post(Crashed(str(error), option=True))
        except light_torch.HalfLoaded as error:
            log.warning("%s; starting again with all of torch", error)
            self._post(HalfLoaded())
        except Exception as error:
            log.exception("thread %s failed", threading.current_thread().name)
            self._post(Crashed(f"{type(error).__name__}: {error}"))

    def _join(self) -> None:
        # a user's own store class may need all of torch
        known = any(name in self._config.store for name in ('"factory": ""', '"inprocess.store:'))
        kind = light_torch.load(full=self._config.full_torch or not known)
        from inprocess import store  # noqa: PLC0415  (imports torch)

        log.info("torch imported (%s)", kind)
        self._spec = store.StoreSpec.from_json(self._config.store)
        if self._config.serve_port is not None:
            self._serve(self._config.serve_port)
        self._imported.set()
        self._spawn(self._with_store, self._follow)
        self._spawn(self._with_store, self._watch)

    def _serve(self, port: int) -> None:
        from inprocess import store  # noqa: PLC0415

        if self._predecessor >= 0:  # the host of the call before, which still has the port
            poll = select.poll()
            poll.register(self._predecessor, select.POLLIN)
            poll.poll(self._config.barrier_timeout * 1e3)
        self._base = store.serve(self._config.serve_host, port, self._config.bind)
        if not self._spec.factory and not self._spec.port:
            self._spec = dataclasses.replace(self._spec, port=self._base.port)
        self._post(Serving(self._base.port))

    def _with_store(self, action: Callable[[Any], T]) -> T:
        """Do something over a connection of its own. While joining, a store that goes away may be that of the call
        before on the same port: then begin again."""
        self._imported.wait()
        from inprocess import store  # noqa: PLC0415

        while True:
            connection = store.connect(self._spec, self._config.barrier_timeout, self._give_up)
            try:
                return action(connection)
            except BadMessage:
                raise
            except StoreLost:
                if self.book.iteration > coordinator.JOINING or self._give_up.wait(RECONNECT):
                    raise

    def _driving(self, verb: Callable[[], Verb[T]]) -> Callable[[Any], T]:
        return lambda connection: _drive(verb(), connection)

    def _spoiled(self, error: BadMessage) -> None:
        """Nobody can go on: say so to the others, who may never read that value, and have this rank leave in time."""
        log.error("%s", error)
        iteration = self.book.iteration
        if self.removed_at is None:
            self.removed_at = clock.monotonic_ns()
        self.ended.set()
        self._post(Woken())
        with contextlib.suppress(StoreLost, TimeoutError):
            self._with_store(self._driving(lambda: coordinator.give_up(iteration, str(error))))

    # --- following the job --------------------------------------------------------------------------------------

    def _follow(self, connection: Any) -> None:
        """next -> outcome -> next -> ...: the chain of decisions, until the job ends or goes on without this member."""
        if self.book.iteration == coordinator.JOINING and self._config.rendezvous == "always":
            self._rendezvous.offer(0, connection)
        while not self.ended.is_set():
            try:
                decision = self._await_decision(connection)
            except coordinator.Behind as behind:
                log.warning("%s", behind)
                self._move(Book.jump, behind.roster)
                continue
            if decision is None:
                break
            self._go_on(decision)
        self.ended.set()

    def _await_decision(self, connection: Any) -> Decision | None:
        """How this iteration ended; None: everybody has returned."""
        iteration = self.book.iteration
        if iteration > coordinator.JOINING:
            if self._is_rendezvous_host():
                self._rendezvous.offer(iteration, connection)
            _drive(coordinator.refuse_behind(iteration), connection)
            if _drive(coordinator.await_outcome(iteration), connection).completed:
                return None
            self._on_interrupted(iteration, connection)
        return _drive(coordinator.await_next_awake(iteration, book=self.book), connection)

    def _is_rendezvous_host(self) -> bool:
        smallest = self._config.rendezvous == "smallest" and self.book.roster[0] == self._config.member
        return smallest or self._config.rendezvous == "always"

    def _on_interrupted(self, iteration: int, connection: Any) -> None:
        self.interrupted = (iteration, clock.monotonic_ns())
        self._post(Woken())
        if self._config.rendezvous == "always":
            self._rendezvous.offer(iteration + 1, connection)  # off the critical path: nobody asks for it yet

    def _go_on(self, decision: Decision) -> None:
        if decision.abort:  # the iteration stays the one that a rank has to leave
            log.info("iteration %d: everybody leaves: %s", self.book.iteration, decision.abort)
            self._rendezvous.close_before(self.book.iteration + 1)
            self.ended.set()
            return
        self._move(Book.apply, decision)

    def _move(self, change: Callable[[Book, T], None], how: T) -> None:
        """Go to another iteration, of which this member may not be a part any more."""
        book = copy.copy(self.book)
        change(book, how)
        if not book.included and self.removed_at is None:
            self.removed_at = clock.monotonic_ns()
        self.book = book
        # not before: who still tries to connect would try for as long as its own timeout
        self._rendezvous.close_before(book.iteration)
        log.info("iteration %d: %d members", book.iteration, len(book.roster))
        concerned = book.included or self._config.serve_port is not None
        if not book.roster or not concerned:
            self.ended.set()

    # --- heartbeats ---------------------------------------------------------------------------------------------

    def _watch(self, connection: Any) -> None:
        config = self._config
        ring = guardian.Ring(config.member, config.heartbeat_timeout, config.heartbeat_interval)

        def lost(member: int, seconds: float) -> None:
            log.warning("initial rank %d sends no heartbeats any more", member)
            self._speak_for(member, guardian.lost_record(member, seconds))

        while True:
            try:
                _drive(guardian.keep_watch(ring, lambda: self.book, self._beaten, lost), connection)
            except BadMessage:
                raise
            except StoreLost as error:
                connection = self._again(error)

    def _again(self, error: StoreLost) -> Any:
        """A new connection where only this one was lost: a server closes it, too, where a counter holds no number."""
        from inprocess import store  # noqa: PLC0415

        try:
            connection = store.connect(self._spec, AGAIN, self._give_up)
            _drive(coordinator.read_beat(self._config.member), connection)
        except BadMessage:
            raise
        except (StoreLost, TimeoutError):
            raise error from None
        return connection

    def _beaten(self, when: float) -> None:
        """A lease that has run out is never renewed: the others may have gone on. A process that was stopped and wakes
        gets its next heartbeat through sooner than anybody looks at the lease."""
        lease = self.lease_until
        if lease is not None and clock.monotonic_ns() >= lease:
            return
        alone = self.book.roster == (self._config.member,)  # for good: nobody comes back
        self._board.slots[LEASE] = 0 if alone else int(when * 1e9) + self.limits.lease
        if not self._beats:
            self._beats = True
            self._post(Joined())

    # --- speaking for the dead, and the end ---------------------------------------------------------------------

    def _speak_for(self, member: int, record: InterruptionRecord) -> None:
        log.warning("speaking for initial rank %d: %s", member, record)
        self.speaking.add(member)

        def action(connection: Any) -> None:
            # first: this monitor may be killed, and nobody speaks for a member that is off the roster already
            self._gone(member, connection)
            try:
                _drive(guardian.stand_in(copy.copy(self.book), member, record, self._by), connection)
            except BadMessage as error:
                self._spoiled(error)

        self._spawn(self._speak_out, member, action)

    def _speak_out(self, member: int, action: Callable[[Any], None]) -> None:
        try:
            self._with_store(action)
        finally:
            self.speaking.discard(member)
        self._post(Spoken(member))

    def _say_gone(self) -> None:
        def action(connection: Any) -> None:
            self._gone(self._config.member, connection)
            # usually all leave together; a next call then finds no server of this one
            _drive(coordinator.await_over(SHORTLY), connection)

        self._with_store(action)
        self._post(Spoken(self._config.member))

    def _gone(self, member: int, connection: Any) -> None:
        try:
            _drive(coordinator.gone(member, self._config.members), connection)
        except BadMessage as error:
            log.error("%s", error)  # the host waits for nobody longer than barrier_timeout

    def _linger(self) -> None:
        if self.ended.wait(SHORTLY) and self._with_store(self._driving(lambda: coordinator.await_over(SHORTLY))):
            self._post(Over(True))
            return
        self._post(Over(False))  # not yet: the training process need not wait for it
        self.ended.wait()
        patience, everybody = self._config.barrier_timeout, self._config.roster
        self._with_store(self._driving(lambda: coordinator.await_over(patience, everybody)))
        self._post(Over(True))


class _Rendezvous:
    """The iterations' own store servers: those in use, and one made ahead. Only the follower's thread calls it."""

    def __init__(self, host: str, base: str, bind: str) -> None:
        self._host = host
        # an address that is published as such is the only one that anybody uses
        self._where = (base, bind) if host == "@" else (host, host)
        self._spare: Any = None
        self._servers: dict[int, Any] = {}

    @property
    def serving(self) -> bool:
        return bool(self._servers)

    def offer(self, iteration: int, connection: Any) -> None:
        """Publish a server for this iteration, unless somebody else has done so or it is interrupted already."""
        if iteration in self._servers:  # published while the iteration before was being aborted
            return
        self._spare = self._spare or self._new()
        address = f"{self._host}:{self._spare.port}"
        if _drive(coordinator.publish_rendezvous(iteration, address), connection) == address:
            self._servers[iteration], self._spare = self._spare, self._new()

    def close_before(self, iteration: int) -> None:
        """Shut the servers of older iterations down. Torch does that when the last reference goes."""
        self._servers = {number: server for number, server in self._servers.items() if number >= iteration}

    def _new(self) -> Any:
        from inprocess import store  # noqa: PLC0415

        return store.serve(self._where[0], 0, self._where[1])


def _drive(verb: Verb[T], connection: Any) -> T:
    from inprocess import store  # noqa: PLC0415

    return store.drive(verb, connection)
