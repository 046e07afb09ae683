"""Starting the monitor's program, with what it has to know."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Protocol

from inprocess.monitor.pidfile import PROGRAM
from inprocess.system.descriptors import await_readable
from inprocess.system.errors import PACKAGE

__all__ = [
    "ENVIRONMENT",
    "READY",
    "Program",
    "forget_prepared",
    "memory_file",
    "prepare",
    "prepared",
    "search_path",
    "spawn",
]

#: the program: nothing is imported before the training process's own search path is set
CODE = f"""
import json, sys
numbers = [int(word) for word in sys.argv[1:]]
with open(numbers[0], "rb", closefd=False) as file:
    file.seek(0)
    sys.path[:] = json.load(file)["sys_path"]
from {PROGRAM} import main
main(*numbers)
"""
#: the same, started ahead of time; monitors are known by the name that this one begins with
AHEAD = f"{PROGRAM}_ahead"
#: C++ code of torch would log each wait that times out; no thread pools either. It also looks up the name of each peer
#: it connects to: a name server that does not answer would cost 5 s each time
ENVIRONMENT = {"TORCH_CPP_LOG_LEVEL": "FATAL", "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
#: of a program that is started ahead of time: it has imported what it needs
READY = b"ready"
#: it imports one of torch's stores by this
STORE_VARIABLE = "USE_LIBUV"
_waiting: list[_Waiting] = []


class Program(Protocol):
    """A child process, as `subprocess.Popen` has it."""

    pid: int
    returncode: int | None

    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def spawn(descriptors: list[int], plain: bool = False) -> Program:
    """Start the program, or have the one that waits begin.

    Args:
        descriptors: config, control, board, this process, and perhaps a predecessor; none of them 0, 1 or 2.
        plain: it needs no more of torch than one that waits has imported.
    """
    while _waiting:
        if process := _waiting.pop().begin(descriptors, plain):
            return process
    # where standard error was closed when this program began, its number may be that of any file by now
    errors = subprocess.DEVNULL if sys.__stderr__ is None else None
    return _start(CODE, [*descriptors, -1][:5], descriptors, errors)


def prepare(limit: float, start: Callable[[socket.socket], Program] | None = None) -> None:
    """Start a program ahead of time, for the next `spawn`. It ends with this process. Where none can be started the
    next `spawn` says so.

    Args:
        limit: seconds that its imports may take; they are waited for.
        start: starts `program_ahead` with its end of a pair of sockets; None: as a program of its own.
    """
    with contextlib.suppress(OSError):
        _waiting.append(waiting := _Waiting(start or _start_ahead))
        await_readable(waiting.control.fileno(), limit)


def prepared() -> list[int]:
    """Process ids of those that wait for a `spawn`."""
    return [waiting.process.pid for waiting in _waiting]


def forget_prepared() -> None:
    """End those that wait for a `spawn`."""
    while _waiting:
        _waiting.pop().end()


def _start_ahead(control: socket.socket) -> Program:
    path = memory_file(json.dumps({"sys_path": search_path()}))
    numbers = [path, control.fileno()]
    try:
        return _start(CODE.replace(PROGRAM, AHEAD), numbers, numbers, subprocess.DEVNULL)
    finally:
        os.close(path)


def _start(code: str, numbers: list[int], descriptors: list[int], errors: int | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # no site module: it would run the user's start-up files
        [sys.executable, "-S", "-W", "ignore", "-c", code, *map(str, numbers)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        cwd="/",
        env={**os.environ, **ENVIRONMENT},
        pass_fds=descriptors,
        start_new_session=True,
    )


class _Waiting:
    """A program that was started ahead of time."""

    def __init__(self, start: Callable[[socket.socket], Program]) -> None:
        self._owner, self._store = os.getpid(), os.environ.get(STORE_VARIABLE)
        self.control, theirs = socket.socketpair()
        try:
            self.process = start(theirs)
        except BaseException:
            self.control.close()
            raise
        finally:
            theirs.close()

    def begin(self, descriptors: list[int], plain: bool) -> Program | None:
        """Hand over; None: it is not fit, and ends."""
        same = (os.getpid(), os.environ.get(STORE_VARIABLE)) == (self._owner, self._store)
        with self.control, contextlib.suppress(OSError):
            fits = plain and same and sys.__stderr__ is not None
            if fits and self.control.recv(len(READY), socket.MSG_DONTWAIT) == READY:
                socket.send_fds(self.control, [READY], [*descriptors, 2])
                return self.process
        self.end()
        return None

    def end(self) -> None:
        """Nobody needs it."""
        self.control.close()
        self.process.kill()
        self.process.wait()


def memory_file(text: str) -> int:
    fd = os.memfd_create("inprocess-config", os.MFD_CLOEXEC)
    with open(fd, "w", closefd=False) as file:
        file.write(text)
    return fd


def search_path() -> tuple[str, ...]:
    """This process's module search path, usable from another directory, and where this package and torch are."""
    here = os.path.dirname(os.path.dirname(PACKAGE))
    entries = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    last = [here] if torch is None else [here, os.path.dirname(os.path.dirname(os.path.abspath(torch)))]
    return tuple(dict.fromkeys([*entries, *last]))
