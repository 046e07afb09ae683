"""The store side of a monitor process: its threads, each with its own connection, and what they have learned so far.

They carry out verbs of ``coordinator`` and ``guardian`` and serve stores. They decide nothing about the rank and never
end the process: what matters is posted to the main thread as an event. Nothing of torch is imported before ``start``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import resource
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from inprocess import clock, coordinator, descriptors, guardian, joiner, light_torch, policy
from inprocess.attribution import InterruptionRecord
from inprocess.board import LEASE, Board
from inprocess.exception import BadMessage, OptionError, RestartAbort, StoreLost, TimeoutError
from inprocess.logs import get_logger
from inprocess.monitor_config import MonitorConfig
from inprocess.protocol import arbitration
from inprocess.protocol.book import Book
from inprocess.protocol.messages import Decision
from inprocess.protocol.ops import Verb

if TYPE_CHECKING:
    from inprocess.standby import Standby
    from inprocess.store import StoreSpec

__all__ = [
    "Connected",
    "Crashed",
    "Event",
    "HalfLoaded",
    "Joined",
    "Link",
    "Lost",
    "Over",
    "Serving",
    "Spoken",
    "StandbyChanged",
    "Unbegun",
    "Woken",
]

T = TypeVar("T")
log = get_logger("inprocess.monitor")
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
class Connected:
    """The store has been reached: heartbeats can begin as soon as the rank is in the job."""


@dataclass(frozen=True)
class Joined:
    """The first heartbeat is there."""


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
class Unbegun:
    """Not everybody has joined yet."""


@dataclass(frozen=True)
class Spoken:
    """All has been said for a member, the store is not needed for it any more."""

    member: int


@dataclass(frozen=True)
class StandbyChanged:
    """Somebody more, or less, may need this standby."""


@dataclass(frozen=True)
class Over:
    """No member needs this host any more (``True``), or it has waited long enough."""

    complete: bool


Event: TypeAlias = (
    Serving | Connected | Joined | Lost | Crashed | HalfLoaded | Woken | Unbegun | Spoken | StandbyChanged | Over
)


class Link:
    """Threads and connections of one monitor. Each field has one writing thread; ``book`` is replaced, not changed."""

    def __init__(
        self, config: MonitorConfig, board: Board, post: Callable[[Event], None], predecessor: int = -1
    ) -> None:
        self._config, self._board, self._post, self._predecessor = config, board, post, predecessor
        self._by = f"the monitor of initial rank {config.rank} on {socket.gethostname()}"
        self._spec: StoreSpec
        self._imported = threading.Event()
        self._give_up = threading.Event()
        self._base: Any = None
        #: where members meet when the store is lost, if this is a standby, or serves the store
        self._standby: Standby | None = None
        self._standing = threading.Lock()
        #: no heartbeats any more: the rank votes
        self._moves = threading.Event()
        self._rendezvous = _Rendezvous(config.rendezvous_host, config.serve_host, config.bind)
        #: the member's view of the job
        self.book = _book(config)
        #: of the last iteration that started, and of those since then; changed under the lock, with the book
        self._rosters: list[tuple[int, ...]] = [self.book.roster]
        self._moving = threading.Lock()
        #: the rank is a founder, or has a ticket; until then ``member`` is what a founder would be
        self._identified = threading.Event()
        #: the rank is a member, or was one
        self._inside = threading.Event()
        if config.identified:
            self.identify(config.member)
        #: the last iteration that was seen interrupted, and when (ns)
        self.interrupted: tuple[int, int] = (-2, 0)
        #: when this member was found off the roster (ns)
        self.removed_at: int | None = None
        self.limits = policy.Limits.of(config.soft_timeout, config.hard_timeout, config.heartbeat_timeout)
        #: when the last heartbeat that got through was begun (s); protected by the lock, with the lease on the board
        self._beat_at: float | None = None
        self._lease = threading.Lock()
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
        if self.inside:
            self._speak_for(self.member, record)
        else:
            self._spawn(self._with_store, lambda connection: self._speak_outside(record, connection))

    def identify(self, member: int) -> None:
        """Who the rank is: a founder that has arrived, or the id on its ticket."""
        self.book = dataclasses.replace(self.book, member=member)
        self._look_inside()
        self._identified.set()

    @property
    def member(self) -> int:
        return self.book.member

    @property
    def inside(self) -> bool:
        """The rank is a member of the job, or was one."""
        return self._inside.is_set()

    def ask_begun(self) -> None:
        """Posts Unbegun where the job has not begun."""
        self._spawn(self._with_store, self._ask_begun)

    def say_gone(self) -> None:
        """The rank has said all by itself; posts Spoken."""
        self._spawn(self._say_gone)

    def linger(self) -> None:
        """Wait until the others need this host no more; posts Over, perhaps twice."""
        self._spawn(self._linger)

    def move(self) -> None:
        """The rank asks an arbiter where the job goes on: what serves the store now must not count on it."""
        self._moves.set()

    @property
    def patience(self) -> float:
        """How long members that lost the store wait for each other at most, and then some (seconds)."""
        config = self._config
        return 2 * arbitration.patience(config.heartbeat_timeout, config.heartbeat_interval)

    def lose(self) -> None:
        """The store is lost: members may come to this standby."""
        if self._standby is not None:
            self._standby.desk.lost()

    def give_up_after(self, seconds: float) -> None:
        """Stop waiting for a store that is not up; not before there was so much time to look for it."""
        self._spawn(self._give_up_after, seconds)

    @property
    def lease_until(self) -> int | None:
        """Until when the others do not go on without this member, a predecessor's heartbeats included (ns)."""
        return self._board.slots[LEASE] or None

    @property
    def is_host(self) -> bool:
        """Whether others use a store that is served here."""
        return self._config.serve_port is not None or (self._rendezvous.serving and self.book.included)

    @property
    def is_asked(self) -> bool:
        """Whether there are members that may ask this standby, or use its store. Whoever serves the old one is not."""
        if self._standby is None or self._config.serve_port is not None:
            return False
        return self._standby.desk.is_needed(self.book.roster)

    @property
    def serves_again(self) -> bool:
        """Whether the job goes on here."""
        return self._standby is not None and self._standby.serves

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
            name = threading.current_thread().name
            shortage = descriptors.shortage(error)
            log.error("thread %s failed: %s", name, shortage or error, exc_info=not shortage)
            self._post(Crashed(shortage or f"{type(error).__name__}: {error}"))

    def _join(self) -> None:
        # a user's own store class may need all of torch
        known = any(
            name in self._config.store for name in ('"factory": ""', '"inprocess.store:', '"inprocess.etcd_store:')
        )
        kind = light_torch.load(full=self._config.full_torch or not known)
        from inprocess import store  # noqa: PLC0415  (imports torch)

        log.info("torch imported (%s)", kind)
        self._spec = store.StoreSpec.from_json(self._config.store)
        if self._config.serve_port is not None:
            self._serve(self._config.serve_port)
        self._imported.set()
        if not self._identified.is_set():
            self._spawn(self._with_store, self._ask_identity)
        self._spawn(self._with_store, self._follow)
        self._spawn(self._with_store, self._watch)

    def _serve(self, port: int) -> None:
        from inprocess import store  # noqa: PLC0415

        if self._predecessor >= 0:  # the host of the call before, which still has the port
            poll = select.poll()
            poll.register(self._predecessor, select.POLLIN)
            poll.poll(self._config.barrier_timeout * 1e3)
        _raise_limit()
        try:  # half of the time for which the rank waits for this
            store.await_name(self._config.serve_host, self._config.barrier_timeout / 2)
        except TimeoutError as error:
            raise OptionError(str(error)) from None
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

    def _ask_identity(self, connection: Any) -> None:
        """A founder is known by its entry, also where it stops, or dies, before it can say so."""
        if _drive(coordinator.await_founder(self._config.rank, (self._config.me, self._by)), connection):
            self.identify(self._config.rank)

    def _give_up_after(self, seconds: float) -> None:
        self._imported.wait()
        self._give_up.wait(seconds)
        if self._beat_at is None:
            self._give_up.set()

    def _ask_begun(self, connection: Any) -> None:
        if not _drive(coordinator.has_begun(), connection):
            self._post(Unbegun())

    def _follow(self, connection: Any) -> None:
        """next -> outcome -> next -> ...: the chain of decisions, until the job ends or goes on without this member."""
        self._identified.wait()
        if not self.inside:  # it has a ticket
            try:
                self.book = _drive(joiner.follow(self.member), connection)
            except RestartAbort:
                self.ended.set()
                return
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
            outside = not self.inside
            self._go_on(decision)
            if outside and self.inside:  # at once: the others wait for its first heartbeat
                self._beat(connection)
            # the first time it stood by already, but perhaps in the store of the call before
            if self._standby is None or self.book.iteration == 0:
                self._stand_by(connection)
        self.ended.set()

    def _beat(self, connection: Any) -> None:
        now = clock.monotonic()
        _drive(coordinator.beat(self.member), connection)
        self._beaten(now)

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

    def _look_inside(self) -> None:
        if self.member in self.book.known:
            self._inside.set()

    def _is_rendezvous_host(self) -> bool:
        smallest = self._config.rendezvous == "smallest" and self.book.roster[0] == self.member
        return smallest or self._config.rendezvous == "always"

    def _on_interrupted(self, iteration: int, connection: Any) -> None:
        if self.inside:
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
        with self._moving:
            self.book = book
            self._rosters.append(book.roster)
        self._look_inside()
        if self.inside and not book.included and self.removed_at is None:
            self.removed_at = clock.monotonic_ns()
        if not self.lease_until:
            self._note_lease()  # it was alone from the start, and somebody has joined
        # not before: who still tries to connect would try for as long as its own timeout
        self._rendezvous.close_before(book.iteration)
        log.info("iteration %d: %d members", book.iteration, len(book.roster))
        concerned = book.included or not self.inside or self._config.serve_port is not None
        if not book.roster or not concerned:
            self.ended.set()

    # --- heartbeats ---------------------------------------------------------------------------------------------

    def _watch(self, connection: Any) -> None:
        self._post(Connected())
        self._identified.wait()
        config = self._config
        ring = guardian.Ring(self.member, config.heartbeat_timeout, config.heartbeat_interval)

        def lost(member: int, seconds: float) -> None:
            place = self.book.place_of(member)
            log.warning("initial rank %d sends no heartbeats any more", place)
            self._speak_for(member, guardian.lost_record(place, seconds))

        while True:
            try:
                self._stand_by(connection)  # before the first heartbeat: then others may ask where it is
                _drive(guardian.keep_watch(ring, lambda: self.book, self._beaten, lost, self._moves.is_set), connection)
                return
            except BadMessage:
                raise
            except StoreLost as error:
                connection = self._again(error)

    def _again(self, error: StoreLost) -> Any:
        """A new connection where only this one was lost: a server closes it, too, where a counter holds no number."""
        from inprocess import store  # noqa: PLC0415

        try:
            connection = store.connect(self._spec, AGAIN, self._give_up)
            _drive(coordinator.read_beat(self.member), connection)
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
        first, self._beat_at = self._beat_at is None, when
        self._note_lease()
        if first:
            self._post(Joined())

    def _note_lease(self) -> None:
        """There is none where it was alone from the start. Who is the last of many has one: a process that waits to
        join watches it, and goes on without it."""
        with self._lease:
            if self._beat_at is not None:
                alone = self.book.known == {self.member}
                self._board.slots[LEASE] = 0 if alone else int(self._beat_at * 1e9) + self.limits.lease

    # --- standing by --------------------------------------------------------------------------------------------

    def _stand_by(self, connection: Any) -> None:
        """Open an arbiter as soon as this member is one of those that stand by, and say where it is. It stays, those
        who stand by change."""
        config, roster = self._config, self.book.roster
        hosts = config.serve_port is not None
        chosen = arbitration.standbys(roster, config.standby_stores, config.store_host)
        with self._standing:
            if self._standby is not None:
                self._standby.publish(connection)
                return
            if not self.inside or not chosen or not (hosts or self.member in chosen):
                return
            from inprocess import standby  # noqa: PLC0415

            _raise_limit()
            config = dataclasses.replace(config, member=self.member)
            self._standby = standby.Standby.make(config, self.book.place, self._spec, self._spawn, self._on_standby)
            if self._standby is None:
                _drive(coordinator.publish_standby(self.member, "-"), connection)
                return
            if hosts:
                self._spawn(self._with_store, self._keep_store)
            self._standby.publish(connection)

    def _on_standby(self) -> None:
        self._post(StandbyChanged())

    def _keep_store(self, connection: Any) -> None:
        from inprocess import standby  # noqa: PLC0415

        assert self._standby is not None
        standby.keep(self._config, connection, lambda: self._known_rosters(connection), self._standby.desk, self.ended)
        if not self.ended.is_set():
            self._base = None  # torch shuts it down when the last reference goes
            self._rendezvous.close_before(1 << 62)

    def _known_rosters(self, connection: Any) -> list[tuple[int, ...]]:
        book = self.book
        started = book.iteration > coordinator.JOINING and _drive(coordinator.has_started(book.iteration), connection)
        with self._moving:
            if started and self.book is book:
                self._rosters = [book.roster]
            return list(self._rosters)

    # --- speaking for the dead, and the end ---------------------------------------------------------------------

    def _speak_for(self, member: int, record: InterruptionRecord) -> None:
        log.warning("speaking for initial rank %d: %s", self.book.place_of(member), record)
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

    def _speak_outside(self, record: InterruptionRecord, connection: Any) -> None:
        """It may have been let in by now; and where nobody knows yet who it is, the store does."""
        try:
            if self._identified.is_set():
                book = _drive(joiner.follow(self.member), connection)
                _drive(joiner.speak_for(book, record, self._by), connection)
            else:
                book = copy.copy(self.book)
                verb = joiner.speak_for_unknown(book, self._config.me, record, self._by, self.identify)
                _drive(verb, connection)
        except BadMessage as error:
            self._spoiled(error)
            self._gone(self.member, connection)  # it may be a founder's, for which the store's host waits
        except RestartAbort as error:
            log.info("everybody leaves: %s", error)
        self._post(Spoken(self.member))

    def _say_gone(self) -> None:
        def action(connection: Any) -> None:
            if not self.inside:  # the job was over before it was let in
                if not self.book.was_founder:
                    _drive(coordinator.return_ticket(self.member), connection)
                return
            self._gone(self.member, connection)
            # usually all leave together; a next call then finds no server of this one
            _drive(coordinator.await_over(SHORTLY), connection)

        self._with_store(action)
        self._post(Spoken(self.member))

    def _gone(self, member: int, connection: Any) -> None:
        try:
            _drive(coordinator.gone(member, len(self.book.known)), connection)
        except BadMessage as error:
            log.error("%s", error)  # the host waits for nobody longer than barrier_timeout

    def _linger(self) -> None:
        if self.ended.wait(SHORTLY) and self._everybody_has_gone(SHORTLY):
            self._post(Over(True))
            return
        self._post(Over(False))  # not yet: the training process need not wait for it
        self.ended.wait()
        self._everybody_has_gone(self._config.barrier_timeout)
        self._post(Over(True))

    def _everybody_has_gone(self, patience: float) -> bool:
        return self._with_store(self._driving(lambda: coordinator.await_over(patience, self.book.known)))


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


def _raise_limit() -> None:
    """As many descriptors as this process may have: each rank has four connections to the store."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _book(config: MonitorConfig) -> Book:
    places = dict(zip(config.places[::2], config.places[1::2], strict=True))
    known = frozenset(config.known)
    return Book(config.member, config.roster, iteration=config.iteration, known=known, places=places)


def _drive(verb: Verb[T], connection: Any) -> T:
    from inprocess import store  # noqa: PLC0415

    return store.drive(verb, connection)
