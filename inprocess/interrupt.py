"""Interrupts the main thread inside the wrapped function, and nowhere else. The only file that touches signals.

The race
--------
Another thread (the monitor thread) wants ``RankShouldRestart`` raised in the main thread, but only while that thread
runs the user's function. The main thread may leave the function at any moment, by returning or raising, and then
runs the library's code, later the caller's. An interruption that comes a moment late would be raised there, where
nobody expects it, and would break the restart, or the program.

What does not work
~~~~~~~~~~~~~~~~~~
*Asking another thread's interpreter to raise* (``PyThreadState_SetAsyncExc``). Between asking and raising lies any
amount of bytecode, so the exception may be due after the function was left. A lock around a flag does not help: the
exception can be raised inside the very lines that take the lock or clear what is pending, and a second one inside the
handler that received the first. Nor does it end a ``time.sleep`` or ``queue.get``.

*A flag that is set before the function and cleared after it*, read by a signal handler. The handler runs in the main
thread, so flag and handler never overlap. But the clearing line belongs to a ``finally`` or ``except`` block, and the
flag is still up when that block begins; an exception raised just there leaves the block half done.

What works
~~~~~~~~~~
The window is the call stack itself. Python runs signal handlers in the main thread, between two bytecodes or inside an
interruptible system call, and hands them the frame they interrupt. The handler walks from that frame outwards. If it
meets the frame of ``Gate._call``, whose only line calls the user's function, the main thread is in user code: raising
is safe, because ``Gate.run`` catches everything that leaves ``_call``. If it meets ``Gate.run`` first, or neither, the
main thread is in the library's or the caller's code: the handler does nothing, and the monitor thread sends again a
few milliseconds later. There is nothing to open or to close, hence nothing to be late for, and it costs nothing
while nothing happens.

What is not interrupted inside the window: this file's own lines, those of ``atomic``, those that hand over one of this
library's log lines, and those of the handler at work on an earlier signal, where a raise could leave a lock held, and
whatever runs on top of them (a destructor, another handler); for a tenth of a second, the logging module and
the two lines with which `threading` takes and gives back the lock of a condition, an event, a queue or a thread that
starts, for the same reason: that thread would never come up; as long, torch's functional collectives, between the begin
of one and the moment when somebody has its result, and the code that takes a tensor from another process, such as a
DataLoader's worker, whose descriptor is a bare number for a moment; and for ten seconds, an import, since a module left
half imported stays broken in every later iteration, and the construction of a DataLoader's iterator or the start of a
process: there is a moment when the process runs and nobody has noted it, who could end it.

Losing the signal
~~~~~~~~~~~~~~~~~
One signal is not enough. It can arrive after Python last looked for signals and before the thread falls asleep in a
system call: then the handler would run only when that call ends by itself. So the monitor thread sends again, soon at
first and then less often, until the handler says that it has raised. From the second time on it also calls
``PyErr_SetInterruptEx``, which makes Python run the handler even where the thread's signal mask, or a handler set by C
code, keeps the signal itself away. If the program replaced the Python handler, a pending call puts ours back as soon
as the main thread runs bytecode; where it runs none, in a system call, signals that end up in the program's handler
make it do so. That handler still gets every signal that is not an interruption, and is back in its place in the end.

The kernel keeps every single real-time signal until it is handled, up to RLIMIT_SIGPENDING for all processes of a user
together, and refuses one more. It needs no such place for a signal to the process as a whole, which the main thread
receives first.

C code that neither returns nor answers signals (a collective, a kernel) is not reached by any of these: that is what
``abort`` is for, and after it the hard timeout. A greenlet other than the main one is not reached either: its frames
are not connected to ours.

Waiting for the interpreter
~~~~~~~~~~~~~~~~~~~~~~~~~~~
The abort comes first, while the main thread still runs the function. Where that computes in Python, the abort waits for
the interpreter lock again and again, and for a processor where there are fewer of them than ranks. So the same handler
first *parks* the main thread: it waits until the abort is done, and for ``PARK`` seconds at most, since the abort may
need something, a lock for example, that the function holds. The signal that interrupts then usually finds it still in
the handler, which looks once more before it ends.

Losing the exception
~~~~~~~~~~~~~~~~~~~~
User code may swallow it: ``except BaseException``, a ``__del__``, a callback from C. If the function has not been left
``retry_after`` seconds after a raise (time for its ``finally`` blocks), it is raised again. The log says where it was
raised before, the first time and then rarely. What Python itself drops (``sys.unraisablehook``) is noticed at once and
raised again at once.

What Python 3.12 leaves behind
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Where a loop runs inside `finally`, `except` or `with`, its compiler forgets one jump in the table of what to undo. An
exception that a signal handler raises right there leaves another one marked as being handled, for ever: it would keep
the frames of a dead iteration alive, and become the context of every later exception, an exit for example, which would
be taken for an answer to the interruption. So the gate puts back what was being handled before.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import inspect
import logging
import math
import operator
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from inprocess import clock, logs
from inprocess.errors import PACKAGE, in_words
from inprocess.exception import InternalError, OptionError, RankShouldRestart, RestartAbort, RestartError
from inprocess.forks import guarded
from inprocess.logs import get_logger

__all__ = ["Atomic", "Gate", "Interrupted", "Interrupter", "Outcome", "Raised", "Returned", "let_go"]

log = get_logger(__name__)

#: seconds between two signals while none has been answered: the first, doubled up to the longest
FIRST_PAUSE = 0.002
LONGEST_PAUSE = 0.05
#: seconds for which the main thread waits for the abort at most
PARK = 0.05
#: how many calls deep the handler may get where it is called within itself, and to spare
ROOM = 20
#: seconds for which code of the standard library that takes a lock is left alone
PATIENCE = 0.1
#: seconds for which an import is left alone: a module that is imported by half stays broken in every later iteration
IMPORT_PATIENCE = 10.0
#: and the start of a process: one that runs before it is noted would never be ended
START_PATIENCE = 10.0
#: seconds between two reports that an atomic section is waited for
REPORT_EVERY = 1.0

#: and at least between two reports of a call that interruptions were swallowed
SWALLOWED_EVERY = 60.0

#: how many places of a thread's stack a message names
PLACES = 3

#: by whether Python dropped it: what became of an interruption, and what to do about that
_SWALLOWED = {
    False: (
        "swallowed (`except BaseException`, a bare `except`, a callback), or a `finally` block takes its time",
        "Let RankShouldRestart pass: catch Exception instead, or raise it again after cleaning up. The other ranks "
        "wait for this one, and it is killed where it has not left by hard_timeout",
    ),
    True: ("dropped by Python, which happens in `__del__` and callbacks", "Should this go on, keep those short"),
}

_IMPORT = "<frozen importlib._bootstrap>"
#: where torch begins a collective and hands its result out: one that nobody gets is never waited for, nor freed
_FUNCTIONAL = "torch.distributed._functional_collectives"
#: since Python 3.11
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass(frozen=True)
class Returned:
    """The function returned `value`."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """The function raised `exception`, on its own account."""

    exception: BaseException


@dataclass(frozen=True)
class Interrupted:
    """The function was left because of a restart.

    `instead` is empty, or says in words what it raised in place of ``RankShouldRestart``; the exception itself is
    not kept, since its traceback would keep tensors alive.
    """

    instead: str = ""


Outcome = Returned | Raised | Interrupted


class Interrupter:
    """Owns the signal for one call of a wrapped function. Made, installed and restored in the main thread.

    Args:
        signum: the signal to use. None: SIGRTMIN+5, or the next real-time signal that nobody handles.
        raised: called in the main thread when an exception has left the function, and before its frames are emptied.

    Raises:
        OptionError: `signum` cannot be used, or no real-time signal is free.
    """

    def __init__(self, signum: int | None = None, raised: Callable[[], object] = lambda: None) -> None:
        self._raised = raised
        self.signum = _free_signal() if signum is None else _usable(signum)
        self._previous: Any = None
        self._gate: Gate | None = None
        self._main = 0
        self._installed = False
        #: how many interruptions were swallowed, by whether Python dropped them; monitor thread
        self.swallowed = {False: 0, True: 0}
        # of each: when it is to be reported again
        self._report_at = {False: -math.inf, True: -math.inf}
        # no signal is sent once restore() began: by default it would end the process
        self._sending = threading.Lock()

    def install(self) -> None:
        """Install the signal handler.

        Raises:
            RestartError: not called in the main thread, the only one that can handle signals.
        """
        if threading.current_thread() is not threading.main_thread():
            name = threading.current_thread().name
            raise RestartError(
                f"a wrapped function must be called in the main thread, not in thread {name!r}: "
                "only the main thread can be interrupted for a restart"
            )
        self._main = threading.get_ident()
        self._previous = signal.signal(self.signum, self._handle)
        self._installed = True

    def restore(self) -> None:
        """Put the previous handler back; nothing is sent or raised any more. Main thread; harmless when repeated."""
        with self._sending:
            if not self._installed:
                return
            self._installed = False
            self._gate = None
            if signal.getsignal(self.signum) == self._handle:
                _replace_handler(self.signum, self._previous)

    def new_gate(self) -> Gate:
        """The gate of a new iteration. Only the latest gate can be interrupted."""
        self._gate = gate = Gate(self)
        return gate

    def detach(self) -> None:
        """In a forked child, which nobody interrupts."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.interrupting = gate.parking = False
            gate.atomic.detach()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        gate = self._gate
        if gate is None or not (gate.parking or gate.interrupting):
            if callable(self._previous):
                self._previous(signum, frame)
            return
        if not gate.interrupting:
            gate._park(frame)
        # no `else`: it may have been asked for meanwhile, by a signal that was not heeded since it found this handler
        if gate.interrupting and gate._may_raise(frame):
            raise RankShouldRestart("this iteration was interrupted for a restart")

    def _send(self, again: bool) -> None:
        """Make the handler run in the main thread. Monitor thread."""
        with self._sending:
            if not self._installed:
                return
            handler = signal.getsignal(self.signum)
            if handler != self._handle:
                _in_main_thread(self._reinstall)
                if not (again and callable(handler)):
                    return
            if again:
                ctypes.pythonapi.PyErr_SetInterruptEx(ctypes.c_int(self.signum))
            try:
                signal.pthread_kill(self._main, self.signum)
            except BlockingIOError:  # the queue is full
                os.kill(os.getpid(), self.signum)

    def _reinstall(self) -> None:
        if self._installed and signal.getsignal(self.signum) != self._handle:
            self._previous = signal.signal(self.signum, self._handle)


class Gate:
    """Runs the user's function in one iteration, and lets it be interrupted. Made by `Interrupter.new_gate`."""

    def __init__(self, interrupter: Interrupter) -> None:
        #: the rank, for messages
        self.who = "this rank"
        #: context manager around what a restart must not cut in half
        self.atomic = Atomic()
        #: set when `run` is over
        self.left = threading.Event()
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
        self._spared_since = 0.0
        self._starters = self._takers = frozenset[int]()
        self._functional = ""
        self._raised_at = 0.0
        self._raised_where = ""
        self._dropped = False

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Outcome:
        """Call ``fn(*args, **kwargs)`` and say how it ended. Main thread; once per gate.

        Once an interruption or an abort has begun, whatever the function raises counts as `Interrupted`. Exceptions: a
        RestartAbort or a KeyboardInterrupt is the user's at all times, and so is SystemExit unless it is the answer to
        the interruption (``except BaseException: sys.exit(1)``); also where the interruption hits one of them on its
        way out. A normal return is `Returned`, however late.

        A process that the function forks ends where it leaves it, see `forks`.
        """
        handled = sys.exc_info()[1]
        self._running = True
        try:
            if self.interrupting or self.atomic.closed:
                return Interrupted()
            return Returned(guarded(self._call, fn, args, kwargs or {}))
        except BaseException as error:
            self._interrupter._raised()
            return self._judge(error, handled)
        finally:
            if sys.exc_info()[1] is not handled:
                _set_handled(handled)
            del handled
            self.atomic.drop()
            self._running = False
            self.left.set()
            # this frame lives as long as a traceback that somebody keeps
            del self, fn, args, kwargs

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
            self._interrupter._send(again=False)
            yield

    def interrupt_until_left(
        self,
        left: threading.Event | None = None,
        retry_after: float = 1.0,
        release: Callable[[], object] = lambda: None,
    ) -> None:
        """Raise RankShouldRestart in the user's function until the main thread has left it. Monitor thread.

        Args:
            left: set by whoever knows that the function is left; None: the gate's own event.
            retry_after: seconds after which a raise that did not end the function is repeated.
            release: called again and again meanwhile: the main thread may begin to wait in C code after the abort.

        Raises:
            InternalError: `close_for_abort` was not called first, so an atomic section might be cut in half.
        """
        if not self.atomic.closed:
            raise InternalError("interrupt_until_left() before close_for_abort() could cut an atomic section in half")
        left = left or self.left
        self._spared_since = 0.0
        self._asked_at, self._starters, self._takers = clock.monotonic(), _codes(_STARTERS), _codes(_TAKERS)
        self._functional = getattr(sys.modules.get(_FUNCTIONAL), "__file__", None) or ""
        with self._watching_unraisable():
            while not left.is_set():
                self._armed = self.interrupting = True
                if self._raise_once(left, retry_after, release):
                    self._report_swallowed()

    def _call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return fn(*args, **kwargs)

    def _judge(self, raised: BaseException, outer: BaseException | None) -> Outcome:
        """What it means that the function raised; ``outer`` was being handled before it was called."""
        error = _under_way(raised) if isinstance(raised, RankShouldRestart) else raised
        if not (self.interrupting or self.atomic.closed) or isinstance(error, RestartAbort | KeyboardInterrupt):
            return Raised(error)
        if isinstance(error, SystemExit) and not _answers_interruption(error):
            return Raised(error)
        let_go(raised, outer)
        return Interrupted("" if isinstance(error, RankShouldRestart) else in_words(error))

    def _park(self, frame: FrameType | None) -> None:
        """In the handler."""
        if not self._is_inside(frame) or self._runs(logging.__file__, frame):
            return
        _room()  # the lock is given back, also where another signal is handled in between
        if self._abort_ends.acquire(timeout=PARK):
            self._abort_ends.release()

    def _may_raise(self, frame: FrameType | None) -> bool:
        """Whether the handler may raise; called by it, so it takes no lock and calls nothing that does."""
        if not self._armed or not self._is_inside(frame):
            return False
        assert frame is not None
        now = clock.monotonic()
        asked = now - self._asked_at
        if (asked < IMPORT_PATIENCE and self._runs(_IMPORT, frame)) or (
            asked < START_PATIENCE and self._is_in(self._starters, frame)
        ):
            self._spared_since = 0.0
            return False
        if (
            frame.f_code in _LOCKING
            or self._runs(logging.__file__, frame)
            or self._runs(self._functional, frame)
            or self._is_in(self._takers, frame)
        ):
            # since it was found there, not since it was asked for, which may be long ago: before an import
            self._spared_since = self._spared_since or now
            if now - self._spared_since < PATIENCE:
                return False
        self._raised_at, self._spared_since = now, 0.0
        self._raised_where = _places(frame)
        self._dropped = False
        self._armed = False
        return True

    def _is_inside(self, frame: FrameType | None) -> bool:
        """Whether `frame` belongs to the user's function, and nothing below it to what must not be cut in half."""
        if frame is None or frame.f_code is _HANDLE_CODE:
            return False
        while frame is not None and frame.f_code is not _RUN_CODE:
            if frame.f_code is _CALL_CODE:
                # not by asking the frame for `self`: it would keep that for ever, also when it is emptied
                return self._running
            if id(frame.f_code) in _WHOLE:
                return False
            frame = frame.f_back
        return False

    def _runs(self, filename: str, frame: FrameType | None) -> bool:
        """Whether the user's function is inside code of that file; `_is_inside` holds."""
        while frame is not None and frame.f_code is not _CALL_CODE:
            if frame.f_code.co_filename == filename:
                return True
            frame = frame.f_back
        return False

    def _is_in(self, codes: frozenset[int], frame: FrameType | None) -> bool:
        """Whether the user's function is inside one of these functions; `_is_inside` holds."""
        while frame is not None and frame.f_code is not _CALL_CODE:
            if id(frame.f_code) in codes:
                return True
            frame = frame.f_back
        return False

    def _raise_once(self, left: threading.Event, retry_after: float, release: Callable[[], object]) -> bool:
        """Send until the handler has raised, then wait for the function to be left. True: it was swallowed."""
        begin = clock.monotonic()
        pause, sent, reported = FIRST_PAUSE, False, False
        while self._armed:
            self._interrupter._send(again=sent)
            sent = True
            if left.wait(pause):
                return False
            release()
            pause = min(2 * pause, LONGEST_PAUSE)
            if self._armed and not reported and clock.monotonic() - begin > retry_after:
                reported = True
                self._report_unanswered(retry_after)
        while not self._dropped and (remaining := self._raised_at + retry_after - clock.monotonic()) > 0:
            if left.wait(min(pause, remaining)):
                return False
            release()
        return not left.is_set()

    def _report_swallowed(self) -> None:
        it, dropped = self._interrupter, self._dropped
        how, remedy = _SWALLOWED[dropped]
        it.swallowed[dropped] += 1
        now = clock.monotonic()
        if now < it._report_at[dropped]:
            return
        it._report_at[dropped] = now + SWALLOWED_EVERY
        log.warning(
            "%s: the interruption raised at %s was %s (%d so far in this call); the main thread is at %s: raising it "
            "again. %s",
            self.who,
            self._raised_where,
            how,
            it.swallowed[dropped],
            _whereabouts(it._main),
            remedy,
        )

    def _report_unanswered(self, seconds: float) -> None:
        log.warning(
            "the main thread has not answered the interruption for %.3g s, it is at %s; trying on. If this stays: it "
            "is in C code that does not return, or it blocks signal %d (pass another as interrupt_signal)",
            seconds,
            _whereabouts(self._interrupter._main),
            self._interrupter.signum,
        )

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


class Atomic:
    """``with atomic:`` keeps abort and interruption away; any thread, reentrant.

    Entering raises RankShouldRestart once an abort has begun, except within a section that is already held.
    """

    __slots__ = ("_holder", "_lock", "closed", "depth", "dropped")

    def __init__(self) -> None:
        #: whether an abort has begun; never false again
        self.closed = False
        #: whether the main thread is through with the gate
        self.dropped = False
        self._lock = threading.RLock()  # held during a section
        #: how many sections deep; changed under the lock
        self.depth = 0
        # under the lock: the thread that is in them (0: none)
        self._holder = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        if self.closed and not self.depth:
            self._lock.release()
            raise RankShouldRestart("atomic() cannot begin: this iteration was interrupted for a restart")
        self.depth += 1
        self._holder = threading.get_ident()

    def __exit__(self, *exc_info: object) -> None:
        if not self.held():
            # a generator that was suspended in a section is closed after drop() took the section away
            if self.dropped:
                return
            raise RuntimeError("atomic() is left by a thread that is not inside it")
        self.depth -= 1
        if not self.depth:
            self._holder = 0
        self._lock.release()

    def held(self) -> bool:
        """Whether this thread is inside a section."""
        return self._holder == threading.get_ident()

    def close(self, on_wait: Callable[[float, str], None]) -> None:
        """Let no section begin any more, and wait for the one that is held."""
        # before waiting, else a loop of short sections could keep this thread out for long
        self.closed = True
        begin = clock.monotonic()
        while not self._lock.acquire(timeout=REPORT_EVERY):
            on_wait(clock.monotonic() - begin, self._describe_holder())
        self._lock.release()

    def drop(self) -> None:
        """Give up what this thread still holds: Ctrl-C may hit `__enter__` before the section begins."""
        self.dropped = True
        if not self._lock.acquire(blocking=False):
            return  # another thread is in a section
        self.depth = self._holder = 0
        with contextlib.suppress(RuntimeError):  # raised when it holds nothing any more
            while True:
                self._lock.release()

    def detach(self) -> None:
        """In a forked child, where no abort comes, and a section that another thread is in never ends."""
        self.closed = False
        if not self.held():
            self._lock, self.depth, self._holder = threading.RLock(), 0, 0

    def _describe_holder(self) -> str:
        ident = self._holder
        name = next((thread.name for thread in threading.enumerate() if thread.ident == ident), str(ident))
        return f"thread {name!r} at {_whereabouts(ident)}"


# --- signals ------------------------------------------------------------------------------------------------------


def _free_signal() -> int:
    for signum in [*range(signal.SIGRTMIN + 5, signal.SIGRTMAX + 1), *range(signal.SIGRTMIN, signal.SIGRTMIN + 5)]:
        if signal.getsignal(signum) is signal.SIG_DFL:
            return int(signum)
    raise OptionError(
        "interrupt_signal=None finds no free signal: every real-time signal has a handler; pass one to be shared"
    )


def _usable(signum: int) -> int:
    try:
        handler = signal.getsignal(signum)
    except ValueError:
        message = f"interrupt_signal={signum} is no signal number: pass one such as signal.SIGRTMIN + 5"
        raise OptionError(message) from None
    if handler is None or signum in (signal.SIGKILL, signal.SIGSTOP):
        why = "no process can handle it" if handler is not None else "code outside Python handles it"
        raise OptionError(f"interrupt_signal={signum} cannot be used, {why}: pass another, or None")
    return signum


def _replace_handler(signum: int, handler: Any) -> None:
    """Install `handler` with no signal on its way: the default one would end the process. Main thread."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signum})
    try:
        while signal.sigtimedwait({signum}, 0) is not None:
            pass
        signal.signal(signum, signal.SIG_DFL if handler is None else handler)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


_pending: list[Callable[[], None]] = []


def _run_pending(_: int | None) -> int:
    while _pending:
        _pending.pop()()
    return 0


# kept for ever: Python may call it late
_RUN_PENDING = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_run_pending)


def _in_main_thread(fn: Callable[[], None]) -> None:
    """Have the main thread call `fn` between two bytecodes. No second one is scheduled while one is due."""
    if not _pending:
        _pending.append(fn)
        if ctypes.pythonapi.Py_AddPendingCall(_RUN_PENDING, None) != 0:  # the queue is full: next time
            _pending.clear()


# --- code that the handler knows -----------------------------------------------------------------------------------


_RUN_CODE = Gate.run.__code__
_CALL_CODE = Gate._call.__code__
_LOCKING = (threading.Condition.__enter__.__code__, threading.Condition.__exit__.__code__)
_HANDLE_CODE = Interrupter._handle.__code__
#: by identity, since comparing and hashing code objects takes long
_WHOLE = {
    id(function.__code__)
    for function in (
        Atomic.__enter__,
        Atomic.__exit__,
        Atomic.held,
        Gate._park,
        Gate._may_raise,
        Gate._is_inside,
        Gate._runs,
        Gate._is_in,
        Gate._note_dropped,
        Interrupter._reinstall,
        _run_pending,
    )
} | set(map(id, logs.whole()))


def _room(calls: int = ROOM) -> None:
    """RecursionError here, rather than half-way through what follows."""
    if calls:
        _room(calls - 1)


def leave_alone(code: CodeType) -> None:
    """Code that is never interrupted half-way, nor what it calls; for the life of the process."""
    _WHOLE.add(id(code))


#: functions that start processes, in modules that the program may not have imported
_STARTERS = (
    ("multiprocessing.process", "BaseProcess.start"),
    ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter.__init__"),
)


#: and those that take a tensor from another process
_TAKERS = (("torch.multiprocessing.reductions", "rebuild_storage_fd"),)


def _codes(functions: Sequence[tuple[str, str]]) -> frozenset[int]:
    """The identities of their code; a version that has them elsewhere is interrupted there as anywhere."""
    found = set[int]()
    for module, name in functions:
        with contextlib.suppress(AttributeError):
            found.add(id(operator.attrgetter(name)(sys.modules.get(module)).__code__))
    return frozenset(found)


# --- judging ------------------------------------------------------------------------------------------------------


def _under_way(interruption: BaseException) -> BaseException:
    """The user's own exit that the interruption hit on its way out, in a `finally` block, or the interruption."""
    for error in _chain(interruption):
        if isinstance(error, RestartAbort | KeyboardInterrupt | SystemExit):
            return error
    return interruption


def _answers_interruption(error: BaseException) -> bool:
    """Whether `error` was raised while RankShouldRestart was being handled."""
    return any(isinstance(cause, RankShouldRestart) for cause in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that were being handled, or under way, when it was raised; the latest first."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__


def let_go(error: BaseException, outer: BaseException | None) -> None:
    """Empty the frames that the function was left through, also those of the exceptions behind this one.

    A program that keeps the exception, in a list of errors perhaps, would keep tensors and process groups with it, and
    with each group threads and sockets. So would an exception that a frame of its own traceback refers to, until
    garbage is collected. ``outer`` was being handled before the function was called.
    """
    seen, waiting = {id(outer)}, [error]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        behind = [each.__cause__, each.__context__, *(each.exceptions if isinstance(each, _GROUP) else ())]
        waiting += [one for one in behind if one is not None]
        for frame, _ in traceback.walk_tb(each.__traceback__):
            # a generator may have caught an earlier one and go on
            if each is error or not frame.f_code.co_flags & _GENERATORS:
                with contextlib.suppress(RuntimeError):  # still running
                    frame.clear()


def _set_handled(exception: BaseException | None) -> None:
    """What `sys.exc_info` shows from here on. Before 3.11 this cannot be set, and need not be."""
    setter = getattr(ctypes.pythonapi, "PyErr_SetHandledException", None)
    if setter is not None:
        setter(ctypes.py_object(exception))


# --- words --------------------------------------------------------------------------------------------------------


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _whereabouts(ident: int) -> str:
    """The innermost places of a thread."""
    return _places(sys._current_frames().get(ident))


def _places(frame: FrameType | None) -> str:
    """A frame and those around it, as far as the user's function goes where it is in that; innermost first. Those of
    this library only where there are no others."""
    places: list[str] = []
    ours = ""
    while frame is not None and frame.f_code is not _CALL_CODE and len(places) < PLACES:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            places.append(_place(frame))
        ours = ours or _place(frame)
        frame = frame.f_back
    return ", called from ".join(places) or ours or "an unknown place"
