"""The monitor of a rank that the forkserver has started: forked from the rank before it has any other thread.

All that a monitor needs is imported then, so it starts within 0.02 s, where a program of its own takes 0.8 s of
processor time. It runs the program that every monitor runs. Later monitors of the rank are programs of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import socket
import subprocess
import sys
import warnings

from inprocess.monitor import program_ahead, starting
from inprocess.monitor.pidfile import PROGRAM, stat_fields
from inprocess.system.descriptors import await_readable
from inprocess.testing.process import become

__all__ = ["forget", "prepare"]

#: how long it may take to wait for its rank (seconds)
LIMIT_S = 10.0
#: where /proc/self/stat has the addresses of the command line, counted from its third field on
BEGIN, END = 45, 46


def prepare() -> list[int]:
    """Fork one for the next call of this process, which has no other thread yet; its process id, in a list."""
    starting.prepare(LIMIT_S, _fork)
    return starting.prepared()


def forget() -> None:
    """End it where no call has begun."""
    starting.forget_prepared()


class _Child:
    """What `starting.Program` asks for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 9)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            try:
                if timeout is not None:
                    self._await_end(timeout)
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except (ChildProcessError, ProcessLookupError):  # somebody else has reaped it
                self.returncode = 0
        return self.returncode

    def _await_end(self, timeout: float) -> None:
        end = os.pidfd_open(self.pid)
        try:
            if not await_readable(end, timeout):
                raise subprocess.TimeoutExpired(PROGRAM, timeout)
        finally:
            os.close(end)


def _fork(control: socket.socket) -> _Child:
    if pid := os.fork():
        return _Child(pid)
    try:
        _become_a_program(control.fileno())
        program_ahead.begin(control)
    finally:
        os._exit(1)


def _become_a_program(kept: int) -> None:
    """As `starting` starts one: in its own session, with no descriptor but this one, and nothing of the rank's."""
    faulthandler.disable()
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.path[:] = starting.search_path()
    become({**os.environ, **starting.ENVIRONMENT})
    os.setsid()
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nothing, fd)
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    _rename()


def _rename() -> None:
    """Monitors are known by their command line, which the kernel reads from this process's memory."""
    fields = stat_fields(os.getpid())
    begin, end = int(fields[BEGIN]), int(fields[END])
    if not begin < end:  # a kernel that does not tell
        return
    name = f"{sys.executable}\0-c\0{PROGRAM} (forked)".encode()
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, name, min(len(name), end - begin - 1))
