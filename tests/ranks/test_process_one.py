"""A rank that is process 1 of its container: nothing in there can kill it, so its monitor has another way."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from inprocess.testing.ports import ReservedPort

ROOT = Path(__file__).parents[2]
NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
KILLED = 128 + signal.SIGKILL
LIMIT_S = 40.0


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    try:
        tried = subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(str(error))
    if tried.returncode:
        pytest.skip(f"the kernel makes no process namespaces for us: {tried.stderr.strip()}")


class Job:
    """Three ranks of `process_one.py`; initial rank 1 is process 1 of a namespace of its own."""

    def __init__(self, how: str, folder: Path) -> None:
        self.deadline = time.monotonic() + LIMIT_S
        self.fifo, self.events = folder / "fifo", folder / "events"
        os.mkfifo(self.fifo)
        self._read, write = os.pipe()
        self._said = b""
        with ReservedPort() as port:
            env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "3"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number), "INPROCESS_RUN_DIR": str(self.events)}
            program = [sys.executable, str(Path(__file__).with_name("process_one.py")), str(self.fifo), how]
            self.ranks = [
                subprocess.Popen(
                    [*(NAMESPACE if rank == 1 else []), *program],
                    env=env | {"RANK": str(rank)},
                    stdout=write,
                    stderr=write,
                    start_new_session=True,
                )
                for rank in range(3)
            ]
            os.close(write)

    def begin(self) -> None:
        """Until all are in the function."""
        self.expect(r"0: enters 0\n", r"1: process 1\n", r"1: enters 0\n", r"2: enters 0\n")

    @property
    def said(self) -> str:
        return self._said.decode(errors="replace")

    def expect(self, *patterns: str) -> None:
        """Read until all of them have come."""
        while missing := [each for each in patterns if not re.search(each, self.said)]:
            assert self._take(), f"never came: {missing}\n{self.said}"

    def _take(self) -> bool:
        ready = select.select([self._read], [], [], max(0.0, self.deadline - time.monotonic()))[0]
        assert ready, f"not in time\n{self.said}"
        piece = os.read(self._read, 65536)
        self._said += piece
        return bool(piece)

    @property
    def container(self) -> list[psutil.Process]:
        """Of rank 1: process 1 first, then its monitor."""
        (first,) = psutil.Process(self.ranks[1].pid).children()
        return [first, *first.children()]

    def code(self, rank: int) -> int:
        return self.ranks[rank].wait(max(0.0, self.deadline - time.monotonic()))

    def rest(self) -> str:
        """What is said until nobody has the pipe any more: no process is left."""
        while self._take():
            pass
        return self.said

    def close(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                for process in reversed(psutil.Process(rank.pid).children(recursive=True)):
                    process.kill()
                rank.kill()
            rank.wait()
        os.close(self._read)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[[str], Job]]:
    jobs: list[Job] = []

    def start(how: str) -> Job:
        jobs.append(Job(how, tmp_path))
        jobs[-1].begin()
        return jobs[-1]

    yield start
    for each in jobs:
        each.close()


def lent(said: str) -> int:
    """The number of the signal that rank 1 has lent, as its warning says."""
    (number,) = re.findall(r"end it by signal (\d+) \(exit code \1\)", said)
    return int(number)


def went_on(said: str) -> None:
    assert said.count("returned 2 ranks") == 2, said
    assert "atomic too late" not in said


def test_one_that_completes(job: Callable[[str], Job]) -> None:
    """It is warned once, and leaves nothing."""
    run = job("calm")
    assert [run.code(rank) for rank in range(3)] == [0, 0, 0]
    said = run.rest()
    assert said.count("returned 3 ranks") == said.count("signals as before: True") == 3
    assert said.count("this rank is process 1 of its container") == 1
    assert "ERROR" not in said


def test_one_that_hangs_is_ended(job: Callable[[str], Job]) -> None:
    """In C code with the interpreter lock held; its container ends with it, and the others know why."""
    run = job("hold")
    code = run.code(1)
    assert [run.code(rank) for rank in (0, 2)] == [0, 0]
    said = run.rest()
    assert code == lent(said), said
    went_on(said)
    assert said.count("this rank is process 1 of its container") == 1
    assert re.search(r"ending the training process 1: rank 1: did not answer: .*\(hard_timeout\)", said), said
    assert "was killed" not in said
    command = [sys.executable, "-m", "inprocess", "report", run.events]
    report = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert "rank 1: gil_hang at process_one.py" in report.stdout, report.stdout


def test_one_that_was_stopped_begins_no_section(job: Callable[[str], Job]) -> None:
    """The others have gone on when it, and its monitor, wake up."""
    run = job("steps")
    run.expect("1: atomic 0")
    container = run.container
    for process in container:
        process.send_signal(signal.SIGSTOP)
    run.expect("0: returned 2 ranks", "2: returned 2 ranks")
    before = run.said.count("1: atomic")
    for process in container:
        process.send_signal(signal.SIGCONT)
    code = run.code(1)
    said = run.rest()
    assert code in (KILLED, lent(said)), said
    assert said.count("1: atomic") == before
    went_on(said)


def test_one_that_cannot_be_ended(job: Callable[[str], Job]) -> None:
    """Its signal does not reach it. The others go on all the same; it ends where it would go on."""
    run = job("deaf")
    run.expect("1: ignores", "did not end by signal", "0: returned 2 ranks", "2: returned 2 ranks")
    assert [run.code(rank) for rank in (0, 2)] == [0, 0]
    assert run.container[0].is_running()
    assert "gone" not in run.said and "was killed" not in run.said, run.said
    with open(run.fifo, "wb", buffering=0) as fifo:
        fifo.write(b"!")
    assert run.code(1) == KILLED
    said = run.rest()
    went_on(said)
    assert "nothing in there can end it" in said


def test_it_ends_itself() -> None:
    """SIGKILL to itself does nothing there."""
    program = "from inprocess.monitor import lease; lease.kill_self(); print('lives')"
    done = subprocess.run([*NAMESPACE, sys.executable, "-c", program], check=False, capture_output=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (KILLED, b"")
    assert b"was cut off or stood still for too long" in done.stderr
