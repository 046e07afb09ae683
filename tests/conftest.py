"""Fixtures for all tests: real ranks (`launch`), and a check that every test leaves this process as it was."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from inprocess.system import logs
from inprocess.testing import leaks, process, server
from tests import tiers
from tests.harness import Run
from tests.harness.launch import PRELOAD, strangers

server.preload(*PRELOAD)
server.become_subreaper()
server.heed_ctrl_c()
# torch asks the name server for the name of every peer; one lost answer costs five seconds
os.environ.setdefault("RES_OPTIONS", process.NO_NAME_SERVER)
# else every launcher of a test made a directory
os.environ.setdefault("INPROCESS_RUN_DIR", "none")
# as most users have it: streams with buffers, whose locks a fork copies; bytecode that is kept for the next process
for variable in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(variable, None)


def _open_once_per_process() -> None:
    """The first store server of a process makes libuv open a pipe that it keeps."""
    from inprocess.stores import serving

    serving.serve("127.0.0.1", 0)


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    tiers.choose(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.select(config, items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tiers.report(terminalreporter, config)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the forkserver early when tests need it: it imports torch while the unit tests run."""
    if any("launch" in getattr(item, "fixturenames", ()) for item in session.items):
        server.start_server()
    if importlib.util.find_spec("torch") is not None:  # `nox -s versions` runs what needs no torch without it
        _open_once_per_process()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Threads, descriptors, processes, environment, handlers and hooks are the same after a test as before it."""
    take = partial(leaks.Snapshot.take, server.servers(), server.server_descriptors())
    before = take()
    yield
    logs.end(5)
    late = process.reap(partial(strangers, before.children), time.monotonic() + 5)
    take = partial(leaks.Snapshot.take, server.servers(), server.server_descriptors())
    left = leaks.settled(before, take, 0.2)
    if left:
        gc.collect()  # a failed test's traceback may hold sockets
        left = leaks.settled(before, take, 2.0)
    left += [f"still running: {line}" for line in late]
    assert not left, "left behind by this test:\n" + "\n".join(left)


class _Caplog(pytest.LogCaptureFixture):
    """Lines of the library are written by a thread of their own: waits for it before anything is looked at."""

    @property
    def handler(self) -> logging.Handler:  # type: ignore[override]
        logs.end(5)
        return super().handler


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """pytest's, with all that has been logged."""
    caplog.__class__ = _Caplog
    return caplog


@pytest.fixture
def launch() -> Iterator[Callable[..., Run]]:
    """Start ranks: `launch(target, world_size, faults=..., wrapper=..., env=..., args=...)`; see harness.Run."""
    runs: list[Run] = []

    def start(*args: object, **kwargs: object) -> Run:
        runs.append(Run(*args, **kwargs))  # type: ignore[arg-type]
        return runs[-1]

    yield start
    for each in runs:
        each.close()
