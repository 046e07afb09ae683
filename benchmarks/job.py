"""One job of several ranks: starts them, reads what they mark, and ends whatever is left of them.

A mark is a line of JSON with a name, a rank, an iteration and a time (CLOCK_MONOTONIC, which all processes share). It
goes through a named pipe in one write, so that it is there also when the next instruction kills the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

#: for every rank and monitor: torch asks the name server for each peer's name, and lost answers would be measured
ENVIRONMENT = {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
os.environ.update(ENVIRONMENT)

#: which of torch's two stores, chosen as torch does
LIBUV = os.environ.get("USE_LIBUV", "1") == "1"
#: names the pipe in the environment of the ranks
PIPE = "BENCHMARK_MARKS"
#: how long ranks may take to end by themselves when everything has been measured (seconds)
GRACE = 5.0
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Mark:
    """Something that happened in a rank."""

    name: str
    rank: int
    iteration: int
    #: nanoseconds
    t: int
    #: what else the rank has to say
    fields: Mapping[str, Any] = field(default_factory=dict)


def mark(name: str, rank: int, iteration: int, **fields: Any) -> None:
    """Called in a rank: something happens now."""
    now = time.monotonic_ns()
    line = json.dumps({"name": name, "rank": rank, "iteration": iteration, "t": now, "fields": fields})
    pipe = os.open(os.environ[PIPE], os.O_WRONLY)
    os.write(pipe, line.encode() + b"\n")
    os.close(pipe)


class Job:
    """The processes of one measurement, seen from the one that started them. A context manager that leaves nothing."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.marks: list[Mark] = []
        self.pids: dict[int, int] = {}
        #: of ranks that ended: exit code, negative for a signal
        self.codes: dict[int, int] = {}
        self._keep: Any = None
        #: a descriptor for each running process, readable when it has ended
        self._running: dict[int, int] = {}
        self._rest = b""

    def __enter__(self) -> Job:
        # what a rank leaves behind becomes a child of this process, which can then end it
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._temporary = tempfile.TemporaryDirectory(prefix="inprocess-benchmark-")
        #: for files of the job
        self.folder = Path(self._temporary.name)
        path = str(self.folder / "marks")
        os.mkfifo(path, 0o600)
        os.environ[PIPE] = path
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # writing too: it never ends when a rank closes it
        return self

    def __exit__(self, *exc_info: object) -> None:
        end_descendants()
        for descriptor in (self._pipe, *self._running):
            os.close(descriptor)
        self._keep = None
        self._temporary.cleanup()

    def start(self, main: Callable[[int], None], port: int, peer_store: bool = False) -> None:
        """Start the ranks as copies of this process, which has imported everything they need.

        ``peer_store``: serve the store that the peer's guide wants outside the wrapped function, here, so that no fault
        of a rank takes it away.
        """
        if peer_store:
            self._keep = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=LIBUV)
            os.environ["BENCHMARK_STORE"] = str(self._keep.port)
        for rank in range(self.world_size):
            pid = os.fork()
            if not pid:
                _child(main, rank, self.world_size, port)
            self._started(rank, pid)

    def torchrun(self, script: str, restarts: int) -> None:
        """Have torchrun start ranks that run this script with the same arguments."""
        self.launch("torch.distributed.run", script, [*sys.argv[1:], "--in-rank"], restarts)

    def launch(
        self,
        launcher: str,
        script: str,
        arguments: Sequence[str],
        restarts: int,
        options: Sequence[str] = (),
        errors: int = 2,
    ) -> None:
        """Have a launcher, counted as rank -1, start ranks that run this script with these arguments."""
        agent = ["-m", launcher, "--standalone", f"--nproc-per-node={self.world_size}"]
        command = [sys.executable, *agent, f"--max-restarts={restarts}", *options, "-m", script, *arguments]
        null = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, errors, 2)]
        # modules as this process has found them, in a checkout of another revision too; a launcher that is killed
        # leaves its temporary files, which go with the job
        environment = os.environ | {"PYTHONPATH": os.getcwd(), "TMPDIR": str(self.folder)}
        self._started(-1, os.posix_spawn(command[0], command, environment, file_actions=actions))
        os.close(null)

    def _started(self, rank: int, pid: int) -> None:
        self.pids[rank] = pid
        self._running[os.pidfd_open(pid)] = rank

    def wait(
        self,
        done: Callable[[Sequence[Mark]], bool],
        limit: float,
        each: Callable[[Mark], None] = lambda found: None,
    ) -> bool:
        """Read marks until ``done`` says so. False: it did not within ``limit`` seconds, or all ranks have ended."""
        end = time.monotonic() + limit
        while not done(self.marks):
            if time.monotonic() > end or not self._running:
                return False
            self._read(end, each)
        return True

    def let_end(self, limit: float = GRACE) -> None:
        """Give the ranks time to end by themselves."""
        self.wait(lambda marks: not self._running, limit)

    def errors(self) -> list[str]:
        """What ranks raised, and the signals that ended them."""
        raised = [f"rank {found.rank}: {found.fields['text']}" for found in self.marks if found.name == "raised"]
        ended = [(rank, signal.Signals(-code).name) for rank, code in sorted(self.codes.items()) if code < 0]
        return raised + [f"rank {rank}: {name}" for rank, name in ended]

    def _read(self, end: float, each: Callable[[Mark], None]) -> None:
        """Wait for marks, or for a process to end, which is a mark, too."""
        ready = select.select([self._pipe, *self._running], [], [], max(0.0, end - time.monotonic()))[0]
        now = time.monotonic_ns()
        if self._pipe in ready:  # first: what a process said before it ended
            *lines, self._rest = (self._rest + os.read(self._pipe, 1 << 16)).split(b"\n")
            for line in lines:
                self.marks.append(found := Mark(**json.loads(line)))
                each(found)
        for descriptor in self._running.keys() & set(ready):
            rank = self._running.pop(descriptor)
            os.close(descriptor)
            self.codes[rank] = os.waitstatus_to_exitcode(os.waitpid(self.pids[rank], 0)[1])
            self.marks.append(Mark("ended", rank, -1, now))


def _child(main: Callable[[int], None], rank: int, world_size: int, port: int) -> None:
    """The life of a forked rank; never returns."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    code = 1
    try:
        # as in a program that has trained for a while: no collection is due soon after the start; and since this one
        # writes to all pages, a later one need not copy them, and takes as long as in a process that was not forked
        gc.collect()
        main(rank)
        code = 0
    except BaseException as error:
        mark("raised", rank, -1, text=f"{type(error).__name__}: {error}"[:500])
    finally:
        sys.stdout.flush()
        os._exit(code)


def end_descendants() -> None:
    """Kill every process that came from this one, and theirs, and wait for them: orphans become its children."""
    with contextlib.suppress(ChildProcessError):  # nobody is left
        while True:
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            os.waitpid(-1, 0)


def free_port() -> int:
    """A port that was free a moment ago: the peers cannot take a bound socket, so all get it in the same way."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def last(marks: Sequence[Mark], name: str, iteration: int, ranks: set[int]) -> int | None:
    """When the last of these ranks marked this; None where one did not."""
    times = {found.rank: found.t for found in marks if (found.name, found.iteration) == (name, iteration)}
    return max(times[rank] for rank in ranks) if ranks <= times.keys() else None


def output(**result: Any) -> None:
    """Print the result: the last line of a script."""
    print(json.dumps(result), flush=True)


def here() -> Path:
    """The repository's root: scripts run as modules from there, also in a peer's environment."""
    return Path(__file__).resolve().parents[1]
