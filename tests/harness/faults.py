"""Faults that our own tests need beside the public ones of `inprocess.testing`, and their way to say where."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from inprocess import testing
from inprocess.interrupt.frames import leave_alone
from inprocess.testing import leaks
from inprocess.testing.faults import FOREVER, Fault
from inprocess.testing.rank import Context


def At(rank: int, iteration: int | None = 0, step: int | str = 0, call: int = 0) -> testing.At:
    """In iteration 0 of the first call, where nothing else is said; a `step` is a number, or the name of a place or
    hook (`Context.point`). `call=-1`: before any call."""
    when = {"iteration": iteration, "call": None if call < 0 else call}
    return testing.At(rank, step=step, **when) if isinstance(step, int) else testing.At(rank, label=step, **when)


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


@dataclass(frozen=True, repr=False)
class Raise(testing.Raise):
    """The public one; for the two awkward kinds above, and for SystemExit, the arguments are known."""

    def strike(self, context: Context) -> None:
        if self.kind is Uncopyable:
            raise Uncopyable(self.text, "second")
        if self.kind is Unpicklable:
            raise Unpicklable(code=7)
        if self.kind is SystemExit:
            raise SystemExit(3)
        super().strike(context)


@dataclass(frozen=True, repr=False)
class KillMonitor(Fault):
    """SIGKILL for this rank's monitor process; the function goes on."""

    def strike(self, context: Context) -> None:
        context.emit("monitor_killed", pids=kill_monitor())


@dataclass(frozen=True, repr=False)
class Swallow(Fault):
    """Swallow `times` interruptions in a busy loop, then let the next one pass; and Ctrl-C, as programs should."""

    times: int = 1

    def strike(self, context: Context) -> None:
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


@dataclass(frozen=True, repr=False)
class Fork(Fault):
    """Fork a process that leaves the function by itself, and wait for its end; the rank stays."""

    KINDS: ClassVar[tuple[str, ...]] = ("return", "raise", "exit")
    STATUS: ClassVar[dict[str, int]] = {"return": 0, "raise": 1, "exit": 3}
    #: one of KINDS
    kind: str = "return"

    def strike(self, context: Context) -> None:
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


# an interruption that comes while it forks, which takes milliseconds, would leave a child that nobody knows
leave_alone(Fork.strike.__code__)


def spin() -> None:
    """A Python loop that ends only through an exception."""
    end = time.monotonic() + FOREVER
    while time.monotonic() < end:
        pass


def kill_monitor() -> list[int]:
    """SIGKILL for all children of this process; a rank's only child is its monitor."""
    pids = leaks.children_of(os.getpid())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return pids
