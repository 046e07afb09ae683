"""The signal that interrupts the main thread. The only file of this room that touches signals."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from inprocess.exception import OptionError, RankShouldRestart, RestartError
from inprocess.interrupt.frames import leave_alone, whereabouts
from inprocess.interrupt.gate import Gate
from inprocess.interrupt.loader_workers import WorkerDeaths
from inprocess.system import clock
from inprocess.system.inherited import unblocked
from inprocess.system.logs import get_logger
from inprocess.system.procfs import is_handled_outside

__all__ = ["Interrupter"]

log = get_logger(__name__)
#: seconds at least between two reports of a call that interruptions were swallowed
SWALLOWED_EVERY = 60.0
#: by whether Python dropped it: what became of an interruption, and what to do about that
_SWALLOWED = {
    False: (
        "swallowed (`except BaseException`, a bare `except`, a callback), or a `finally` block takes its time",
        "Let RankShouldRestart pass: catch Exception instead, or raise it again after cleaning up. The other ranks "
        "wait for this one, and it is killed where it has not left by hard_timeout",
    ),
    True: ("dropped by Python, which happens in `__del__` and callbacks", "Should this go on, keep those short"),
}


class Interrupter:
    """Owns the signal for one call of a wrapped function. Made, installed and restored in the main thread.

    Args:
        signum: the signal to use. None: SIGRTMIN+5, or the next real-time signal that nobody handles.
        raised: called in the main thread when an exception has left the function, and before its frames are emptied.

    Raises:
        OptionError: `signum` cannot be used, or no real-time signal is free.
    """

    def __init__(self, signum: int | None = None, raised: Callable[[], object] = lambda: None) -> None:
        self.raised = raised
        self.signum = _free_signal() if signum is None else _usable(signum)
        self._previous: Any = None
        self._blocked: set[int] = set()
        self._worker_deaths = WorkerDeaths()
        self._gate: Gate | None = None
        self.main_thread = 0
        self._installed = False
        # the next signal that interrupts nothing is our own
        self._nudged = False
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
        self.main_thread = threading.get_ident()
        self._previous = signal.signal(self.signum, self._handle)
        # inherited from a parent that waits for signals in a thread
        self._blocked = unblocked([self.signum])
        self._installed = True
        self._worker_deaths.install()

    def restore(self) -> None:
        """Put the previous handler back; nothing is sent or raised any more. Main thread; harmless when repeated."""
        with self._sending:
            if not self._installed:
                return
            self._installed = False
            self._gate = None
            self._worker_deaths.restore()
            if signal.getsignal(self.signum) == self._handle:
                _replace_handler(self.signum, self._previous)
            signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)

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
        gate, nudged, self._nudged = self._gate, self._nudged, False
        if gate is None or not (gate.parking or gate.interrupting):
            if callable(self._previous) and not nudged:
                self._previous(signum, frame)
            return
        if frame is None or frame.f_code is _HANDLE_CODE:
            return
        if not gate.interrupting:
            gate.park(frame)
        # no `else`: it may have been asked for meanwhile, by a signal that was not heeded since it found this handler
        if gate.interrupting and gate.may_raise(frame):
            raise RankShouldRestart("this iteration was interrupted for a restart")

    def nudge(self) -> None:
        """Have the main thread look for signals. Any thread."""
        self._nudged = True  # before it is sent: the program's own handler, where there is one, is not asked
        self.send(again=False)

    def send(self, again: bool) -> None:
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
                signal.pthread_kill(self.main_thread, self.signum)
            except BlockingIOError:  # the queue is full
                os.kill(os.getpid(), self.signum)

    def _reinstall(self) -> None:
        if self._installed and signal.getsignal(self.signum) != self._handle:
            self._previous = signal.signal(self.signum, self._handle)

    def report_swallowed(self, who: str, where: str, dropped: bool) -> None:
        """An interruption that was raised there did not end the function of this rank. Monitor thread."""
        how, remedy = _SWALLOWED[dropped]
        self.swallowed[dropped] += 1
        now = clock.monotonic()
        if now < self._report_at[dropped]:
            return
        self._report_at[dropped] = now + SWALLOWED_EVERY
        log.warning(
            "%s: the interruption raised at %s was %s (%d so far in this call); the main thread is at %s: raising it "
            "again. %s",
            who,
            where,
            how,
            self.swallowed[dropped],
            whereabouts(self.main_thread),
            remedy,
        )

    def report_unanswered(self, seconds: float) -> None:
        """The handler has not raised for so long. Monitor thread."""
        log.warning(
            "the main thread has not answered the interruption for %.3g s, it is at %s; trying on. If this stays: it "
            "is in C code that does not return, or it blocks signal %d (pass another as interrupt_signal)",
            seconds,
            whereabouts(self.main_thread),
            self.signum,
        )


def _free_signal() -> int:
    for signum in [*range(signal.SIGRTMIN + 5, signal.SIGRTMAX + 1), *range(signal.SIGRTMIN, signal.SIGRTMIN + 5)]:
        if signal.getsignal(signum) is signal.SIG_DFL and not is_handled_outside(signum):
            return int(signum)
    raise OptionError(
        "interrupt_signal=None finds no free signal: every real-time signal has a handler; pass one to be shared"
    )


def _usable(signum: int) -> int:
    try:
        is_foreign = is_handled_outside(signum)
    except ValueError:
        message = f"interrupt_signal={signum} is no signal number: pass one such as signal.SIGRTMIN + 5"
        raise OptionError(message) from None
    if is_foreign or signum in (signal.SIGKILL, signal.SIGSTOP):
        why = "code outside Python handles it" if is_foreign else "no process can handle it"
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


_HANDLE_CODE = Interrupter._handle.__code__
leave_alone(Interrupter._reinstall.__code__, _run_pending.__code__)
