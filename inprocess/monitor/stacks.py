"""Stacks of a rank that does not answer, taken from outside, before its monitor ends it.

The rank lends a signal to ``faulthandler``, whose handler is C and needs no interpreter lock: it writes the Python
stacks of all threads to memory that the monitor reads through ``/proc``. The signal is sent where SIGTERM follows, and,
where somebody asks for the stacks (`events.status_file`), to a rank that does not answer and is not stopped.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from typing import Any

from inprocess.monitor.configuration import MonitorConfig
from inprocess.system import descriptors, procfs
from inprocess.system.inherited import unblocked
from inprocess.system.logs import get_logger

__all__ = ["StackMemory", "free_signal", "parse", "take"]

log = get_logger("inprocess.monitor")
#: how long the handler may take (seconds): it needs a millisecond for some ten threads
LIMIT_S = 0.2
#: of what it writes
MAX_BYTES = 1 << 18
#: of all that it has written in a call
MAX_MEMORY_BYTES = 1 << 22
_THREAD = re.compile(r"^(?:Current t|T)hread (0x[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
#: a thread that is in a call of a wrapped function is the main one
_CALL = f"{os.sep}inprocess{os.sep}call{os.sep}loop.py:"


class StackMemory:
    """In the rank, during a call."""

    def __init__(self) -> None:
        self._signum = self._fd = -1
        self._blocked: set[int] = set()

    def open(self) -> tuple[int, int]:
        """The signal, and the descriptor of the memory; (0, -1) where there is none."""
        signum = free_signal()
        if signum is None:
            return 0, -1
        try:
            self._fd = os.memfd_create("inprocess-stacks", os.MFD_CLOEXEC)
            faulthandler.register(signum, file=self._fd, all_threads=True, chain=False)
        except (OSError, RuntimeError, ValueError) as error:
            log.info("no stacks can be taken from outside: %s", error)
            self.close()
            return 0, -1
        self._signum, self._blocked = signum, unblocked([signum])
        return signum, self._fd

    def close(self) -> None:
        """Put the signal's handler back."""
        if self._signum > 0:
            faulthandler.unregister(self._signum)
            signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)
        fd, self._signum, self._fd = self._fd, -1, -1  # before it is closed: Ctrl-C may come in between
        if fd >= 0:
            os.close(fd)


def free_signal(taken: int = 0) -> int | None:
    """A real-time signal that nobody handles, in C neither; not the first ones, which others take first, nor
    ``taken``."""
    try:
        caught = procfs.caught_signals()
    except (OSError, ValueError):
        return None
    numbers = range(signal.SIGRTMAX - 1, signal.SIGRTMIN + 7, -1)
    return next((number for number in numbers if number != taken and not caught >> number - 1 & 1), None)


def take(training: int, config: MonitorConfig) -> list[dict[str, Any]]:
    """In the monitor: all threads of the rank, as in the event ``stacks``; ``training`` is its pidfd."""
    path = f"/proc/{config.training_pid}/fd/{config.stacks_fd}"
    try:
        if not os.readlink(path).startswith("/memfd:inprocess-stacks"):  # the call is over, and that another file
            return []
        with open(path, "rb", buffering=0) as memory:
            if memory.seek(0, os.SEEK_END) > MAX_MEMORY_BYTES:  # behind what it wrote before
                return []
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(training, config.stacks_signal)
            descriptors.await_readable(training, LIMIT_S)  # it may end meanwhile
            return parse(memory.read(MAX_BYTES).decode(errors="replace"))
    except OSError:
        return []


def parse(text: str) -> list[dict[str, Any]]:
    """Threads, each with its frames, innermost first, from what ``faulthandler`` writes."""
    threads: list[dict[str, Any]] = []
    for line in text.splitlines():
        if found := _THREAD.match(line):
            if any(thread["name"] == found[1] for thread in threads):  # it was asked twice at the same time
                break
            threads.append({"name": found[1], "main": False, "frames": []})
        elif threads and (found := _FRAME.match(line)):
            threads[-1]["frames"].append(f"{found[1]}:{found[2]} in {found[3]}")
    for thread in threads:
        thread["main"] = any(_CALL in frame for frame in thread["frames"])
    return [thread for thread in threads if thread["frames"]]
