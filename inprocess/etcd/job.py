"""How processes come into a job in etcd, each into the same one, and who tidies up behind them.

A generation is what a server is to a TCPStore: nothing of one is seen in the next. Its keys are tied to one lease, so
they end together. Below the namespace::

    <attempt>/job                       the generation that stands: the number of its lease
    <attempt>/<generation>/seat/<rank>  the process that founds the job with this rank
    <attempt>/<generation>/seated       exists once every rank has one
    <attempt>/<generation>/here/<rank>  that process lives and has seen it
    <attempt>/<generation>/full         exists once all have: the job begins
    <attempt>/<generation>/left/<name>  a process that has ended

Whoever uses the data keeps the lease alive; taking a seat does not, nor does waiting to join. So a generation whose
processes are dead ends by itself, also where some processes of a next job have taken seats in it that were free: the
dead do not say that they are here. And nobody joins it: the dead do not write data either.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inprocess.etcd.cluster import Cluster, Expired, is_value, put, range_of
from inprocess.exception import OptionError, TimeoutError
from inprocess.protocol.messages import JoinMode
from inprocess.stores.spec import JobIdentity
from inprocess.system import clock
from inprocess.system.logs import get_logger

__all__ = ["Entrance", "Generations", "leave_at_exit"]

log = get_logger(__name__)
#: how often a process that waits for the others looks whether the generation still stands (seconds)
MAX_WATCH_S = 1.0
#: generation -> when its lease is to be kept alive again (monotonic seconds); once for all connections of a process
_due: dict[str, float] = {}


@dataclass(frozen=True)
class _Entry:
    """How this process has come into a generation."""

    #: a child that it forks has not
    pid: int
    generation: str
    seat: JobIdentity
    #: makes a connection for the end
    generations: Callable[[], Generations]


#: (key that names a job's generation, process) -> the last one: those before have ended
_inside: dict[tuple[str, str], _Entry] = {}


class Generations:
    """The generations of one job: which one stands, and how its lease is kept."""

    def __init__(self, cluster: Cluster, namespace: str, ttl: int, attempt: str = "0") -> None:
        self.cluster, self.namespace, self.ttl, self.attempt = cluster, namespace, ttl, attempt
        #: the key that names the one that stands
        self.job = f"{namespace}/{attempt}/job"

    def of(self, attempt: str) -> Generations:
        return Generations(self.cluster, self.namespace, self.ttl, attempt)

    def place(self, generation: str, name: str) -> str:
        return f"{self.namespace}/{self.attempt}/{generation}/{name}"

    def standing(self) -> str:
        """The one that stands, or nothing."""
        found = self.cluster.transact([], [range_of(self.job)]).answers[0]
        return "" if found is None else found.value.decode()

    def current(self) -> str:
        """The one that stands; a new one where there is none."""
        while not (generation := self.standing()):
            lease = self.cluster.grant(self.ttl)
            mine = put(self.job, lease.encode(), lease)
            done = self.cluster.transact([is_value(self.job, b"")], [mine], [range_of(self.job)])
            found = done.answers[0]
            # where the first answer was lost, the second sending finds what the first has written
            if not done.succeeded and (found is None or found.value != lease.encode()):
                self.end(lease)
        return generation

    def keep_alive(self, generation: str) -> None:
        """Where it is time to. Raises Expired where it is too late."""
        now = clock.monotonic()
        if now < _due.get(generation, 0.0):
            return
        _due[generation] = now + self.ttl / 3
        if not self.cluster.renew(generation):
            _due.pop(generation, None)  # another thread may have found it, too
            raise Expired

    def end(self, generation: str) -> None:
        """Delete it with all its keys."""
        with contextlib.suppress(Expired):
            self.cluster.revoke(generation)

    def note(self, generation: str, name: str) -> None:
        self.cluster.transact([], [put(self.place(generation, name), b"1", generation)])

    def entries(self, generation: str, name: str) -> dict[str, str]:
        """Whose entry of that name -> what is written there."""
        start = self.place(generation, f"{name}/")
        return {each.key.removeprefix(start): each.value.decode() for each in self.cluster.below(start)}


class Entrance:
    """How a process comes into a generation: with the others, to found a job; or later, to join it. And into none of
    an earlier job."""

    def __init__(self, generations: Generations, seat: JobIdentity, timeout: float) -> None:
        self._generations, self._cluster, self._seat, self._timeout = generations, generations.cluster, seat, timeout
        self._deadline = clock.monotonic() + timeout
        #: who has this rank in the generation that stands
        self._holder = ""
        self._missing: list[int] = []

    def enter(self) -> tuple[str, bool]:
        """The generation, and whether this process is one of those with whom the call begins."""
        grows, me = self._seat.entry is JoinMode.GROW, self._seat.me
        while self._left() > 0:
            with contextlib.suppress(Expired):
                generation = self._generations.standing() if grows else self._generations.current()
                known = _is_inside(self._generations.job, generation, me)
                founds = not grows and (known or self._found(generation))
                if known or founds or self._join(generation):
                    self._generations.keep_alive(generation)
                    return generation, founds
        raise TimeoutError(self._story())

    def _left(self) -> float:
        return self._deadline - clock.monotonic()

    def _story(self) -> str:
        name, rank = self._generations.namespace, self._seat.rank
        within = f"within {self._timeout:g} s (barrier_timeout)"
        if self._holder:
            return (
                f"RANK={rank} of the job {name!r} in etcd is taken by {self._holder}, and that job neither ran nor "
                f"ended {within}: two processes of it have the same rank, or ttl is longer than barrier_timeout."
            )
        if self._missing:
            return (
                f"initial ranks {self._missing} have not come to the job {name!r} in etcd {within}: check that they "
                "were started, with the same endpoints and namespace."
            )
        return f"no job {name!r} runs in etcd that RANK={rank} could join {within}: check endpoints and namespace."

    # --- together with the others -------------------------------------------------------------------------------

    def _found(self, generation: str) -> bool:
        """False: the job begins without this process, or the generation has ended, or time is over."""
        if not (self._sit(generation) and self._all(generation, "seat", "seated")):
            return False
        self._generations.note(generation, f"here/{self._seat.rank}")
        return self._all(generation, "here", "full")

    def _sit(self, generation: str) -> bool:
        """Take the seat; that of a dead process too, as long as the job has not begun. False: it is another one's."""
        place, seated, full = (self._place(generation, name) for name in (f"seat/{self._seat.rank}", "seated", "full"))
        holder = self._take(place, generation, is_value(place, b""), is_value(seated, b""))
        if holder and self._seat.entry is JoinMode.REPLACE:
            holder = self._take(place, generation, is_value(place, holder.encode()), is_value(full, b""))
        self._holder = "" if holder == self._seat.me else holder
        return holder == self._seat.me

    def _take(self, place: str, generation: str, *compare: dict[str, Any]) -> str:
        """Who has the seat then; empty: nobody has, and nobody may take it."""
        mine = put(place, self._seat.me.encode(), generation)
        done = self._cluster.transact(list(compare), [mine], [range_of(place)])
        found = done.answers[0]
        return self._seat.me if done.succeeded else "" if found is None else found.value.decode()

    def _all(self, generation: str, name: str, verdict: str) -> bool:
        """Wait until there is an entry of that name for each rank. False: as `_found`."""
        place, seat = self._place(generation, verdict), self._place(generation, f"seat/{self._seat.rank}")
        while True:
            done = self._cluster.transact([], [range_of(place), range_of(seat)])
            decided, holder = done.answers
            if holder is None or holder.value != self._seat.me.encode():  # its end, or this process is replaced
                return False
            if decided is not None:
                return True
            entries = self._generations.entries(generation, name)
            if str(self._seat.rank) not in entries:  # it has ended since, and all entries with it
                return False
            self._missing = [rank for rank in self._seat.members() if str(rank) not in entries]
            if not self._missing:
                self._generations.note(generation, verdict)
            elif self._left() <= 0:
                return False
            else:
                self._cluster.watch(place, done.revision, min(self._left(), MAX_WATCH_S))

    def _place(self, generation: str, name: str) -> str:
        return self._generations.place(generation, name)

    # --- later --------------------------------------------------------------------------------------------------

    def _join(self, generation: str) -> bool:
        """Wait for a sign of life of a job that has begun. False: another one stands by now, or time is over.

        Its heartbeats are one. Where all processes are dead there is none until the keys expire.
        """
        job, full = self._generations.job, self._place(generation, "full")
        alive = told = False
        while self._left() > 0:
            done = self._cluster.transact([], [range_of(job), range_of(full)])
            standing, begun = done.answers
            if ("" if standing is None else standing.value.decode()) != generation:
                return False
            if not told:
                self._tell_that_it_waits()
                told = True
            if alive and self._seat.entry is JoinMode.FOUND:
                raise OptionError(
                    f"a job {self._generations.namespace!r} runs in etcd, and RANK={self._seat.rank} has no part in "
                    "it. Give each job a namespace of its own. Is this process to join a job that runs? Set "
                    "INPROCESS_RESTART=1 for it, or INPROCESS_JOB to one name for all processes of the job."
                )
            if alive:
                return True
            watched = job if not generation else self._place(generation, "data/" if begun else "")
            patience = min(self._left(), self._generations.ttl / 3)
            seen = self._cluster.watch_below(watched, done.revision, patience)
            alive = begun is not None and seen is not None
        return False

    def _tell_that_it_waits(self) -> None:
        log.warning(
            "job %r in etcd: rank %d %s; waiting until that job shows that it runs, or its keys have expired",
            self._generations.namespace,
            self._seat.rank,
            f"is taken by {self._holder}" if self._holder else "is none with which it began",
        )


# --- the end ------------------------------------------------------------------------------------------------------


def leave_at_exit(job: str, generations: Callable[[], Generations], generation: str, seat: JobIdentity) -> None:
    """``generations``: makes a connection for that."""
    if not _inside:
        atexit.register(_leave_all)
    if not _is_inside(job, generation, seat.me):
        _inside[job, seat.me] = _Entry(os.getpid(), generation, seat, generations)


def _is_inside(job: str, generation: str, me: str) -> bool:
    entry = _inside.get((job, me))
    return entry is not None and entry.generation == generation


def _leave_all() -> None:
    for entry in _inside.values():
        if entry.pid == os.getpid():  # else it is that of the process that has forked this one
            _leave(entry.generations, entry.generation, entry.seat)


def _leave(generations: Callable[[], Generations], generation: str, seat: JobIdentity) -> None:
    """Say that this process has ended. The last one deletes the generation, so that a next job need not wait for it.

    Only those count that were there when the last call of this process ended, whether they founded the job or joined
    it: everybody else is dead, or has left, or never was in the job.
    """
    me, everybody = seat.last()
    if not me:
        return
    try:
        mine = generations()
        mine.note(generation, f"left/{me}")
        if mine.entries(generation, "left").keys() >= set(everybody):
            mine.end(generation)
    except (RuntimeError, OptionError) as error:
        log.info("the keys of the job stay in etcd until they expire: %s", error)
