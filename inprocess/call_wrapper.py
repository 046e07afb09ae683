"""The CallWrapper: what the wrapped function sees of a running call. The loop behind it is in ``call``.

`disabled` has the one of a function whose Wrapper is disabled. Which one code finds that has none: at the end.
"""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Callable, Iterator
from threading import current_thread, get_ident, main_thread
from typing import Any, Protocol

from inprocess.exception import OptionError, RestartError
from inprocess.interrupt.frames import leave_alone
from inprocess.interrupt.gate import Gate
from inprocess.monitor import lease
from inprocess.monitor.board import ATOMIC, LEASE, PING, Board
from inprocess.monitor.learned import LearnedTimeouts
from inprocess.options import seconds
from inprocess.state import FrozenState
from inprocess.system import clock, whole_files
from inprocess.system.clock import monotonic_ns
from inprocess.system.observers import emit

__all__ = ["CallWrapper", "Controls", "Counts", "LastSave", "Leaving", "current_call"]

#: how one begins, as text or made a Path
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


class Leaving:
    """What `CallWrapper.leaving` is from the moment that a signal asked this rank to leave.

    Args:
        signum: the signal.
        deadline: when the function is interrupted at the latest (seconds of the monotonic clock).
    """

    def __init__(self, signum: int, deadline: float) -> None:
        #: the number of the signal
        self.signum = signum
        self._deadline = deadline
        #: whether all active ranks were asked to leave, within a second; each rank learns that at a moment of its own,
        #: and may be at another step then
        self.everybody = False
        # whether the last checkpoint, where there is to be one, is written or given up, also over another store
        self.is_saved = False

    @property
    def seconds_left(self) -> float:
        """Until the function is interrupted, if no step ends before; 0 where that is over."""
        return max(0.0, self._deadline - clock.monotonic())


class Deputy(Protocol):
    """What `LiveState` asks of the call, where all ranks leave: to agree on the step of a last checkpoint."""

    def say(self, what: str) -> None:
        """Tell the others, once in an iteration. Main thread, as what follows."""

    def agree(self, what: str) -> int | None:
        """The largest value of all active ranks, where all have said it; None: not yet."""


class Counts:
    """What this rank has done in the running iteration, for what counts as the same error again, and for reports."""

    __slots__ = ("entered", "kept", "pings", "ran_long", "sections")

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Of another iteration."""
        self.pings = 0
        #: pings up to the last `atomic` that was left: steps that are not lost, as it seems
        self.kept = 0
        #: how many `atomic` were left, likewise
        self.sections = 0
        #: whether the function ran long
        self.ran_long = False
        #: when the function was entered (seconds); None: it has not been
        self.entered: float | None = None

    @property
    def progressed(self) -> bool:
        """Whether this rank has made progress."""
        return self.ran_long or self.sections > 0


class LastSave:
    """What `LiveState` and the call tell each other, for the case that all ranks leave."""

    __slots__ = ("commits", "deputy", "wanted")

    def __init__(self) -> None:
        #: commits of a LiveState that have ended in this iteration
        self.commits = 0
        #: for each LiveState that writes a checkpoint then: what it keeps of that
        self.wanted: set[Any] = set()
        #: None: there is nobody to agree with
        self.deputy: Deputy | None = None


class CallWrapper:
    """Handed to the wrapped function for any argument annotated ``CallWrapper`` or ``Optional[CallWrapper]``.

    So is an argument named ``inprocess_call_wrapper``, whatever its annotation. With ``enabled=False`` only an argument
    annotated plain ``CallWrapper`` is filled in, with one that does nothing: ``iteration`` is 0, ``state`` that of a
    job without faults, ``store`` raises RestartError, ``timeouts`` keeps what it is given, for checkpoints, and
    ``save`` writes.

    Usable only while the function runs. ``inprocess.current_call()`` gives the same object to code that has no such
    argument.

    In a process that the function forks it is the child's own: ``ping()``, ``section()``, ``atomic()`` and
    ``disable_hang_protection()`` do nothing for the rank, and ``store`` raises RestartError.
    """

    def __init__(self, board: Board, make_store: Callable[[], Any]) -> None:
        self._board = board
        self._slots = board.slots
        self._now = clock.monotonic_ns
        self._make_store = make_store
        # set by the loop in each iteration
        self._atomic: _Atomic | None = None
        self._state: FrozenState | None = None
        self._timeouts = LearnedTimeouts()
        #: of the main thread in this iteration; the innermost is the last
        self._sections: list[_Section] = []
        self._counts, self._last = Counts(), LastSave()
        #: checkpoints of a LiveState, whose memory is given back when the call is over
        self._to_free = weakref.WeakSet[Any]()
        #: what asked this rank to leave; set in the handler of a signal
        self._leaving: Callable[[], Leaving | None] = _not_leaving

    @property
    def iteration(self) -> int:
        """How often the job was restarted so far: 0 in the first run of the function."""
        return self.state.iteration

    @property
    def state(self) -> FrozenState:
        """Ranks, world sizes, iteration and mode."""
        if self._state is None:
            raise RestartError("CallWrapper.state is known only while the wrapped function runs")
        return self._state

    @property
    def store(self) -> Any:
        """This iteration's own store (a torch TCPStore client, connected on first use).

        It is empty at the start of each iteration, and the one that ``init_process_group()`` uses; pass it as
        ``store=`` or keep small values in it. When the iteration is interrupted, each rank cuts its own connections
        to it, so that waits on it end with an error. Its server goes after all ranks have left the function.
        """
        return self._make_store()

    @property
    def timeouts(self) -> LearnedTimeouts:
        """What :meth:`section` has learned about durations: to agree on it with all ranks, to save and to load it."""
        return self._timeouts

    @property
    def leaving(self) -> Leaving | None:
        """Set from the moment that a signal (`leave_signals`) asked this rank to leave; None until then.

        The function need not look at it: the rank leaves by itself after the step it is in. Where it wants to use what
        is left of the time, it finds here how much that is.
        """
        return self._leaving()

    def ping(self) -> None:
        """Say that this rank makes progress.

        From its first use in an iteration on, the time since the last ``ping()`` counts for ``soft_timeout``
        beside the automatic progress. It stamps shared memory, counts, and does nothing else. Raises RestartError when
        the call is over.
        """
        self._slots[PING] = self._now()
        self._counts.pings += 1

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        """A section that no restart cuts in half: no abort and no interruption begins inside it.

        Reentrant, usable in any thread. Once an abort has begun, entering raises RankShouldRestart. Keep it short: the
        others wait for it (a warning names the holder every second).

        No section begins on a rank that the others may have given up (cut off from them or standing still for 0.9 *
        ``heartbeat_timeout``): entering ends the process instead. One that had begun before is not undone: a host that
        was paused inside it may finish what it was doing when it wakes up. See the guide on how to fence that too.
        """
        if self._atomic is None:
            raise RestartError("atomic() can be used only while the wrapped function runs")
        return self._atomic

    def save(self, obj: object, path: str | os.PathLike[str], rank: int = 0) -> bool:
        """Write a checkpoint with ``torch.save``, whole or not at all, inside :meth:`atomic`.

        It is written into a new file in the same folder, put on the disk, and renamed. On the other ranks this returns
        at once: it waits for nobody.

        Args:
            obj: what ``torch.save`` takes.
            path: of a local file, or on a file system that is mounted.
            rank: the rank that writes, as the function sees ranks.

        Returns: whether this rank has written.

        Raises:
            OptionError: there is no such rank, or ``path`` is a URL or no path. On every rank.
            RankShouldRestart: an abort has begun.

        What ``torch.save`` and the file system raise is passed on. Then the new file is removed, and a file that stood
        there before stays. A rank that is killed meanwhile leaves ``.<name>.<random>.new`` beside it.
        """
        state = self.state
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < state.active_world_size:
            raise OptionError(f"save: rank={rank!r} must be one of the {state.active_world_size} active ranks, from 0")
        where = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
        if not isinstance(where, str) or _URL.match(where):
            raise OptionError(
                f"save: path={path!r} must be a path of a file system. For a URL, write with fsspec and torch.save "
                "inside call.atomic()"
            )
        if state.active_rank != rank:
            return False
        import torch  # noqa: PLC0415  (programs that import this library need not have torch)

        with self.atomic():
            whole_files.put_in_place(where, lambda beside: torch.save(obj, beside))
        return True

    @contextlib.contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """Inside, no progress is asked for: neither ``soft_timeout`` nor a lack of progress ends this rank's step."""
        iteration = self._board.unprotect()
        try:
            yield
        finally:
            self._board.protect(iteration)

    def section(self, name: str, timeout: Any = None) -> contextlib.AbstractContextManager[None]:
        """A named part of the step with a soft timeout of its own.

        Args:
            name: for learning: durations are kept per name, over restarts.
            timeout: timedelta or seconds in place of ``soft_timeout``. None: learned, 5 times the longest duration seen
                so far (at least 5 s) once it was seen three times; ``soft_timeout`` until then. Each rank learns by
                itself; :attr:`timeouts` makes one value of it for all ranks and keeps it in a checkpoint.

        Sections nest; the innermost counts. In another thread than the main one, whose progress is watched, a section
        only learns. Raises OptionError for a timeout that is not positive.
        """
        limit = self._timeouts.section_limit(name) if timeout is None else given_limit(name, timeout)
        return _Section(self, name, limit)

    def _sections_changed(self) -> None:
        self._board.section(self._sections[-1].limit if self._sections else None)

    def _first_ping(self) -> int:
        """The time, for `ping`; what comes only once costs the next pings nothing."""
        self._now = clock.monotonic_ns
        emit("first_step")
        return clock.monotonic_ns()


class Controls:
    """The library's side of a CallWrapper: what the function has no business with. As many as one likes.

    Args:
        call: that one.
    """

    __slots__ = ("_call",)

    def __init__(self, call: CallWrapper) -> None:
        self._call = call

    @property
    def counts(self) -> Counts:
        """The same object in all iterations."""
        return self._call._counts

    @property
    def last(self) -> LastSave:
        """The same object in all iterations."""
        return self._call._last

    @property
    def gate(self) -> Gate | None:
        """That of the running function or hook; None outside."""
        return self._call._atomic.gate if self._call._atomic is not None else None

    @gate.setter
    def gate(self, gate: Gate | None) -> None:
        self._call._atomic = _Atomic(self._call, gate) if gate is not None else None

    def leave_by(self, asked: Callable[[], Leaving | None], deputy: Deputy | None) -> None:
        """What asks this rank to leave, which may be called in the handler of a signal, and who agrees for it."""
        self._call._leaving, self.last.deputy = asked, deputy

    def free_at_end(self, checkpoint: Any) -> None:
        """Its memory is given back when the call is over; a weak reference."""
        self._call._to_free.add(checkpoint)

    def begin_iteration(self) -> None:
        """Another iteration is decided."""
        self.counts.begin()
        self.last.commits = 0

    def place(self, state: FrozenState) -> None:
        """Its ranks are assigned."""
        call = self._call
        call._state, call._sections = state, []
        self.last.wanted.clear()
        call._now = call._first_ping

    def end(self) -> None:
        """The call is over. A thread that the function has left behind may still be in a section."""
        self.gate, self._call._now, self._call._slots = None, _call_is_over, self._call._board.copied()
        for each in self._call._to_free:
            each.free()

    def detach(self) -> None:
        """In a forked child, whose board nobody sees."""
        self._call._slots = self._call._board.slots
        self._call._make_store = _no_store


def given_limit(name: str, timeout: Any) -> float:
    """What `section` was given, in seconds. Raises OptionError where it is not positive."""
    return seconds(f"section({name!r}): timeout", timeout, positive=True)


def _not_leaving() -> None:
    """Nothing asked."""


def _call_is_over() -> int:
    raise RestartError("ping() can be used only while the wrapped function runs")


def _no_store() -> Any:
    raise RestartError(
        "call.store is the rank's connection, and a process that it forks would break it: connect a torch TCPStore to "
        "MASTER_ADDR and MASTER_PORT there"
    )


class _Section:
    """A class, since a generator that is dropped unfinished runs its ``finally``, perhaps in a later iteration."""

    __slots__ = ("_begun", "_call", "_name", "limit")

    def __init__(self, call: CallWrapper, name: str, limit: float | None) -> None:
        self._call, self._name, self.limit = call, name, limit
        self._begun: list[float] = []  # one may be entered again inside itself

    def __enter__(self) -> None:
        self._begun.append(clock.monotonic())
        if current_thread() is main_thread():
            self._call._sections.append(self)
            self._call._sections_changed()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        begun, sections = self._begun.pop(), self._call._sections
        try:
            if kind is None:
                self._call._timeouts.observed.section(self._name, clock.monotonic() - begun)
        finally:
            # those of an earlier iteration, in a generator perhaps, are not among them, nor are those of other threads
            if self in sections and current_thread() is main_thread():
                del sections[-1 - sections[::-1].index(self)]
                self._call._sections_changed()


class _Atomic:
    """``gate.atomic`` that shows on the board, so that the monitor does not take a long save for a hang. One per gate.

    Entering and leaving are one call each, with the lines of `Atomic` in them: a second one would add a fifth.
    """

    __slots__ = ("_call", "_later", "_state", "gate")

    def __init__(self, call: CallWrapper, gate: Gate) -> None:
        self.gate = gate
        self._call, self._state = call, gate.atomic
        # those that were entered in place of this one, which the program had kept from an earlier hook or iteration
        self._later: list[Any] = []

    def __enter__(self) -> None:
        call, state = self._call, self._state
        if call._atomic is not self:
            return self._enter_later()
        state._lock.acquire()
        if state.closed and not state.depth:
            state.refuse()
        state.depth += 1
        state._holder = get_ident()
        slots = call._slots
        slots[ATOMIC] = 1  # no count: two threads may be in sections of two gates, and change it at the same time
        if (until := slots[LEASE]) and until <= monotonic_ns():
            lease.kill_self()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        call, state = self._call, self._state
        if not state._lock._is_owned():
            return self._leave_later(kind, error, trace)
        if kind is None:
            counts = call._counts
            counts.kept = counts.pings
            counts.sections += 1
        if state.depth == 1:
            current = call._atomic
            # another thread may be in a section of the hook or function that came after
            call._slots[ATOMIC] = 0 if current is self or current is None else int(current._state.depth > 0)
            state._holder = 0
        state.depth -= 1
        state._lock.release()

    def _enter_later(self) -> None:
        later = self._call.atomic()
        later.__enter__()
        self._later.append(later)

    def _leave_later(self, *exc_info: object) -> None:
        if self._later:
            self._later.pop().__exit__(*exc_info)
        else:
            self._state.leave_unheld()


leave_alone(_Atomic.__enter__.__code__, _Atomic.__exit__.__code__)


# --- which one is current -----------------------------------------------------------------------------------------

#: the CallWrapper of the running call; one per process, since a wrapped function runs in the main thread
_current: CallWrapper | None = None


#: those of functions whose Wrapper is disabled, in any thread, the latest last; a list changes as a whole
_disabled: list[CallWrapper] = []


class Inside:
    """``with Inside(call):`` a function of a disabled Wrapper runs; several may at a time."""

    __slots__ = ("_call",)

    def __init__(self, call: CallWrapper) -> None:
        self._call = call

    def __enter__(self) -> None:
        _disabled.append(self._call)

    def __exit__(self, *exc_info: object) -> None:
        _disabled.remove(self._call)


# a restart of the call around may interrupt the function, and must find this done or not begun
leave_alone(Inside.__enter__.__code__, Inside.__exit__.__code__, CallWrapper._first_ping.__code__)


def current_call() -> CallWrapper | None:
    """The CallWrapper of the wrapped function that is running in this process, or None outside one.

    In a function whose Wrapper is disabled it is the one that does nothing, where the function has been given that and
    none that restarts is running.
    """
    return next(reversed(_disabled.copy()), None) if _current is None else _current


def restarting_call() -> CallWrapper | None:
    """The same, without those that do nothing."""
    return _current


def set_current(call: CallWrapper | None) -> None:
    """For the loop: what :func:`current_call` returns."""
    global _current  # one function at a time, in the main thread
    _current = call
