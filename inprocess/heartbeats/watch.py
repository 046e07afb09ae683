"""The worker's side of the launcher: a function without a Wrapper is watched.

A watch costs its function next to nothing: ``ping()`` writes one number to memory that the launcher reads as well. The
connection stays open for as long as the watch lasts and nothing is sent over it after the first line. Without a
launcher everything works the same, and nobody looks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from inprocess.attribution import one_line
from inprocess.exception import RestartError
from inprocess.heartbeats.board import PING, WatchBoard
from inprocess.heartbeats.launcher import ask
from inprocess.monitor.learned import LearnedTimeouts
from inprocess.monitor.timeouts import (
    GIVEN_SECTION,
    LEARNED_FIRST,
    LEARNED_OUTSIDE,
    LEARNED_PING,
    LEARNED_SECTION,
    Limit,
    Limits,
    Seen,
)
from inprocess.options import seconds
from inprocess.system import clock, environment
from inprocess.system.logs import get_logger

__all__ = ["Watch", "monitored"]

log = get_logger("inprocess")
#: nothing is limited where nobody looks
_UNLIMITED = Limits(first=None, heartbeat=None, out_of_section=None)


def monitored() -> Watch:
    """Let this library's launcher watch this process from now on, for a function that has no Wrapper.

    ::

        with inprocess.monitored() as watch:
            with watch.section("load"):
                model, data = load()
            for batch in data:
                train_one(batch)
                watch.ping()

    Or without ``with``: the watch ends with :meth:`Watch.close`, or with the process. The time limits are the
    launcher's (``--ft-cfg-path``, ``--ft-<name>``); a worker that exceeds one is ended by
    ``rank_termination_signal`` and counts as failed. Where no launcher of this library started the process, or it does
    not answer within 10 s, the watch only measures, and a warning says so once. Never raises for that.

    One watch counts per worker: of several processes, or several watches, the first.
    """
    address = environment.launcher()
    if address is None:
        _say_once("no launcher of inprocess started this process (INPROCESS_LAUNCHER is not set)")
        return Watch()
    board: WatchBoard | None = None
    try:
        board = WatchBoard.create()
        connection, reply = ask(address, {"say": "watch"}, board.fd)
        with connection:  # which a Watch takes over
            return Watch(board, connection, Limits.from_json(reply.get("limits")))
    except (OSError, ValueError, RestartError) as error:
        _say_once(f"its launcher does not watch it: {one_line(str(error), 300)}")
        return Watch()
    finally:
        if board is not None:
            board.close()  # the launcher has a descriptor of its own


@functools.cache
def _say_once(why: str) -> None:
    log.warning("inprocess.monitored(): this process is not watched, durations are only measured: %s", why)


@dataclass(eq=False)
class _Section:
    name: str
    since: int
    #: nanoseconds; 0: none
    limit: int
    #: where that comes from, as in `Seen`
    origin: int


class Watch:
    """What :func:`monitored` gives. Usable from any thread; in a forked child it goes on without its launcher."""

    def __init__(
        self, board: WatchBoard | None = None, connection: socket.socket | None = None, limits: Limits = _UNLIMITED
    ) -> None:
        self._board = board
        self._slots: memoryview[int] | list[int] = [0] if board is None else board.slots
        self._now = clock.monotonic_ns
        # closes the connection when this object is gone, too: then nobody can ping any more
        self._hang_up = weakref.finalize(self, _close, -1 if connection is None else connection.detach())
        self._configured = self._limits = limits
        self._timeouts = LearnedTimeouts(functools.partial(_apply, weakref.ref(self)))  # no cycle: see _hang_up
        self._timeouts.safety_factor = limits.safety_factor
        self._timeouts.outside = board is None or limits.out_of_section is not None
        #: limits that were learned, as in `Seen`, and the names of sections whose limits were
        self._learned, self._learned_sections = 0, frozenset[str]()
        #: protects everything below, and the board's slots but PING; a signal handler may enter a section, too
        self._lock = threading.RLock()
        self._began = self._now()
        self._used = False
        self._open: list[_Section] = []
        self._outside_since = 0
        #: longest time between two pings (ns)
        self._longest = 0
        self._show()
        _watches.add(self)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def watched(self) -> bool:
        """Whether a launcher looks."""
        return self._board is not None

    @property
    def timeouts(self) -> LearnedTimeouts:
        """What was learned about durations: to agree on it with all ranks, to save and to load it."""
        return self._timeouts

    def ping(self) -> None:
        """Say that this worker makes progress.

        The first one ends ``initial_rank_heartbeat_timeout``; from then on the next must follow within
        ``rank_heartbeat_timeout``, except in a section that has a limit. No system call: it stamps shared memory and
        remembers the longest time between two.
        """
        now = self._now()
        slots = self._slots
        if now - slots[PING] > self._longest:
            self._longer(now)
        slots[PING] = now

    def _longer(self, now: int) -> None:
        with self._lock:
            self._use(now)
            last = self._slots[PING]
            if last and now - last > self._longest:
                self._longest = now - last
                self._timeouts.observed.heartbeat = self._longest / 1e9

    def _use(self, now: int) -> None:
        if not self._used:
            self._used = True
            self._timeouts.observed.first = (now - self._began) / 1e9

    @contextlib.contextmanager
    def section(self, name: str, timeout: Any = None) -> Iterator[None]:
        """A named part of the work with a time limit of its own, counted from here.

        Args:
            name: under which the launcher's ``rank_section_timeouts`` has its limit and durations are learned.
            timeout: timedelta or seconds in place of that limit. None: learned, once :attr:`timeouts` were calculated
                or loaded and the section was seen three times; else as configured; else ``rank_heartbeat_timeout``
                goes on.

        Sections nest, also over threads; each one's time counts. Raises OptionError for a timeout that is not positive.
        """
        configured, given = self._limits.sections.get(name), f"section({name!r}): timeout"
        limit = configured if timeout is None else seconds(given, timeout, positive=True)
        learned = LEARNED_SECTION if name in self._learned_sections else 0
        section = self._enter(str(name), _nanoseconds(limit), learned if timeout is None else GIVEN_SECTION)
        try:
            yield
            with self._lock:
                self._timeouts.observed.section(name, (self._now() - section.since) / 1e9)
        finally:
            self._leave(section)

    def _enter(self, name: str, limit: int, origin: int) -> _Section:
        with self._lock:
            if self._slots[PING]:
                self.ping()
            section = _Section(name, self._now(), limit, origin)
            self._use(section.since)
            if self._outside_since:
                observed = self._timeouts.observed
                observed.out_of_section = max(observed.out_of_section, (section.since - self._outside_since) / 1e9)
            self._outside_since = 0
            self._open.append(section)
            self._show()
            return section

    def _leave(self, section: _Section) -> None:
        with self._lock:
            self._open.remove(section)
            now = self._now()
            self._outside_since = 0 if self._open else now
            if self._slots[PING]:
                self._slots[PING] = now  # no gap: the section has had a time of its own
            self._show()

    def close(self) -> None:
        """End the watch: nothing is limited any more. More than once is fine, and so is ``ping()`` afterwards."""
        with self._lock:
            self._board, self._slots = None, [0]
            self._hang_up()

    def _apply(self) -> None:
        """Learned timeouts count from now on; a section that is open keeps its own."""
        with self._lock:
            agreed, outside = self._timeouts.agreed, self._timeouts.outside
            self._limits = agreed.limits(self._configured, outside)
            learned = agreed.limits(_UNLIMITED, outside)
            bits = ((learned.first, LEARNED_FIRST), (learned.heartbeat, LEARNED_PING))
            self._learned = sum(bit for limit, bit in (*bits, (learned.out_of_section, LEARNED_OUTSIDE)) if limit)
            self._learned_sections = frozenset(learned.sections)
            self._show()

    def _show(self) -> None:
        if self._board is None:
            return
        limited = [each for each in self._open if each.limit]
        first_due = min(limited, key=lambda each: each.since + each.limit, default=_Section("", 0, 0, 0))
        self._board.show(
            Seen(
                began=self._began,
                used=self._used,
                section=first_due.name,
                section_since=first_due.since,
                section_limit=first_due.limit,
                outside_since=self._outside_since,
                first_limit=_nanoseconds(self._limits.first),
                ping_limit=self._ping_limit(),
                outside_limit=_nanoseconds(self._limits.out_of_section),
                origin=self._origin() | first_due.origin,
            )
        )

    def _ping_limit(self) -> int:
        """In a section that has no limit yet, what was learned outside does not apply: it may be a long one."""
        learned, configured = _nanoseconds(self._limits.heartbeat), _nanoseconds(self._configured.heartbeat)
        if not self._open:
            return learned
        return max(learned, configured) if learned and configured else 0

    def _origin(self) -> int:
        """In a section a learned limit between pings counts only where it is the longer one."""
        configured = _nanoseconds(self._configured.heartbeat)
        if self._open and configured and self._ping_limit() == configured:
            return self._learned & ~LEARNED_PING
        return self._learned

    def _forked(self) -> None:
        """In the child: the parent's memory and connection are none of its business."""
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self.close()


def _nanoseconds(limit: Limit) -> int:
    return 0 if limit is None else max(1, int(limit * 1e9))


def _apply(watch: weakref.ref[Watch]) -> None:
    if (found := watch()) is not None:
        found._apply()


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def _forked() -> None:
    for watch in list(_watches):
        watch._forked()


os.register_at_fork(after_in_child=_forked)
