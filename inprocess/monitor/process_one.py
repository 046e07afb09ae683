"""A rank that is process 1 of its container, that is of its process namespace: nothing in there can kill it.

The kernel drops SIGKILL, and every other signal without a handler, that comes to process 1 from inside. A signal that
has a handler it delivers. So such a rank lends its monitor a signal whose handler is ``_exit`` of the C library, which
needs no interpreter lock and runs before the thread that gets it runs anything else. ``docs/notebook/process_one.md``
has what else was tried.
"""

from __future__ import annotations

import ctypes
import os
import signal

from inprocess.monitor.stacks import free_signal
from inprocess.system.inherited import unblocked
from inprocess.system.logs import get_logger

__all__ = ["LentSignal", "is_process_one"]

log = get_logger("inprocess")
_SIG_ERR = ctypes.c_void_p(-1).value
_warned = False


def is_process_one() -> bool:
    """Whether this process is process 1 of its namespace."""
    return os.getpid() == 1


class LentSignal:
    """In the rank, during a call. Open and close it in the main thread."""

    def __init__(self) -> None:
        self._signum = 0
        self._before: int | None = None
        self._blocked: set[int] = set()

    def open(self, taken: int) -> int:
        """The signal that ends this process with its own number as exit code; 0: SIGKILL does, or none is free.

        ``taken``: a signal that gets a handler later.
        """
        if not is_process_one():
            return 0
        signum = free_signal(taken)
        if signum is not None:
            self._before = _signal(signum, ctypes.cast(ctypes.CDLL(None)._exit, ctypes.c_void_p).value)
            if self._before != _SIG_ERR:
                self._signum, self._blocked = signum, unblocked([signum])
        self._warn()
        return self._signum

    def close(self) -> None:
        """Put the signal's handler back; more than once is fine."""
        if self._signum:
            _signal(self._signum, self._before)
            signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)
        self._signum = 0

    def _warn(self) -> None:
        """Once in this process."""
        global _warned
        if _warned:
            return
        _warned = True
        how = f"signal {self._signum} (exit code {self._signum})" if self._signum else "nothing: no signal is free"
        log.warning(
            "this rank is process 1 of its container: SIGKILL from inside has no effect on it. Its monitor process can "
            "end it by %s, ends with it, and the others notice it by heartbeat_timeout. Start an init (docker run "
            "--init, dumb-init or tini as entry point, shareProcessNamespace: true), or `inprocess run`, as process 1",
            how,
        )


def _signal(signum: int, handler: int | None) -> int | None:
    """As signal(2), with addresses. Python's own would need a Python function."""
    function = ctypes.CDLL(None).signal
    function.argtypes, function.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    before: int | None = function(signum, handler)
    return before
