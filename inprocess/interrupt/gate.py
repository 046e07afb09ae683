"""The window in which the main thread may be interrupted: the call of the user's function, see the room's docstring."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from inprocess.exception import InternalError, RankShouldRestart, RestartAbort, asks_for_end
from inprocess.interrupt.atomic import Atomic
from inprocess.interrupt.forks import guarded
from inprocess.interrupt.frames import (
    CALL_CODE,
    FUNCTIONAL,
    IMPORT,
    LOCKING,
    LOSERS,
    LOSING,
    REAPERS,
    STARTERS,
    UNLOCKING,
    WHOLE,
    call,
    codes,
    inside,
    leave_alone,
    places,
    room,
)
from inprocess.interrupt.in_flight import InFlight
from inprocess.interrupt.judging import answers_interruption, behind, let_go, set_handled, under_way
from inprocess.interrupt.whereabouts import counts_as
from inprocess.system import clock
from inprocess.system.errors import in_words
from inprocess.system.latch import Latch

__all__ = ["Gate", "Interrupted", "Outcome", "Raised", "Returned"]

#: seconds between two signals while none has been answered: the first, doubled up to the longest
FIRST_PAUSE_S = 0.002
MAX_PAUSE_S = 0.05
#: seconds that the function has to unwind, and to free what it had, before `release` is called: that takes 1 ms of
#: processor time, with the interpreter lock
UNWINDING_S = 0.01
#: seconds for which the main thread waits for the abort at most
PARK = 0.05
#: seconds for which code of the standard library that takes a lock, or waits for a child, is left alone; and a
#: destructor, which would not be finished, while Python drops what is raised there
PATIENCE = 0.1
#: and code that would lose a descriptor, a file, or the operation that it has just begun in a group; longer, since the
#: abort ends what waits there, and on a busy machine a tenth of a second may pass between two lines
LOSS_PATIENCE = 2.0
#: and where a lock is given back
UNLOCK_PATIENCE = 0.5
#: seconds for which an import is left alone: a module that is imported by half stays broken in every later iteration
IMPORT_PATIENCE = 10.0
#: and the start of a process: one that runs before it is noted would never be ended
START_PATIENCE = 10.0


@dataclass(frozen=True)
class Returned:
    """The function returned `value`."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """The function raised `exception`, on its own account.

    `instead` is empty, or says in words what it raised in place of that: an exit in answer to it, see `counts_as`.
    """

    exception: BaseException
    instead: str = ""


@dataclass(frozen=True)
class Interrupted:
    """The function was left because of a restart.

    `instead` is empty, or says in words what it raised in place of ``RankShouldRestart``; the exception itself is
    not kept, since its traceback would keep tensors alive.
    """

    instead: str = ""


Outcome = Returned | Raised | Interrupted


class Sender(Protocol):
    """What a gate asks of the `Interrupter` that made it."""

    def raised(self) -> object:
        """An exception has left the function, whose frames are not yet emptied. Main thread."""

    def send(self, again: bool) -> None:
        """Make the handler run in the main thread. Monitor thread, as what follows."""

    def report_swallowed(self, who: str, where: str, dropped: bool) -> None:
        """What was raised there did not end the function of this rank; ``dropped`` by Python, or swallowed."""

    def report_unanswered(self, seconds: float) -> None:
        """The handler has not raised for so long."""


class Gate:
    """Runs the user's function in one iteration, and lets it be interrupted. Made by `Interrupter.new_gate`."""

    def __init__(self, interrupter: Sender) -> None:
        #: the rank, for messages
        self.who = "this rank"
        #: context manager around what a restart must not cut in half
        self.atomic = Atomic()
        #: set when `run` is over
        self.left = Latch()
        #: whether an interruption was asked for; never false again
        self.interrupting = False
        #: whether the main thread was asked to wait for the abort; never false again, since a signal may come late
        self.parking = False
        self._abort_ends = threading.Lock()  # held by the monitor thread during the abort
        self._interrupter = interrupter
        # whether `run` is at work; main thread only
        self._running = False
        # written by the monitor thread when it asks, by the main thread when it has raised
        self._armed = False
        self._asked_at = 0.0
        #: patience -> since when there was reason for it
        self._spared_since = dict[float, float]()
        self._starters = self._losers = self._reapers = self._locking = self._unlocking = frozenset[int]()
        self._losing = frozenset[str]()
        self._raised_at = 0.0
        self.raised_where = ""
        self._dropped = False
        # whether the handler last found it in a line that takes or gives back a lock; written by the main thread
        self._at_lock = False
        # what the main thread handled before the abort, and whether nobody made progress; until it has left
        self._in_flight: InFlight | None = None
        self._stood_still = False

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Outcome:
        """Call ``fn(*args, **kwargs)`` and say how it ended. Main thread; once per gate.

        Once an interruption or an abort has begun, whatever the function raises counts as `Interrupted`. Exceptions: a
        RestartAbort or a KeyboardInterrupt is the user's at all times, and so is SystemExit unless it is the answer to
        the interruption (``except BaseException: sys.exit(1)``); also where the interruption hits one of them on its
        way out. So is an error that was handled before the abort, and is what the function would have raised, see
        `in_flight`. A normal return is `Returned`, however late.

        SystemExit in answer to an error out of a collective counts as that error at all times: the cause is most likely
        another rank's failure, which this rank need not have heard of yet.

        A process that the function forks ends where it leaves it, see `forks`.
        """
        handled = sys.exc_info()[1]
        self._running = True
        try:
            if self.interrupting or self.atomic.closed:
                return Interrupted()
            return Returned(guarded(call, fn, args, kwargs or {}))
        except BaseException as error:
            self._interrupter.raised()
            return self._judge(error, handled)
        finally:
            try:
                if sys.exc_info()[1] is not handled:
                    set_handled(handled)
                self.leave()
            finally:
                if not self.left.is_set():  # Ctrl-C came before that
                    self.leave()
                # this frame lives as long as a traceback that somebody keeps
                del self, handled, fn, args, kwargs

    def leave(self) -> None:
        """The main thread is out, or will never enter. The monitor thread waits for this, without a limit."""
        self._in_flight = None
        self.atomic.drop()
        self._running = False
        self.left.set()

    def note(self, in_flight: InFlight | None, stood_still: bool) -> None:
        """What the main thread handles. Monitor thread, once it hears of the interruption.

        ``stood_still``: it has waited for the others, and nobody made progress.
        """
        self._in_flight, self._stood_still = in_flight, stood_still

    def close_for_abort(self, on_wait: Callable[[float, str], None] | None = None) -> None:
        """From now on no `atomic` section begins; return once none is held. Monitor thread, before the abort.

        Args:
            on_wait: called about once a second with the seconds waited so far and a description of the holder. What it
                raises ends the wait.
        """
        self.atomic.close(on_wait or (lambda waited, holder: None))

    @contextlib.contextmanager
    def parked(self) -> Iterator[None]:
        """Keep the main thread from running the function meanwhile, as far as it runs Python code. Monitor thread."""
        with self._abort_ends:
            self.parking = True
            self._interrupter.send(again=False)
            yield

    def interrupt_until_left(self, retry_after: float = 1.0, release: Callable[[], object] = lambda: None) -> None:
        """Raise RankShouldRestart in the user's function until the main thread has left it. Monitor thread.

        Args:
            retry_after: seconds after which a raise that did not end the function is repeated.
            release: called again and again meanwhile: the main thread may begin to wait in C code after the abort.

        Raises:
            InternalError: `close_for_abort` was not called first, so an atomic section might be cut in half.
        """
        if not self.atomic.closed:
            raise InternalError("interrupt_until_left() before close_for_abort() could cut an atomic section in half")
        self._ask(clock.monotonic())
        with self._watching_unraisable():
            while not self.left.is_set():
                self._armed = self.interrupting = True
                if self._raise_once(retry_after, release):
                    self._interrupter.report_swallowed(self.who, self.raised_where, self._dropped)
        self._in_flight = None  # noted as the main thread was leaving

    def _ask(self, now: float) -> None:
        """Note that it is asked for, and look up what is left alone: the program imports modules at any time."""
        self._spared_since.clear()
        self._asked_at = now
        self._starters, self._losers, self._reapers = codes(STARTERS), codes(LOSERS), codes(REAPERS)
        self._locking, self._unlocking = codes(LOCKING), codes(UNLOCKING)
        self._losing = frozenset((*LOSING, getattr(sys.modules.get(FUNCTIONAL), "__file__", None) or ""))

    def _judge(self, raised: BaseException, outer: BaseException | None) -> Outcome:
        """What it means that the function raised; ``outer`` was being handled before it was called."""
        error = under_way(raised, outer) if isinstance(raised, RankShouldRestart) else raised
        counts = counts_as(error, outer, self.atomic.closed)
        if not (self.interrupting or self.atomic.closed):
            if counts is error:
                return Raised(error)
            let_go(raised, outer, counts)
            return Raised(counts, instead=in_words(error))
        if asks_for_end(error, (RestartAbort, KeyboardInterrupt)):
            return Raised(error)
        if asks_for_end(counts, (SystemExit,)) and not answers_interruption(counts, outer):
            return Raised(error)
        if (cause := self._cause(raised, outer)) is not None:
            let_go(raised, outer, cause)
            return Raised(cause)
        let_go(raised, outer)
        return Interrupted("" if isinstance(error, RankShouldRestart) else in_words(error))

    def _cause(self, raised: BaseException, outer: BaseException | None) -> BaseException | None:
        """The function's own error, whose place ``raised`` has taken."""
        found = self._in_flight
        if found is None:
            return None
        if (leaving := found.leaving()) is not None:
            return counts_as(leaving, outer)
        failure = found.failure() if self._stood_still else None
        return failure if any(each is failure for each in behind(raised)) else None

    def park(self, frame: FrameType | None) -> None:
        """In the handler."""
        if not self._is_inside(frame) or any(code.co_filename == logging.__file__ for code in inside(frame)):
            return
        room()  # the lock is given back, also where another signal is handled in between
        if self._abort_ends.acquire(timeout=PARK):
            self._abort_ends.release()

    def may_raise(self, frame: FrameType | None) -> bool:
        """Whether the handler may raise; called by it, so it takes no lock and calls nothing that does."""
        if not self._armed or not self._is_inside(frame):
            return False
        assert frame is not None
        now = clock.monotonic()
        asked = now - self._asked_at
        stack = inside(frame)
        files, codes_there = {code.co_filename for code in stack}, {id(code) for code in stack}
        locking, unlocking = id(frame.f_code) in self._locking, not self._unlocking.isdisjoint(codes_there)
        self._at_lock = locking or unlocking
        # a loop whose last step before it calls nothing, such as a product of matrices, is found there each time
        if unlocking and asked < UNLOCK_PATIENCE:
            self._spared_since.clear()
            return False
        if (asked < IMPORT_PATIENCE and IMPORT in files) or (asked < START_PATIENCE and codes_there & self._starters):
            self._spared_since.clear()
            return False
        patience = 0.0
        if files & self._losing or codes_there & self._losers:
            patience = LOSS_PATIENCE
        elif (
            locking
            or codes_there & self._reapers
            or logging.__file__ in files
            or any(code.co_name == "__del__" for code in stack)
        ):
            patience = PATIENCE
        # since it was found there, not since it was asked for, which may be long ago: before an import. A destructor
        # has its own time, also after a lock was made
        if now - self._spared_since.setdefault(patience, now) < patience:
            return False
        self._spared_since.clear()
        self._raised_at = now
        self.raised_where = places(frame)
        self._dropped = False
        self._armed = False
        return True

    def _is_inside(self, frame: FrameType | None) -> bool:
        """Whether `frame` belongs to the user's function, and nothing below it to what must not be cut in half."""
        while frame is not None and frame.f_code is not _RUN_CODE:
            if frame.f_code is CALL_CODE:
                # not by asking the frame of `run` for `self`: it would keep that for ever, also when it is emptied
                return self._running
            if id(frame.f_code) in WHOLE:
                return False
            frame = frame.f_back
        return False

    def _raise_once(self, retry_after: float, release: Callable[[], object]) -> bool:
        """Send until the handler has raised, then wait for the function to be left. True: it was swallowed."""
        begin = clock.monotonic()
        pause, sent, reported = FIRST_PAUSE_S, False, False
        while self._is_armed():
            self._at_lock = False
            self._interrupter.send(again=sent)
            sent = True
            if self.left.wait(pause):
                return False
            if not self._is_armed():
                break
            release()
            # in a loop that does little else, most signals find it there
            pause = FIRST_PAUSE_S if self._at_lock else min(2 * pause, MAX_PAUSE_S)
            if self._is_armed() and not reported and clock.monotonic() - begin > retry_after:
                reported = True
                self._interrupter.report_unanswered(retry_after)
        pause = max(pause, UNWINDING_S)
        while not self._dropped and (remaining := self._raised_at + retry_after - clock.monotonic()) > 0:
            if self.left.wait(min(pause, remaining)):
                return False
            release()
        return not self.left.is_set()

    def _is_armed(self) -> bool:
        """Whether the handler is still to raise, which it may do at any moment."""
        return self._armed

    @contextlib.contextmanager
    def _watching_unraisable(self) -> Iterator[None]:
        """Notice an interruption that Python drops, instead of having it printed."""
        previous = sys.unraisablehook
        hook = functools.partial(self._note_dropped, previous)
        sys.unraisablehook = hook
        try:
            yield
        finally:
            if sys.unraisablehook is hook:
                sys.unraisablehook = previous

    def _note_dropped(self, previous: Callable[[Any], Any], unraisable: sys.UnraisableHookArgs) -> None:
        if self.interrupting and isinstance(unraisable.exc_value, RankShouldRestart):
            self._dropped = True
        else:
            previous(unraisable)


_RUN_CODE = Gate.run.__code__
leave_alone(Gate.park.__code__, Gate.may_raise.__code__, Gate._is_inside.__code__, Gate._note_dropped.__code__)
