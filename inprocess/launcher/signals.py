"""Signals to the launcher: noted by the handler, acted on where the agent's loop looks. Some end it, others are for the
workers that handle them. What was ignored when it was started stays ignored, as nohup and shells want it; what was
blocked is not meanwhile, here and in the workers: that is left over from a parent that waits for signals in a thread.

torch's own handler raises where it strikes. A worker that was just started, and that no list has yet, would be left
behind; and while the main thread is inside C++ (a connection to a store that is not there) nothing would be raised at
all. Here the handler only notes the signal and writes to a pipe on which the loop waits, and what may block for long
runs in a thread (`interruptible`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing.api import SignalException

from inprocess.system.descriptors import milliseconds
from inprocess.system.inherited import unblocked
from inprocess.system.logs import get_logger

__all__ = ["PASSED_ON", "Signals"]

log = get_logger(__name__)
T = TypeVar("T")
#: schedulers announce the end of a job by them (``sbatch --signal=USR1@90``); by default they would end the launcher
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Use as a context manager, in the main thread; puts the handlers back at the end."""

    def __init__(self, names: str) -> None:
        self._names = [name.strip() for name in names.split(",") if name.strip()]
        self._before: dict[signal.Signals, Any] = {}
        self._pending: signal.Signals | None = None
        self._count = 0
        self._for_workers: list[signal.Signals] = []
        self._blocked: set[int] = set()
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Signals:
        for name in self._names:
            try:
                number = signal.Signals[name]
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
            except (KeyError, ValueError, OSError) as error:
                log.warning("--signals-to-handle: %s is not handled: %s", name, error)
        for number in PASSED_ON:
            # one that a program handles which calls `main` stays with that
            if number.name not in self._names and signal.getsignal(number) is signal.SIG_DFL:
                with contextlib.suppress(ValueError):  # not in the main thread
                    self._before[number] = signal.signal(number, self._note_for_workers)
        self._blocked = unblocked(self._before)
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def _note(self, number: int, _frame: object) -> None:
        self._pending, self._count = signal.Signals(number), self._count + 1
        self._wake()

    def _note_for_workers(self, number: int, _frame: object) -> None:
        self._for_workers.append(signal.Signals(number))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: whoever waits has been woken
            os.write(self._write, b"s")

    @property
    def count(self) -> int:
        """How many came that end it."""
        return self._count

    def for_workers(self) -> list[signal.Signals]:
        """Those that came since the last call and are to be passed on, oldest first."""
        came, self._for_workers = self._for_workers, []
        return came

    def check(self) -> None:
        """Raise torch's SignalException where a signal that ends it came since the last check."""
        number, self._pending = self._pending, None
        if number is not None:
            raise SignalException(f"Process {os.getpid()} got signal: {number}", sigval=number)

    def wait(self, descriptors: Iterable[int], seconds: float) -> None:
        """Until a signal comes, a descriptor is readable, or the time is over."""
        poll = select.poll()
        for descriptor in (self._read, *descriptors):
            poll.register(descriptor, select.POLLIN)
        poll.poll(milliseconds(seconds))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 512):
                pass

    def interruptible(self, function: Callable[[], T]) -> T:
        """Call a function that may block for long. A signal raises SignalException here and leaves it behind."""
        results: list[T] = []
        errors: list[BaseException] = []
        done_read, done_write = os.pipe2(os.O_CLOEXEC)

        def work() -> None:
            try:
                results.append(function())
            except BaseException as error:
                errors.append(error)
            finally:
                os.close(done_write)  # wakes the main thread

        thread = threading.Thread(target=work, name="inprocess-rendezvous", daemon=True)
        thread.start()
        try:
            while not results and not errors:
                self.check()
                self.wait([done_read], 3600.0)
            thread.join()
        finally:
            os.close(done_read)
        if errors:
            raise errors[0]
        return results[0]
