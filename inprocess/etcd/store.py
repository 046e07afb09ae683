"""A store in an etcd cluster, for those who have one.

Every operation is one transaction, sent to whichever endpoint answers. It may be sent twice, since an endpoint can die
between carrying it out and answering, so each is made to have the effect of one. A wait is a watch, one HTTP response
that goes on until the key is there.

Keys, below those of a generation, see ``job``: ``data/<key>``, what the store holds; ``mark/<id>``, the last
addition of one connection.

A counter to which only ones were added holds ``COUNTED``, and its number is the key's version: etcd counts how often a
key was set. So any number of ranks count at once, with one operation each, none of which can lose against another.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store as _Store

from inprocess.etcd.cluster import (
    Cluster,
    Done,
    Found,
    delete,
    is_unchanged,
    is_value,
    is_version,
    otherwise,
    put,
    range_of,
    raw,
)
from inprocess.etcd.job import Entrance, Generations, leave_at_exit
from inprocess.exception import OptionError, StoreLost
from inprocess.options import seconds
from inprocess.stores.spec import JobIdentity
from inprocess.stores.tcp import StoreMixin
from inprocess.system import clock

__all__ = ["EtcdStore"]

#: operations in one transaction; etcd takes 128, unless it is told otherwise
MAX_KEYS_PER_REQUEST = 100
#: in place of a number, see above
COUNTED = b"\0counted"
#: how long the last words of a process may take (seconds)
LAST_WORDS = 2.0


class EtcdStore(StoreMixin, _Store):
    """A store in an etcd cluster (3.4 or later), through its HTTP gateway. See ``docs/stores.md``.

    The connection is made with the first operation. Use it in one thread; others make their own.

    Args:
        endpoints: the members of the cluster, as a list or separated by commas: ``"https://10.0.0.1:2379,..."``.
            Without a scheme it is http, which certificates are not for. Where one does not answer the next is used.
        namespace: the name of the job, put before all its keys. Two jobs that run at the same time need two names.
        timeout: for operations that wait, in seconds or as a timedelta; default 300 s.
        ttl: whole seconds; default 60. The keys vanish this long after the last process has used them.
        patience: how long an operation is tried again while members refuse connections, do not answer or elect a
            leader, in seconds; default 10. Keep it below three quarters of ``heartbeat_timeout``.
        user: where the cluster asks for authentication; default: it does not.
        password: of the user.
        ca_cert: path of the certificates by which servers are judged; default: those of the system.
        cert: path of this client's certificate, where the cluster wants one.
        key: path of its private key.
        generation: set by the library; leave it out.

    Raises:
        OptionError: an argument is wrong, or a certificate cannot be read.
    """

    __module__ = "inprocess.etcd_store"  # where users import it

    def __init__(
        self,
        endpoints: str | Sequence[str] = "http://127.0.0.1:2379",
        namespace: str = "inprocess",
        timeout: float | timedelta = 300.0,
        *,
        ttl: int = 60,
        patience: float = 10.0,
        user: str = "",
        password: str = "",
        ca_cert: str = "",
        cert: str = "",
        key: str = "",
        generation: str = "",
    ) -> None:
        super().__init__()
        if isinstance(ttl, bool) or not isinstance(ttl, int) or ttl < 3:
            raise OptionError(f"EtcdStore: ttl={ttl!r} must be a whole number of seconds, at least 3")
        if not isinstance(namespace, str) or not namespace:
            raise OptionError(f"EtcdStore: namespace={namespace!r} must be the name of the job, the same on all ranks")
        if bool(user) != bool(password):
            raise OptionError(f"EtcdStore: user={user!r} and password=... go together: give both, or neither")
        patience = seconds("EtcdStore: patience", patience, positive=True)
        self._cluster = Cluster(endpoints, patience, (user, password), ca_cert, (cert, key))
        self._generations = Generations(self._cluster, namespace, ttl)
        self._generation = generation
        self._mark, self._marked = secrets.token_hex(8), 0
        # protects what is known about the counters: the mark's version says which additions were carried out
        self._adding = threading.Lock()
        self.set_timeout(timedelta(seconds=seconds("EtcdStore: timeout", timeout)))

    # --- torch's methods ----------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self._do([], [self._put(key, raw(value))])

    def get(self, key: str) -> bytes:
        """What the key holds; waits for it. Raises RuntimeError after the timeout."""
        value = self._await(key, patience := self._patience())
        if value is None:
            raise RuntimeError(f"wait timeout: nobody has set {key!r} within {patience:g} s")
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns the new value. Adding 0 reads it."""
        if amount == 0:  # a read, in which an absent key is one that holds 0
            return _number(self.compare_set(key, b"0", b"0"), key)
        with self._adding:
            try:
                number = self._count(key) if amount == 1 else None
                while number is None:
                    number = self._add_once(key, amount)
                return number
            except BaseException:  # it may have been carried out, and then the next one would be taken for it
                self._mark, self._marked = secrets.token_hex(8), 0
                raise

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set the key where it holds ``expected``, or, where that is empty, where it is absent. Returns what it holds
        then; ``expected`` where it is absent and something was expected."""
        expected, desired = raw(expected), raw(desired)
        place = self._place(key)
        if expected and expected == desired:  # changes nothing, so it need not be agreed on by the cluster
            done = self._do([], [range_of(place)])
        else:
            compare = is_value(place, expected)
            while True:
                done = self._do([compare], [self._put(key, desired)], [range_of(place)])
                if done.succeeded:
                    return desired
                found = done.answers[0]
                if found is None or found.value != COUNTED or _value(found) != expected:
                    break
                compare = is_unchanged(place, found)  # the number is the one expected, though in other words
        found = done.answers[0]
        return expected if found is None else _value(found)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for all keys. Raises RuntimeError after the timeout."""
        patience = self._patience() if timeout is None else timeout.total_seconds()
        deadline = clock.monotonic() + patience
        for key in keys:
            if self._await(key, max(0.0, deadline - clock.monotonic())) is None:
                raise RuntimeError(f"wait timeout: nobody has set {key!r} within {patience:g} s")

    def check(self, keys: Sequence[str]) -> bool:
        return all(found is not None for found in self._find(keys))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [
            self.get(key) if found is None else _value(found) for key, found in zip(keys, self._find(keys), strict=True)
        ]

    def delete_key(self, key: str) -> bool:
        return self._do([], [delete(self._place(key))]).answers[0] is not None

    def num_keys(self) -> int:
        return len(self._cluster.below(self._place(""), keys_only=True))

    # where C++ calls (torch's PrefixStore does), it looks for these names
    deleteKey, getNumKeys = delete_key, num_keys

    # --- of our own ---------------------------------------------------------------------------------------------

    def inprocess_cut(self) -> None:
        """Have the thread that waits here, and whoever uses this connection later, fail at once. From any thread."""
        self._cluster.cut()

    @classmethod
    def inprocess_enter(cls, kwargs: dict[str, Any], seat: JobIdentity, timeout: float) -> tuple[dict[str, Any], bool]:
        """Come into this job's generation: with all ranks, or later, where it runs already. Returns its connections'
        arguments, and whether the call begins with this process.

        Raises:
            TimeoutError: ranks are missing, or who has this rank neither runs nor ends, after ``timeout`` seconds.
            StoreLost: no endpoint answers.
        """

        def generations(**more: Any) -> Generations:
            return cls(**kwargs | more)._generations.of(seat.attempt)

        enters = generations()
        try:
            generation, founds = Entrance(enters, seat, timeout).enter()
        except RuntimeError as error:
            raise StoreLost(f"cannot enter the job in etcd: {error}") from None
        leave_at_exit(enters.job, lambda: generations(patience=LAST_WORDS), generation, seat)
        return kwargs | {"generation": f"{seat.attempt}/{generation}"}, founds

    def _patience(self) -> float:
        untyped: Any = self  # torch's stubs do not know `timeout`
        return float(untyped.timeout.total_seconds())

    # --- one transaction ----------------------------------------------------------------------------------------

    def _place(self, key: str, kind: str = "data") -> str:
        generations = self._generations
        if not self._generation:
            self._generation = f"{generations.attempt}/{generations.current()}"
        return f"{generations.namespace}/{self._generation}/{kind}/{key}"

    def _put(self, key: str, value: bytes) -> dict[str, Any]:
        return put(self._place(key), value, self._lease)

    @property
    def _lease(self) -> str:
        return self._generation.rpartition("/")[2]

    def _do(self, compare: list[Any], success: list[Any], failure: Iterable[Any] = ()) -> Done:
        self._generations.keep_alive(self._lease)
        return self._cluster.transact(compare, success, failure)

    def _find(self, keys: Sequence[str]) -> list[Found | None]:
        found: list[Found | None] = []
        for first in range(0, len(keys), MAX_KEYS_PER_REQUEST):
            found += self._do(
                [], [range_of(self._place(key)) for key in keys[first : first + MAX_KEYS_PER_REQUEST]]
            ).answers
        return found

    def _await(self, key: str, seconds: float) -> bytes | None:
        place, deadline = self._place(key), clock.monotonic() + seconds
        while True:
            done = self._do([], [range_of(place)])
            if (found := done.answers[0]) is not None:
                return _value(found)
            left = deadline - clock.monotonic()
            if left <= 0:
                return None
            found = self._cluster.watch(place, done.revision, min(left, self._generations.ttl / 3))
            if found is not None:
                return _value(found)

    def _count(self, key: str) -> int | None:
        """Count one up; the new number. None: the key holds something else than a count."""
        place, mark = self._place(key), self._place(self._mark, "mark")
        known = is_version(mark, self._marked)
        counts = [self._put(key, COUNTED), put(mark, b"", self._lease), range_of(place)]
        first = otherwise([known, is_value(place, b"")], counts, [range_of(mark)])
        done = self._do([known, is_value(place, COUNTED)], counts, [first])
        if done.succeeded:
            self._marked += 1
            return _count_of(done.answers[-1])
        marked = done.answers[0]
        if not self._has_added(marked):
            return None
        assert marked is not None
        return _count_of(self._do([], [range_of(place, marked.changed)]).answers[0])

    def _add_once(self, key: str, amount: int) -> int | None:
        """Add to a counter; the new number. None: it was changed meanwhile."""
        place, mark = self._place(key), self._place(self._mark, "mark")
        counter = self._do([], [range_of(place)]).answers[0]
        text = str(_number(b"0" if counter is None else _value(counter), key) + amount).encode()
        done = self._do(
            [is_unchanged(place, counter), is_version(mark, self._marked)],
            [self._put(key, text), put(mark, text, self._lease)],
            [range_of(mark)],
        )
        if done.succeeded:
            self._marked += 1
            return int(text)
        marked = done.answers[0]
        return int(marked.value) if self._has_added(marked) and marked is not None else None

    def _has_added(self, marked: Found | None) -> bool:
        """Whether an addition that failed was carried out before: the mark is written with each and counts them."""
        if marked is None or marked.version <= self._marked:
            return False
        self._marked += 1
        return True


def _value(found: Found) -> bytes:
    return found.value if found.value != COUNTED else str(found.version).encode()


def _count_of(found: Found | None) -> int:
    assert found is not None  # it was set by the same transaction
    return found.version


def _number(text: bytes, key: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise RuntimeError(f"{key!r} does not hold a number") from None
