"""Faults and when they strike: `{At(rank=1, iteration=0, step=2): Raise(ValueError, "x")}`.

Plain picklable data; `fire` runs inside the rank. A fault fires once per process.
"""

from __future__ import annotations

import ctypes
import math
import os
import queue
import signal
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from . import leaks

if TYPE_CHECKING:
    from .child import Context

#: longer than any deadline of a test: whoever waits this long is a failure
FOREVER = 600.0


@dataclass(frozen=True)
class At:
    """Where a fault strikes: `rank` is the initial rank, `step` a number or the name of a hook or place."""

    rank: int
    iteration: int | None = 0
    step: int | str = 0
    #: counts the wrapped calls of the process
    call: int = 0


@dataclass(frozen=True)
class When:
    """Hold the fault back until `count` other ranks have reported the event `event`."""

    event: str
    count: int


@dataclass(frozen=True)
class Fault:
    """Base of all faults. `when` delays it until the other ranks are where the test wants them."""

    when: When | None = field(default=None, kw_only=True)

    def fire(self, context: Context) -> None:
        raise NotImplementedError


class Uncopyable(Exception):
    """Neither copy nor pickle survive: two required arguments, a lock inside, and a __reduce__ that raises."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.second = second
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        raise TypeError("this exception cannot be copied")


class Unpicklable(Exception):
    """Pickling works, loading it again does not."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


@dataclass(frozen=True)
class Raise(Fault):
    """Raise `kind(*args)`; for the two awkward kinds above the arguments are known."""

    kind: type[BaseException] = ValueError
    text: str = "injected"

    def fire(self, context: Context) -> None:
        if self.kind is Uncopyable:
            raise Uncopyable(self.text, "second")
        if self.kind is Unpicklable:
            raise Unpicklable(code=7)
        if self.kind is SystemExit:
            raise SystemExit(3)
        raise self.kind(self.text)


@dataclass(frozen=True)
class Kill(Fault):
    """The process gets a deadly signal."""

    signum: int = signal.SIGKILL

    def fire(self, context: Context) -> None:
        os.kill(os.getpid(), self.signum)
        while True:  # another thread may be the one that handles it
            signal.pause()


@dataclass(frozen=True)
class KillTogether(Fault):
    """SIGKILL for `count` ranks at once, when all of them are here: the death of the first one cannot interrupt the
    last one before its own. The test does it, see `Run`."""

    count: int
    #: with their monitors, as when their hosts disappear
    hosts: bool = False

    def fire(self, context: Context) -> None:
        pids = [os.getpid(), *(leaks.children_of(os.getpid()) if self.hosts else ())]
        context.emit("together", count=self.count, pids=pids)
        wait_forever("sleep")


@dataclass(frozen=True)
class Exit(Fault):
    """os._exit: no cleanup, no exit handlers."""

    code: int = 5

    def fire(self, context: Context) -> None:
        os._exit(self.code)


@dataclass(frozen=True)
class Stop(Fault):
    """SIGSTOP: the whole process stands still until someone continues it."""

    def fire(self, context: Context) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True)
class HoldGIL(Fault):
    """Wait in C without giving the interpreter lock back. A mutex: a signal that is on its way would end a sleep."""

    seconds: float = FOREVER

    def fire(self, context: Context) -> None:
        libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        fraction, whole = math.modf(time.time() + self.seconds)
        libc.pthread_mutex_timedlock(mutex, struct.pack("ll", int(whole), int(fraction * 1e9)))


@dataclass(frozen=True)
class Hang(Fault):
    """Wait for ever, with the interpreter lock released, in one of `KINDS`."""

    kind: str = "sleep"
    KINDS: ClassVar[tuple[str, ...]] = ("sleep", "queue", "lock", "recv")

    def fire(self, context: Context) -> None:
        wait_forever(self.kind)


@dataclass(frozen=True)
class Slow(Fault):
    """Take long, then go on: a hook, a save."""

    seconds: float = 0.5

    def fire(self, context: Context) -> None:
        time.sleep(self.seconds)


@dataclass(frozen=True)
class KillMonitor(Fault):
    """SIGKILL for this rank's monitor process; the function goes on."""

    def fire(self, context: Context) -> None:
        context.emit("monitor_killed", pids=kill_monitor())


@dataclass(frozen=True)
class KillHost(Fault):
    """Monitor and process die together, as when their host disappears."""

    def fire(self, context: Context) -> None:
        # by the test: with the monitor the store may go, and interrupt this before it has killed the process, too
        KillTogether(1, hosts=True).fire(context)


@dataclass(frozen=True)
class Swallow(Fault):
    """Swallow `times` interruptions in a busy loop, then let the next one pass; and Ctrl-C, as programs should."""

    times: int = 1

    def fire(self, context: Context) -> None:
        swallowed = 0
        while True:
            try:
                if not swallowed:  # in here: the interruption may follow at once
                    context.emit("blocked", place="swallow")
                spin()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                context.emit("swallowed", type=type(error).__name__)
                if swallowed == self.times:
                    raise
                swallowed += 1


class Returns(BaseException):
    """Has a wrapped function return at once, see `Context.wrap`."""


@dataclass(frozen=True)
class Fork(Fault):
    """Fork a process that leaves the function by itself, and wait for its end; the rank stays."""

    KINDS: ClassVar[tuple[str, ...]] = ("return", "raise", "exit")
    STATUS: ClassVar[dict[str, int]] = {"return": 0, "raise": 1, "exit": 3}
    #: one of KINDS
    kind: str = "return"

    def fire(self, context: Context) -> None:
        pid = os.fork()
        if not pid:
            self._leave(context)
        interruption: BaseException | None = None
        while True:
            try:
                status = os.waitpid(pid, 0)[1]
                break
            except ChildProcessError:  # an interruption came between the answer and the name for it
                status = self.STATUS[self.kind] << 8
                break
            except BaseException as error:
                interruption = error
        if os.waitstatus_to_exitcode(status) != self.STATUS[self.kind]:
            context.emit("wrong", text=f"a forked child ended with {status}, not with that of {self.kind!r}")
        if interruption is not None:
            raise interruption

    def _leave(self, context: Context) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, context.events.fileno())  # what unwinds would report for the rank
        if self.kind == "return":
            raise Returns
        if self.kind == "raise":
            raise ValueError("of a forked child")
        raise SystemExit(self.STATUS[self.kind])


def spin() -> None:
    """A Python loop that ends only through an exception."""
    end = time.monotonic() + FOREVER
    while time.monotonic() < end:
        pass


def wait_forever(kind: str) -> None:
    """Block in Python-level code that releases the interpreter lock."""
    if kind == "sleep":
        time.sleep(FOREVER)
    elif kind == "queue":
        queue.Queue[int]().get()
    elif kind == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif kind == "recv":
        here, there = socket.socketpair()
        with here, there:
            here.recv(1)
    else:
        raise ValueError(f"kind={kind!r}: use one of {Hang.KINDS}")


def kill_monitor() -> list[int]:
    """SIGKILL for all children of this process; a rank's only child is its monitor."""
    pids = leaks.children_of(os.getpid())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return pids
