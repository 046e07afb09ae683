"""Faults, and where they strike: ``{At(rank=1, step=3): Kill(), At(rank=0, label="save"): Raise(OSError)}``.

Plain data that can be pickled. ``strike`` runs inside the rank; what takes more than one process (``HostLoss``,
``StoreLoss``, ``NetworkCut``) is done by the test's process, which the rank asks.
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
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar

from inprocess.exception import OptionError
from inprocess.testing.coordinates import When

from . import leaks

if TYPE_CHECKING:
    from .rank import Context

__all__ = [
    "Exit",
    "Fault",
    "Hang",
    "HoldGIL",
    "HostLoss",
    "Kill",
    "NetworkCut",
    "Raise",
    "Segfault",
    "SlowDown",
    "Stop",
    "StoreLoss",
    "Terminate",
]

#: longer than any deadline of a test (seconds): whoever waits this long has failed
FOREVER = 600.0


@dataclass(frozen=True, repr=False)
class Fault:
    """Base of all faults; a subclass with a ``strike`` of its own is one, too.

    ``when`` delays it until the other ranks are where the test wants them.
    """

    when: When | None = field(default=None, kw_only=True)
    #: the process may end by it, in whatever way
    ends: ClassVar[bool] = False
    #: the timeout of `Wrapper` that notices it; empty: it is noticed at once
    noticed_by: ClassVar[str] = ""

    def strike(self, context: Context) -> None:
        """Do it, inside the rank."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """As it is written: ``Raise(kind=OSError)``; what has its default is left out."""
        given = {
            each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default
        }
        shown = (
            f"{name}={value.__name__ if isinstance(value, type) else repr(value)}" for name, value in given.items()
        )
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Raise(Fault):
    """Raise an exception in the main thread: ``Raise(OSError)``, ``Raise(OSError, "disk full")``.

    Args:
        kind: class of the exception, or an exception that can be pickled.
        text: its only argument, where ``kind`` is a class.
    """

    kind: type[BaseException] | BaseException = ValueError
    text: str = "injected"

    def __post_init__(self) -> None:
        kind: object = self.kind
        if not isinstance(kind, BaseException) and not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise OptionError(f"Raise: {kind!r} is no exception: write Raise(ValueError, {kind!r})")

    def strike(self, context: Context) -> None:
        raise self.kind if isinstance(self.kind, BaseException) else self.kind(self.text)


@dataclass(frozen=True, repr=False)
class Kill(Fault):
    """The process gets a deadly signal, whose handler is put out of the way; SIGKILL, where no other is given."""

    signum: int = signal.SIGKILL
    ends: ClassVar[bool] = True

    def strike(self, context: Context) -> None:
        ctypes.CDLL(None).signal(self.signum, None)  # Python's own refuses outside the main thread, where an abort runs
        os.kill(os.getpid(), self.signum)
        while True:  # another thread may be the one that handles it
            signal.pause()


@dataclass(frozen=True, repr=False)
class Terminate(Fault):
    """SIGTERM, as from a scheduler: the rank leaves in time (``leave_signals``), unless its program handles that."""

    ends: ClassVar[bool] = True

    def strike(self, context: Context) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True, repr=False)
class Segfault(Fault):
    """Read from address 0: the kernel ends the process with SIGSEGV."""

    ends: ClassVar[bool] = True

    def strike(self, context: Context) -> None:
        ctypes.string_at(0)


@dataclass(frozen=True, repr=False)
class Exit(Fault):
    """``os._exit``: no cleanup, no exit handlers."""

    code: int = 5
    ends: ClassVar[bool] = True

    def strike(self, context: Context) -> None:
        os._exit(self.code)


@dataclass(frozen=True, repr=False)
class Stop(Fault):
    """SIGSTOP: the whole process stands still; the rank's monitor kills it after ``hard_timeout``."""

    ends: ClassVar[bool] = True
    noticed_by: ClassVar[str] = "hard_timeout"

    def strike(self, context: Context) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True, repr=False)
class HoldGIL(Fault):
    """Wait in C without giving the interpreter lock back; the rank's monitor kills it after ``hard_timeout``."""

    seconds: float = FOREVER
    ends: ClassVar[bool] = True
    noticed_by: ClassVar[str] = "hard_timeout"

    def strike(self, context: Context) -> None:
        # a mutex: a signal that is on its way would end a sleep
        libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        fraction, whole = math.modf(time.time() + self.seconds)
        libc.pthread_mutex_timedlock(mutex, struct.pack("ll", int(whole), int(fraction * 1e9)))


@dataclass(frozen=True, repr=False)
class Hang(Fault):
    """Wait for ever in Python, with the interpreter lock released, in one of ``KINDS``; ``soft_timeout`` ends it."""

    kind: str = "sleep"
    noticed_by: ClassVar[str] = "soft_timeout"
    KINDS: ClassVar[tuple[str, ...]] = ("sleep", "queue", "lock", "recv")

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise OptionError(f"Hang: kind={self.kind!r} is none of {', '.join(map(repr, self.KINDS))}")

    def strike(self, context: Context) -> None:
        wait_forever(self.kind)


@dataclass(frozen=True, repr=False)
class SlowDown(Fault):
    """The rank takes ``seconds`` longer, here and at each of the next ``steps - 1`` pings. Nobody has to notice."""

    seconds: float = 0.5
    steps: int = 1

    def __post_init__(self) -> None:
        if self.seconds < 0 or self.steps < 1:
            raise OptionError(f"{self}: seconds must not be negative, and steps at least 1")

    def strike(self, context: Context) -> None:
        context.slow_down(self.seconds, self.steps)


@dataclass(frozen=True, repr=False)
class KillTogether(Fault):
    """SIGKILL for ``count`` ranks at once, when all of them are here: the death of the first one cannot interrupt the
    last one before its own. The test's process does it."""

    count: int
    #: with their monitors, as when their hosts disappear
    hosts: bool = False
    ends: ClassVar[bool] = True

    def strike(self, context: Context) -> None:
        pids = [os.getpid(), *(leaks.children_of(os.getpid()) if self.hosts else ())]
        context.emit("together", count=self.count, pids=pids)
        wait_forever("sleep")


@dataclass(frozen=True, repr=False)
class HostLoss(Fault):
    """A host is gone: the rank dies together with its monitor, and with everything below it. So do ``ranks``, which
    share the host, wherever they are."""

    ranks: Collection[int] = ()
    ends: ClassVar[bool] = True
    noticed_by: ClassVar[str] = "heartbeat_timeout"

    def strike(self, context: Context) -> None:
        # by the test: with the monitor the store may go, and interrupt this before it has killed the process, too
        context.ask("host_lost", ranks=list(self.ranks))


@dataclass(frozen=True, repr=False)
class StoreLoss(Fault):
    """The process that serves the store is killed: rank 0's monitor, until the job has gone on over another store."""

    def strike(self, context: Context) -> None:
        context.ask("store_lost", port=context.store_port())


@dataclass(frozen=True, repr=False)
class NetworkCut(Fault):
    """Nothing gets to this rank's host any more and nothing comes from it, for ``seconds`` (None: for good).

    Every rank lives in a network namespace of its own then, which needs root or a kernel that lets users make some, and
    ``/dev/net/tun``; where that is refused the test is skipped.
    """

    seconds: float | None = None
    ends: ClassVar[bool] = True
    noticed_by: ClassVar[str] = "heartbeat_timeout"

    def strike(self, context: Context) -> None:
        context.ask("network_cut", seconds=self.seconds)


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
