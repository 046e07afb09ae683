"""Runs the launcher in a process from the forkserver, and its workers by commands over a socket.

Everything is waited for: lines on pipes, greetings of workers, the ends of processes, all under one deadline.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.harness import ReservedPort, start_server
from tests.harness.streams import fill

WORKER = str(Path(__file__).with_name("worker.py"))
ROOT = Path(__file__).parents[2]
#: a ceiling for a test's waits together (seconds)
CEILING = 40.0
#: a variable of the test's launchers: how late they tell of failures (seconds)
HOLD = "TEST_HOLD"
#: what a launcher inherits, beside what a test adds
KEPT = ("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A port of the loopback address that a launcher can serve on."""
    with ReservedPort() as port:
        yield port.number


class Missing(AssertionError):
    """Something did not come in time."""


class Worker:
    """One process of a worker, as the test sees it: its greeting, and a line to it."""

    def __init__(self, connection: socket.socket, greeting: dict[str, Any], deadline: float) -> None:
        self._connection, self._deadline, self._rest = connection, deadline, b""
        self.env: dict[str, str] = greeting["env"]
        self.argv: list[str] = greeting["argv"]
        self.pid, self.restart = int(greeting["pid"]), int(greeting["restart"])
        self.rank = int(self.env["RANK"])

    def tell(self, command: str) -> None:
        self._connection.sendall(command.encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        """The worker's next message; an empty one when it is gone."""
        while b"\n" not in self._rest:
            piece = receive(self._connection, self._deadline)
            if not piece:
                return {}
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return dict(json.loads(line))

    def ask(self, command: str) -> dict[str, Any]:
        self.tell(command)
        return self.hear()

    def gone(self) -> None:
        """Wait for its end."""
        while self.hear():
            pass

    def close(self) -> None:
        self._connection.close()


def receive(connection: socket.socket, deadline: float) -> bytes:
    await_readable(connection, deadline, "a worker said nothing")
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


def await_readable(what: Any, deadline: float, missing: str) -> None:
    if not select.select([what], [], [], max(0.0, deadline - time.monotonic()))[0]:
        raise Missing(missing)


class Hub:
    """Where the workers of all launchers of a test report."""

    def __init__(self, deadline: float) -> None:
        self._folder = tempfile.mkdtemp(prefix="hub-")
        self.path = f"{self._folder}/s"
        self._deadline = deadline
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self.workers: list[Worker] = []

    def next(self) -> Worker:
        """The next worker that starts."""
        await_readable(self._listener, self._deadline, f"no further worker; {len(self.workers)} came")
        connection, _ = self._listener.accept()
        greeting = b""
        while not greeting.endswith(b"\n"):
            piece = receive(connection, self._deadline)
            if not piece:
                connection.close()
                raise Missing("a worker ended before its greeting")
            greeting += piece
        self.workers.append(Worker(connection, json.loads(greeting), self._deadline))
        return self.workers[-1]

    def group(self, size: int) -> list[Worker]:
        """The next workers, by rank."""
        return sorted((self.next() for _ in range(size)), key=lambda worker: worker.rank)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self._listener.close()
        shutil.rmtree(self._folder)


class Launcher:
    """`inprocess run` with these arguments."""

    def __init__(self, arguments: list[str], env: Mapping[str, str], deadline: float) -> None:
        self._deadline = deadline
        self._folder = tempfile.mkdtemp(prefix="launcher-")
        self.temporary = os.path.join(self._folder, "tmp")
        os.mkdir(self.temporary)
        paths = [os.path.join(self._folder, name) for name in ("out", "err")]
        for path in paths:
            os.mkfifo(path)
        names = map(os.path.basename, paths)
        # nobody writes yet: such a pipe has no end before somebody did
        self._pipes = {
            name: os.open(path, os.O_RDONLY | os.O_NONBLOCK) for name, path in zip(names, paths, strict=True)
        }
        self._seen = dict.fromkeys(self._pipes, b"")
        inherited = {name: os.environ[name] for name in KEPT if name in os.environ}
        variables = {**inherited, "TMPDIR": self.temporary, "RES_OPTIONS": "attempts:0", **env}
        context = multiprocessing.get_context("forkserver")
        start_server()
        self._process = context.Process(target=_launch, args=(arguments, variables, paths))
        self._process.start()
        self.pid = int(self._process.pid or 0)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def out(self) -> str:
        return self._seen["out"].decode()

    @property
    def err(self) -> str:
        return self._seen["err"].decode()

    def expect(self, text: str, stream: str = "err") -> None:
        """Read until this text has come."""
        self._read(lambda: text.encode() in self._seen[stream], f"{text!r} on {stream}")

    def finish(self) -> int:
        """Wait until the launcher has ended and nobody has its streams any more; the exit code."""
        self._read(lambda: not self._pipes, "the end")
        self._process.join(max(0.0, self._deadline - time.monotonic()))
        code = self._process.exitcode
        if code is None:
            raise Missing(f"the launcher still runs\n{self.err}")
        return code

    @contextlib.contextmanager
    def unread(self) -> Iterator[None]:
        """Its standard error takes nothing more meanwhile."""
        descriptor = os.open(os.path.join(self._folder, "err"), os.O_WRONLY | os.O_NONBLOCK)
        try:
            fill(descriptor)
            yield
        finally:
            os.close(descriptor)

    def left(self) -> list[str]:
        """Files in its temporary directory."""
        return sorted(str(path.relative_to(self.temporary)) for path in Path(self.temporary).rglob("*"))

    def _read(self, done: Callable[[], bool], what: str) -> None:
        while not done():
            if not self._pipes:
                raise Missing(f"never came: {what}\n{self.out}\n{self.err}")
            ready = select.select([*self._pipes.values()], [], [], max(0.0, self._deadline - time.monotonic()))[0]
            if not ready:
                raise Missing(f"not in time: {what}\n{self.out}\n{self.err}")
            for name, descriptor in list(self._pipes.items()):
                if descriptor in ready:
                    self._take(name, descriptor)

    def _take(self, name: str, descriptor: int) -> None:
        piece = os.read(descriptor, 65536)
        self._seen[name] += piece
        if not piece:
            os.close(self._pipes.pop(name))

    def close(self, workers: list[Worker]) -> None:
        if self._process.is_alive():  # the test has failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
            self._process.join(5)
            with contextlib.suppress(Missing):
                self._read(lambda: not self._pipes, "the end")
            print(f"--- out\n{self.out}\n--- err\n{self.err}")  # pytest shows it
        self._process.close()
        for descriptor in self._pipes.values():
            os.close(descriptor)
        shutil.rmtree(self._folder)


def _launch(arguments: list[str], variables: dict[str, str], paths: list[str]) -> None:
    """In the launcher's process: a new session, these streams and this environment, then the command."""
    os.setsid()
    for number, path in zip((1, 2), paths, strict=True):
        descriptor = os.open(path, os.O_WRONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # TMPDIR is looked up anew
    os.chdir(ROOT)
    from inprocess.launcher import agent, command

    agent.HOLD = float(variables.get(HOLD, agent.HOLD))
    sys.exit(command.main(["run", *arguments]))
