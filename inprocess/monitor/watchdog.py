"""Automatic progress: stamps the board whenever the main thread runs bytecode. Sees to it that there is a monitor.

How it asks. CPython runs "pending calls" in the main thread between two bytecodes. At each interval one is scheduled,
never a second before the first has run: they would pile up while the main thread is inside C code, and CPython has
room for 32.

Why the pending call is ``sem_post`` of the C library and no Python function. A Python callback would be a piece of
library code that runs anywhere in the user's function: an interruption raised while it runs would be swallowed there.
``sem_post`` takes one pointer, returns 0 and runs no bytecode. This thread takes the semaphore and writes the stamp.

A monitor that has stopped (SIGSTOP, or it is starved) protects nobody: the others declare this rank dead, and it would
not be killed for that. So a monitor that shows no life on the board is killed, which makes it one that has died.

It also answers for the rank where somebody asks for its stacks (`inprocess status --dump`): it runs as long as any
thread of Python does, whatever the main thread waits for.

A call that is still pending when the watchdog stops runs later, or never. So the semaphore belongs to the process, is
never freed, and what is pending is known to the next watchdog.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Protocol

from inprocess.interrupt import whereabouts
from inprocess.monitor import lease
from inprocess.monitor.board import STACKS_BYTES, WATCHED, Board
from inprocess.monitor.policy import PACE_S, LeaseWatch
from inprocess.system.clock import monotonic
from inprocess.system.descriptors import milliseconds
from inprocess.system.interpreter import interpreter
from inprocess.system.logs import get_logger

__all__ = ["ProgressWatchdog", "Silence"]

log = get_logger(__name__)
#: after scheduling, how long to stay awake for the answer of a main thread that runs (seconds)
SOON = 0.02
#: after so long without an answer the main thread stands still, in C code (seconds)
STILL = 1.0


class _Monitor(Protocol):
    def pidfd(self) -> contextlib.AbstractContextManager[int]: ...

    @property
    def silence(self) -> float: ...


class Silence:
    """Judges a stamp that somebody else should renew, by counting looks: time in which both stood still is none."""

    def __init__(self) -> None:
        self._stamp = self._looks = 0

    def lasts(self, stamp: int, looks: float) -> bool:
        """Look once. Whether the stamp (0: none yet) has been the same for more than ``looks`` looks."""
        self._looks = self._looks + 1 if stamp == self._stamp else 0
        self._stamp = stamp
        return bool(stamp) and self._looks > looks


class _Probe:
    """One pending call at a time, in the process's main thread."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._semaphore = ctypes.create_string_buffer(128)  # a sem_t has 32 bytes
        libc.sem_init(self._semaphore, 0, 0)
        self._post = ctypes.cast(libc.sem_post, ctypes.c_void_p)
        self._take = libc.sem_trywait
        self._add = ctypes.pythonapi.Py_AddPendingCall
        self._add.argtypes, self._add.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int
        self._pending = False

    def schedule(self) -> None:
        """Ask the main thread to show that it runs; nothing where it has been asked already."""
        if not self._pending:
            # -1: others have filled CPython's queue; asked again at the next interval
            self._pending = self._add(self._post, ctypes.addressof(self._semaphore)) == 0

    @property
    def pending(self) -> bool:
        return self._pending

    def answered(self) -> bool:
        """Whether the main thread has run since it was asked; true once for each question."""
        if self._take(self._semaphore) != 0:
            return False
        self._pending = False
        return True


_probe: _Probe | None = None


def _the_probe() -> _Probe:
    global _probe
    if _probe is None:
        _probe = _Probe()
    return _probe


def _stacks() -> bytes:
    """Where the main thread is, whether it waits for other ranks, and all threads, as far as there is room for them."""
    spot = whereabouts.look()
    found = {"where": "" if spot is None else spot.where, "waits": None if spot is None else spot.waits}
    threads = sorted(whereabouts.stacks(), key=lambda thread: not thread["main"])
    while len(text := json.dumps({**found, "threads": threads}).encode()) > STACKS_BYTES:
        threads = threads[: len(threads) // 2]
    return text


class ProgressWatchdog(threading.Thread):
    """Stamps ``board`` while the main thread runs. One at a time per process.

    Args:
        board: where progress is written.
        interval: seconds between two questions to the main thread; half a second at most is waited, so that a
            standstill is known to begin no earlier than that before the first question that gets no answer.
        monitor: its ``pidfd`` is watched; read again after each death. It is killed after ``silence`` seconds without
            life.
        on_monitor_death: called in this thread when the monitor has died; it may start a new one, and returns whether
            it did, also where that one has died meanwhile. Where it did not, or raises, which is logged, no monitor is
            watched any more.
        unheard: says from the lease whether heartbeats do not get through.
        on_silence: called then, once.
        on_standstill: called in this thread once the main thread has run no bytecode for a second; again after it has.
    """

    def __init__(
        self,
        board: Board,
        interval: float,
        monitor: _Monitor | None = None,
        on_monitor_death: Callable[[], bool] | None = None,
        unheard: LeaseWatch | None = None,
        on_silence: Callable[[], None] | None = None,
        on_standstill: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="inprocess-watchdog", daemon=True)
        self._board, self._interval = board, min(interval, PACE_S)
        self._monitor, self._on_monitor_death = monitor, on_monitor_death
        self._unheard, self._on_silence, self._on_standstill = unheard, on_silence, on_standstill
        self._silence = Silence()
        self._probe = _the_probe()
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def stop(self) -> None:
        """End the thread at once and wait for it; the board is not written afterwards. More than once is fine."""
        if self._stop_fd < 0:
            return
        os.eventfd_write(self._stop_fd, 1)
        if self.ident is not None:
            self.join()
        stop, self._stop_fd = self._stop_fd, -1  # before it is closed: Ctrl-C may come in between
        os.close(stop)

    def run(self) -> None:
        ask_at = monotonic()
        # when the question was asked that has no answer yet; infinite once that is told
        asked_at = math.inf
        while True:
            now = monotonic()
            if self._probe.answered():
                self._board.stamp()
            if now >= ask_at:
                if not self._probe.pending:
                    self._board.ask()  # first: an answer is newer
                    asked_at = now
                elif now - asked_at >= STILL:
                    asked_at = math.inf
                    self._tell_standstill()
                self._probe.schedule()
                ask_at = now + self._interval
                self._look_at_monitor()
                self._show()
            # a main thread that runs answers soon; one that does not is looked at once per interval
            soon = self._probe.pending and now < ask_at - self._interval + SOON
            pause = SOON if soon else max(0.0, ask_at - now)
            lease = self._look_at_lease()
            # one that is over outside the function ends nothing, however often it is looked at
            if self._wait(min(pause, lease) if lease > 0 else pause):
                return

    def _tell_standstill(self) -> None:
        try:
            self._on_standstill()
        except Exception as error:  # whatever it is, the rank is to be watched
            log.warning("what the main thread waits for cannot be looked at: %r", error)

    def _show(self) -> None:
        """What `inprocess status` asks for: how many steps, and where all threads are."""
        try:
            self._board.show_steps()
            self._board.answer_stacks(_stacks)
        except Exception as error:  # whatever it is, the rank is to be watched
            log.warning("the stacks of this rank cannot be taken: %r", error)

    def _look_at_lease(self) -> float:
        """Seconds until there is something to do about it."""
        left = lease.enforce(self._board) / 1e9
        unheard, on_silence = self._unheard, self._on_silence
        if unheard is None or on_silence is None or left <= 0:
            return left
        looked_closely = unheard.since is not None
        is_sure = unheard.is_sure(left, monotonic())
        if not looked_closely and unheard.since is not None:
            # beside a function that makes a system call each millisecond this thread waits 0.1 to 1.6 s for the lock
            interpreter.hurry()
        elif looked_closely and unheard.since is None:
            interpreter.relax()
        if is_sure:
            self._on_silence = None
            on_silence()
            return left
        return unheard.look_at(left) or min(left, SOON)

    def _wait(self, seconds: float) -> bool:
        """Sleep; True when it is time to stop."""
        poll = select.poll()
        poll.register(self._stop_fd, select.POLLIN)
        with self._pidfd() as pidfd:
            if pidfd >= 0:
                poll.register(pidfd, select.POLLIN)
            # rounded up: poll would otherwise come back a moment too early, and once more
            ready = {fd for fd, _ in poll.poll(milliseconds(seconds + 1e-3))}
        if self._stop_fd in ready:
            return True
        if pidfd in ready:
            self._tell_monitor_death()
        return False

    def _pidfd(self) -> contextlib.AbstractContextManager[int]:
        """Of the monitor, -1 where there is none; it stays open meanwhile."""
        return contextlib.nullcontext(-1) if self._monitor is None else self._monitor.pidfd()

    def _look_at_monitor(self) -> None:
        monitor = self._monitor
        if monitor is None or not self._silence.lasts(self._board.slots[WATCHED], monitor.silence / self._interval):
            return
        log.warning("the monitor process has shown no life for %g s and is killed", monitor.silence)
        with contextlib.suppress(OSError), monitor.pidfd() as pidfd:  # it has just died; seen by its pidfd
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _tell_monitor_death(self) -> None:
        lease.enforce(self._board)  # its last deed may have been to end it
        self._board.slots[WATCHED] = 0  # a new one has shown nothing yet
        try:
            replaced = self._on_monitor_death is not None and self._on_monitor_death()
        except Exception as error:
            log.error("the monitor process is gone and cannot be replaced: %s", error)
            replaced = False
        if not replaced:
            self._monitor = None  # a dead one would wake this thread for ever
