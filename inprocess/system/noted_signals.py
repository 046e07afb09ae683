"""Signals that are noted while something runs, and do not end the process meanwhile.

A handler that was there before is kept, and called. A process that the user's code forks has that one alone: a signal
to it is no signal to the rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from inprocess.exception import signal_name
from inprocess.system.logs import get_logger
from inprocess.system.procfs import is_handled_outside

__all__ = ["NotedSignals"]

log = get_logger(__name__)
_LIBC = ctypes.CDLL(None)


class NotedSignals:
    """Install and restore in the main thread; elsewhere both do nothing.

    Args:
        signums: which.
        note: called in the main thread, between any two lines of it, with the number: takes no lock, and does not wait.
    """

    def __init__(self, signums: Iterable[int], note: Callable[[int], object]) -> None:
        self._signums, self._note = tuple(signums), note
        self._before: dict[int, Any] = {}
        #: handlers that C code has installed, of which Python does not know
        self._in_c: dict[int, Any] = {}
        self._process = os.getpid()

    def install(self) -> None:
        """One that the program ignores stays ignored, and one that C code handles stays with that."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in self._signums:
            before = signal.getsignal(signum)
            if before is None:
                words = "leave_signals: %s has a handler that is not Python's, and is left to that"
                log.warning(words, signal_name(signum))
            elif before is not signal.SIG_IGN:
                if is_handled_outside(signum):
                    self._in_c[signum] = _action(signum)
                self._before[signum] = before
                signal.signal(signum, self._handle)

    def takes(self, signum: int) -> bool:
        """Whether it would have ended the process, and does not."""
        return signum in self._before and not _is_users(self._before[signum])

    def restore(self) -> None:
        """Put the previous handlers back. A signal that came just now is theirs."""
        for signum, before in self._before.items():
            if signal.getsignal(signum) != self._handle:
                continue  # the program has installed its own since
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signum})
            try:
                self._put_back(signum, before)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._before, self._in_c = {}, {}

    def _put_back(self, signum: int, before: Any) -> None:
        signal.signal(signum, before)
        if (action := self._in_c.get(signum)) is not None:
            _LIBC.sigaction(signum, action, None)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        before = self._before.get(signum, signal.SIG_DFL)
        if os.getpid() != self._process:
            self._put_back(signum, before)
            os.kill(os.getpid(), signum)
            return
        self._note(signum)
        if _is_users(before):
            before(signum, frame)


def _action(signum: int) -> ctypes.Array[ctypes.c_char]:
    """The handler of a signal as the C library has it: a ``struct sigaction``, which has 152 bytes on x86-64."""
    action = ctypes.create_string_buffer(1024)
    _LIBC.sigaction(signum, None, action)
    return action


def _is_users(handler: Any) -> bool:
    return callable(handler) and handler not in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)
