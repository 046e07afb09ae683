"""What a process holds: threads, descriptors, children, environment, handlers, hooks. Two snapshots are compared.

Thread exits and closes done by C++ threads have no event to wait for, so `settled` looks again for a bounded time.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from inprocess.system import procfs

#: pytest writes this one itself between the two snapshots
IGNORED_VARIABLES = frozenset({"PYTEST_CURRENT_TEST"})
#: logging.Handler classes that pytest puts on and takes off by itself
IGNORED_HANDLERS = frozenset(
    {"LogCaptureHandler", "_LiveLoggingNullHandler", "_FileHandler", "_LiveLoggingStreamHandler"}
)
#: threads that torch starts once for each kind of device, and never ends
TORCHS_OWN = "[pt_autograd_"


def children_of(pid: int) -> list[int]:
    """Direct children of a process, zombies included; empty when it is gone."""
    found: list[int] = []
    gone = contextlib.suppress(FileNotFoundError, ProcessLookupError)
    with gone:
        for task in list(Path(f"/proc/{pid}/task").iterdir()):
            with gone:  # a thread may end meanwhile: the others have children, too
                found.extend(int(word) for word in (task / "children").read_text().split())
    return found


def descendants_of(pid: int, without: Collection[int] = ()) -> list[int]:
    """All processes below `pid`; `without` itself is left out, but not what is below it."""
    found: list[int] = []
    waiting = children_of(pid)
    while waiting:
        child = waiting.pop()
        waiting.extend(children_of(child))
        if child not in without:
            found.append(child)
    return found


def command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return f"{state} {b' '.join(words).decode(errors='replace')[:200]}"


def _threads() -> dict[int, str]:
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = {}
    for task in os.listdir("/proc/self/task"):
        try:
            comm = Path(f"/proc/self/task/{task}/comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[int(task)] = f"{names.get(int(task), '')} [{comm}]".strip()
    return found


def descriptors(without: Collection[int] = ()) -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if int(name) not in without and not target.endswith("/fd"):
            found[int(name)] = target
    return found


def _in_words(descriptor: int, target: str) -> str:
    """With the addresses of a socket, and the state of a TCP one."""
    if not target.startswith("socket:"):
        return target
    copy = procfs.copy_of(descriptor)
    if copy is None:  # closed meanwhile
        return target
    with copy:
        words = [target, copy.family.name, str(copy.getsockname())]
        with contextlib.suppress(OSError):  # not TCP
            words.append(f"state {copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]}")
        with contextlib.suppress(OSError):  # not connected
            words.append(f"to {copy.getpeername()}")
    return ", ".join(words)


def _log_handlers() -> dict[str, object]:
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "inprocess"]
    loggers = [("", logging.root), *((name, logging.getLogger(name)) for name in names)]
    return {
        f"log handler of {name or 'root'}: {handler!r}": handler
        for name, logger in loggers
        for handler in logger.handlers
        if type(handler).__name__ not in IGNORED_HANDLERS
    }


def _handlers() -> dict[str, object]:
    found: dict[str, object] = {}
    for signum in signal.valid_signals():
        found[f"handler of signal {signum:d}"] = signal.getsignal(signum)
    found["signal mask"] = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    found["interval timer"] = signal.getitimer(signal.ITIMER_REAL)
    found["sys.unraisablehook"] = sys.unraisablehook
    found["sys.excepthook"] = sys.excepthook
    found["threading.excepthook"] = threading.excepthook
    found["switch interval"] = sys.getswitchinterval()
    found["garbage collection"] = gc.isenabled()
    found["working directory"] = os.getcwd()
    return found


@dataclass(frozen=True)
class Snapshot:
    """Everything that must be the same before and after."""

    threads: dict[int, str]
    descriptors: dict[int, str]
    children: dict[int, str]
    environment: dict[str, str]
    log_handlers: dict[str, object]
    handlers: dict[str, object]

    @staticmethod
    def take(without_pids: Collection[int] = (), without_fds: Collection[int] = ()) -> Snapshot:
        return Snapshot(
            threads=_threads(),
            descriptors=descriptors(without_fds),
            children={pid: command_of(pid) for pid in children_of(os.getpid()) if pid not in without_pids},
            environment={name: text for name, text in os.environ.items() if name not in IGNORED_VARIABLES},
            log_handlers=_log_handlers(),
            handlers=_handlers(),
        )

    def leftovers(self, after: Snapshot) -> list[str]:
        """One line for each thing that `after` has and this snapshot has not, or that differs."""
        lines = [
            f"thread {tid}: {name}"
            for tid, name in after.threads.items()
            if tid not in self.threads and not name.startswith(TORCHS_OWN)
        ]
        lines += [
            f"descriptor {fd}: {_in_words(fd, target)}"
            for fd, target in after.descriptors.items()
            if self.descriptors.get(fd) != target
        ]
        lines += [f"process {pid}: {text}" for pid, text in after.children.items() if pid not in self.children]
        lines += [name for name in after.log_handlers if name not in self.log_handlers]
        lines += _changed("variable ", self.environment, after.environment)
        lines += _changed("", self.handlers, after.handlers)
        return lines


def _changed(
    kind: str, before: dict[str, str] | dict[str, object], after: dict[str, str] | dict[str, object]
) -> list[str]:
    names = sorted(before.keys() | after.keys())
    return [
        f"{kind}{name}: {before.get(name)!r} became {after.get(name)!r}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def settled(before: Snapshot, take: Callable[[], Snapshot], seconds: float) -> list[str]:
    """The leftovers that are still there after at most `seconds`."""
    end = time.monotonic() + seconds
    while lines := before.leftovers(take()):
        if time.monotonic() > end:
            return lines
        time.sleep(0.002)
    return []
