"""A worker's process as the launcher sees it, where the launcher has many descriptors open."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from inprocess.launcher.processes import Ended, Process

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
