"""Runs pytest on copies of the sources, some at a time, each in a fork of this process that has imported torch before.

This process must stay free of threads, and of everything that a mutant can change.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

import pytest
import torch.distributed  # noqa: F401  (once, here)

from tests.mutants import ROOT

#: what the tests need, relative to the root
SOURCES = ("inprocess", "tests", "examples", "pyproject.toml")
#: seconds for one test
PER_TEST = 20


@dataclass
class Job:
    """Tests to run on a copy that ``prepare`` changes first."""

    prepare: Callable[[Path], object]
    tests: Sequence[str]
    #: seconds; a run that takes longer is killed
    limit: float
    #: whatever the caller wants to find it by
    about: Any = None
    #: pytest's exit code, or minus the signal that ended it; None: it was killed for being late
    code: int | None = None
    output: str = ""
    seconds: float = 0.0


@dataclass
class _Running:
    job: Job
    folder: Path
    pid: int
    pidfd: int
    log: TextIO
    began: float = field(default_factory=time.monotonic)

    @property
    def late(self) -> bool:
        return time.monotonic() > self.began + self.job.limit


def run(jobs: Iterable[Job], at_a_time: int) -> Iterator[Job]:
    """Run all; yields each when it is done."""
    waiting, running = iter(jobs), list[_Running]()
    try:
        while True:
            while len(running) < at_a_time and (job := next(waiting, None)) is not None:
                running.append(_start(job))
            if not running:
                return
            for done in _ended(running):
                running.remove(done)
                _finish(done)
                yield done.job
    finally:
        for each in running:
            _finish(each)


def _start(job: Job) -> _Running:
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    for name in SOURCES:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    job.prepare(folder)
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in _finish)
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        _become_pytest(folder, job.tests, log)
    return _Running(job, folder, pid, os.pidfd_open(pid), log)


def _become_pytest(folder: Path, tests: Sequence[str], log: TextIO) -> NoReturn:
    """In the fork: nothing of this program is left in it, and nothing of the sources it was started from."""
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("inprocess", "tests")]:
            del sys.modules[name]
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
        os.environ.update(PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1")
        sys.dont_write_bytecode = True
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-o", f"timeout={PER_TEST}", *tests])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code))  # whatever threads a broken library has left behind


def _ended(running: Sequence[_Running]) -> list[_Running]:
    """Wait until some have ended, or are late."""
    poll = select.poll()
    for each in running:
        poll.register(each.pidfd, select.POLLIN)
    next_limit = min(each.began + each.job.limit for each in running)
    ready = {fd for fd, _ in poll.poll(max(0.0, next_limit - time.monotonic()) * 1e3 + 1)}
    return [each for each in running if each.pidfd in ready or each.late]


def _finish(ended: _Running) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(ended.pid, signal.SIGKILL)  # what its tests have left behind, or the run itself if it is late
    code = os.waitstatus_to_exitcode(os.waitpid(ended.pid, 0)[1])
    ended.job.code = None if ended.late and code == -signal.SIGKILL else code
    ended.job.seconds = time.monotonic() - ended.began
    with ended.log:
        ended.log.seek(0)
        ended.job.output = ended.log.read()
    os.close(ended.pidfd)
    shutil.rmtree(ended.folder)
