"""A worker's process as the launcher sees it: with many descriptors open, and where something else waited for it."""

from __future__ import annotations

import fcntl
import io
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from inprocess.launcher import processes
from inprocess.launcher.processes import (
    UNKNOWN_CODE,
    Ended,
    Logs,
    Process,
    ProcessSpec,
    StreamFilters,
    WorkerLaunch,
    WorkerPool,
)
from inprocess.launcher.signals import Signals
from inprocess.system import descriptors, procfs

#: the first descriptor that select() does not take
FIRST = 1024


class Sleeper(Process):
    """Without torch's context and logs; SIGKILL takes effect only when it may."""

    def __init__(self) -> None:
        self._tails, self.ended = [], None
        self._process = subprocess.Popen(["sleep", "600"])
        self.pid = self._process.pid
        low = os.pidfd_open(self.pid)
        self._descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, FIRST)
        os.close(low)
        self.looks = 0

    def _make(self, *_: Any) -> Any:
        raise NotImplementedError

    def _look(self) -> Ended | None:
        self.looks += 1
        if self.looks == 3:  # it had to wait before
            self._process.kill()
            self._process.wait()
        return None if self._process.poll() is None else Ended(-signal.SIGKILL)

    def _kill(self, number: signal.Signals) -> None:
        assert number == signal.SIGKILL


@pytest.fixture
def many() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 2 * FIRST:
        pytest.skip(f"the hard limit of descriptors is {before[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * FIRST, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many")
def test_a_process_is_waited_for_whose_descriptor_select_would_not_take() -> None:
    process = Sleeper()
    assert process.fileno() is not None and process.fileno() >= FIRST
    process.close()
    assert process.ended == Ended(-signal.SIGKILL)
    assert process.fileno() is None


class Tail:
    """Shows the output of a worker to somebody who does not read it."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def stop(self) -> None:
        self.may_end.wait()


@pytest.mark.usefixtures("many")
def test_nobody_reads_what_the_workers_have_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher acted on no signal, and waited for each of them."""
    monkeypatch.setattr(processes, "SHOW_LIMIT_S", 0.01)
    tails = [Tail(), Tail()]
    for tail in tails:
        process = Sleeper()
        process._tails = [tail]
        process.close()
        assert process.fileno() is None
    assert not processes.all_shown()
    for tail in tails:
        tail.may_end.set()
    monkeypatch.setattr(processes, "SHOW_LIMIT_S", 30.0)
    assert processes.all_shown()


class Reader:
    """In place of a thread that shows output: somebody reads a piece each time it is waited for, as often as given."""

    def __init__(self, pieces: int, total: int) -> None:
        self.pieces, self.total = pieces, total

    def is_alive(self) -> bool:
        return self.total > 0

    def join(self, timeout: float) -> None:
        assert timeout == processes.SHOW_LIMIT_S
        if self.pieces:
            processes._Counted(io.StringIO()).write("x")
            self.pieces, self.total = self.pieces - 1, self.total - 1


@pytest.mark.parametrize(("pieces", "is_shown"), [(0, False), (7, False), (9, True)])
def test_output_is_waited_for_as_long_as_somebody_reads_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], pieces: int, is_shown: bool
) -> None:
    """However slowly. After two seconds the launcher ended in the middle: the last lines, which say why, were lost."""
    reader: Any = Reader(pieces, 9)
    monkeypatch.setattr(processes, "_late", {reader: ("/logs/0/stdout.log", "/logs/0/stderr.log")})
    assert processes.all_shown() is is_shown
    if not is_shown:
        processes.say_cut("why the job has failed")
        *_, cut, why = capfd.readouterr().err.splitlines()
        assert cut.endswith("the end of the workers' output is not shown, as nobody reads it; all of it is in /logs/0")
        assert why == "why the job has failed"


def test_a_long_line_is_read_piece_by_piece() -> None:
    stream, before = io.StringIO(), processes._Counted.taken
    text = "".join(map(str, range(30_000)))
    processes._Counted(stream).write(text)
    assert stream.getvalue() == text
    assert processes._Counted.taken - before == 3


def test_workers_that_do_not_go_have_one_time_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float | None] = []
    with Signals("") as signals:
        pool = WorkerPool(SimpleNamespace(), SimpleNamespace(close=int), signals)  # type: ignore[arg-type]
        for rank in range(3):
            pool._processes[rank] = SimpleNamespace(poll=lambda: Ended(0), close=given.append)  # type: ignore[assignment]
        pool.close()
    assert len(given) == 3 and len(set(given)) == 1


class Stubborn:
    """A process that ends of SIGKILL alone; when that came."""

    def __init__(self, time: list[float]) -> None:
        self.local_rank, self.pid, self.killed, self._time = 0, 1, 0.0, time

    def poll(self) -> Ended | None:
        return Ended(-signal.SIGKILL) if self.killed else None

    def send(self, number: signal.Signals) -> None:
        if number == signal.SIGKILL:
            self.killed = self._time[0]

    def close(self, deadline: float) -> None:
        pass


@pytest.mark.parametrize(
    ("before", "come", "killed"),
    [
        (1, [], 30),
        (1, [5], 5),
        (0, [], 30),
        (0, [20], 50),
        (0, [20, 25], 25),
    ],
)
def test_the_first_signal_ends_no_grace(
    monkeypatch: pytest.MonkeyPatch, before: int, come: list[int], killed: int
) -> None:
    """Where no signal is the reason, such as at a restart of all: a worker was killed in the middle of saving."""
    time = [0.0]
    monkeypatch.setattr(processes, "clock", SimpleNamespace(monotonic=lambda: time[0]))
    with Signals("") as signals:
        pool = WorkerPool(SimpleNamespace(), SimpleNamespace(close=int), signals)  # type: ignore[arg-type]
        process: Any = Stubborn(time)
        pool._processes[0] = process

        def wait(seconds: float) -> None:
            time[0] += seconds
            if time[0] in come:
                signals._note(signal.SIGTERM, None)

        monkeypatch.setattr(pool, "wait", wait)
        for _ in range(before):
            signals._note(signal.SIGTERM, None)
        pool.close(timeout=30)
    assert process.killed == killed


def end(code: int) -> None:
    """A worker of --run-path that says nothing to its launcher."""
    os._exit(code)


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize("kind", ["program", "function"])
def test_the_exit_code_is_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, told: bool, code: int
) -> None:
    """Something else in the launcher's process waited for it. The kernel may know it still; else it has failed."""
    entrypoint: Any = sys.executable if kind == "program" else end
    args: Any = ("-c", f"import os; os._exit({code})") if kind == "program" else (code,)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spec = ProcessSpec("role", entrypoint, "spawn", None, StreamFilters(), limits, lambda *_: None)
    with Signals("") as signals:
        pool = WorkerPool(spec, Logs(DefaultLogsSpecs(str(tmp_path)), {0: {}}, StreamFilters()), signals)
        try:
            process = pool.start(0, 0, WorkerLaunch(args, {"PATH": os.environ["PATH"]}))
            assert descriptors.await_readable(process.fileno(), 30)
            os.waitpid(process.pid, 0)
            assert process.fileno() is not None
            if told and procfs.exit_status(process.fileno()) is None:
                pytest.skip("this kernel does not keep exit codes: it is older than Linux 6.15")
            if not told:
                monkeypatch.setattr(procfs, "exit_status", lambda _: None)
            ended = process.poll()
        finally:
            pool.close()
    expected = code if told else UNKNOWN_CODE
    assert ended is not None and ended.exitcode == expected
    assert (None if ended.failure is None else ended.failure.exitcode) == (expected or None)
