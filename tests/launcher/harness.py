"""Launchers whose workers do what the test tells them, by commands over a socket."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from inprocess.testing.command import Command, Missing
from inprocess.testing.ports import ReservedPort
from tests.harness.streams import fill

WORKER = str(Path(__file__).with_name("worker.py"))
ROOT = Path(__file__).parents[2]
#: what a launcher inherits, beside what a test adds
KEPT = ("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
#: else every launcher made a directory, and imported a warm worker
QUIET = {"INPROCESS_RUN_DIR": "none", "PET_WARM_WORKERS": "0"}
#: a ceiling for a test's waits together (seconds)
CEILING = 40.0
#: a variable of the test's launchers: how late they tell of failures (seconds)
HOLD = "TEST_HOLD"
#: and how long they let workers start before they start a warm one
PAUSE = "TEST_PAUSE"
#: signals that they find ignored, and blocked; streams that they find closed
IGNORED, BLOCKED, CLOSED = "TEST_IGNORED", "TEST_BLOCKED", "TEST_CLOSED"


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A port of the loopback address that a launcher can serve on."""
    with ReservedPort() as port:
        yield port.number


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


class Launcher(Command):
    """`inprocess run` with these arguments."""

    def __init__(self, arguments: list[str], env: Mapping[str, str | None], deadline: float) -> None:
        # modules that other tests import have set some
        alien = {name: None for name in os.environ if name not in KEPT}
        super().__init__(
            ["inprocess", "run", *arguments], deadline, env=alien | QUIET | dict(env), folder=ROOT, prepare=hold
        )

    def warm(self, number: int = 1) -> int:
        """The process of the n-th warm worker, once it waits."""

        def pids() -> list[str]:
            return re.findall(r"a warm worker waits \(pid (\d+)\), with \d+ MB of memory\n", self.err)

        self._read(lambda: len(pids()) >= number, f"warm worker {number}")
        return int(pids()[number - 1])

    @contextlib.contextmanager
    def unread(self) -> Iterator[None]:
        """Its standard error takes nothing more meanwhile."""
        descriptor = os.open(os.path.join(self._folder, "err"), os.O_WRONLY | os.O_NONBLOCK)
        try:
            fill(descriptor)
            yield
        finally:
            os.close(descriptor)


def hold(variables: Mapping[str, str]) -> None:
    """In the launcher's process."""
    from inprocess.launcher import agent, warm

    agent.HOLD_S = float(variables.get(HOLD, agent.HOLD_S))
    warm.PAUSE_S = float(variables.get(PAUSE, warm.PAUSE_S))
    for name in filter(None, variables.get(IGNORED, "").split(",")):
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    blocked = filter(None, variables.get(BLOCKED, "").split(","))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.Signals[name] for name in blocked])
    for number in map(int, filter(None, variables.get(CLOSED, "").split(","))):
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
