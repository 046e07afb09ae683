"""The pytest plugin: the fixtures ``ranks`` and ``command``. Imports nothing until a test asks for that.

Options in the configuration file:

``inprocess_preload``: modules that the server imports before ranks fork from it, besides torch. For what takes long to
import; not the module of the function, whose options a test may change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from inprocess.testing.command import Command
    from inprocess.testing.job import Job


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the configuration file."""
    parser.addini("inprocess_preload", "modules that are imported before the ranks of tests start", type="args")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server early where tests need it: it imports torch while others run."""
    if session.config.option.collectonly:
        return
    if any(_asks(item, name) for item in session.items for name in ("ranks", "command")):
        from inprocess.testing import server  # noqa: PLC0415  # only where it is used

        server.preload(*session.config.getini("inprocess_preload"))
        server.start_server()


def _asks(item: pytest.Item, name: str) -> bool:
    """Whether its fixture of this name is the one below, or made of it: tests have parameters and fixtures of their
    own with such names."""
    info = getattr(item, "_fixtureinfo", None)
    for definition in reversed(info.name2fixturedefs.get(name, ()) if info else ()):
        if definition.func.__module__ == __name__:
            return True
        if name not in definition.argnames:
            return False
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Note when the test begins: pytest-timeout counts from there, with the time for fixtures."""
    item.stash[_BEGAN] = time.monotonic()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Callable[..., Job]]:
    """Ranks for a training function: ``ranks(4).run(train, 20, faults={At(rank=1, step=3): Kill()})``.

    ``ranks(...)`` takes the arguments of `inprocess.testing.Job`, and its ``deadline`` ends before a timeout of
    pytest-timeout does. A failing test shows the story of its runs.
    """
    from inprocess.testing.job import Job  # noqa: PLC0415  # only where it is used
    from inprocess.testing.network import Refused  # noqa: PLC0415

    jobs: list[Job] = []
    until = _timeout(request.node)

    class Ranks(Job):
        tells = False  # the report does

        def run(self, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            self.deadline = min(self.deadline, until - time.monotonic())
            try:
                return super().run(*args, **kwargs)
            except Refused as refused:
                pytest.skip(f"no network can be made for NetworkCut: {refused}")

    def make(world_size: int, **options: Any) -> Job:
        jobs.append(Ranks(world_size, **options))
        stack.callback(jobs[-1].close)
        return jobs[-1]

    request.node.stash[_JOBS] = jobs
    with ExitStack() as stack:  # closes all of them, also where one cannot be
        yield make


@pytest.fixture
def command(request: pytest.FixtureRequest) -> Iterator[Callable[..., Command]]:
    """A program from the server that has imported torch: ``command("train.py", "--steps", 20)``.

    Or ``command("inprocess", "run", "--nproc-per-node", 2, "train.py")``; see `inprocess.testing.Command` for its other
    arguments, of which ``deadline`` is in seconds from now here.
    """
    from inprocess.testing.command import Command  # noqa: PLC0415
    from inprocess.testing.job import DEADLINE  # noqa: PLC0415

    programs: list[Command] = []

    def start(*arguments: object, deadline: float = DEADLINE, **more: Any) -> Command:
        until = min(time.monotonic() + deadline, _timeout(request.node))
        programs.append(Command([str(argument) for argument in arguments], until, **more))
        stack.callback(programs[-1].close)
        return programs[-1]

    request.node.stash[_PROGRAMS] = programs
    with ExitStack() as stack:
        yield start


_BEGAN = pytest.StashKey[float]()
_JOBS = pytest.StashKey[list["Job"]]()
_PROGRAMS = pytest.StashKey[list["Command"]]()


def _timeout(item: pytest.Item) -> float:
    """A bit before pytest-timeout ends this test, by ``time.monotonic()``."""
    marker = item.get_closest_marker("timeout")
    given = marker.args[0] if marker and marker.args else marker.kwargs.get("timeout") if marker else None
    if given is None:
        given = getattr(item.config.option, "timeout", None)
    if given is None and item.config.pluginmanager.hasplugin("timeout"):
        given = item.config.getini("timeout")
    return item.stash[_BEGAN] + 0.9 * float(given) if given and float(given) > 0 else float("inf")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Put the stories of its runs behind a failing test."""
    report = yield
    if report.when == "call" and report.failed:
        runs = [story for job in item.stash.get(_JOBS, []) for story in job.stories]
        programs = [program.story() for program in item.stash.get(_PROGRAMS, [])]
        for name, stories in (("ranks", runs), ("command", programs)):
            for number, story in enumerate(stories):
                title = f"{name}, {number + 1} of {len(stories)}" if len(stories) > 1 else name
                report.sections.append((title, story))
    return report
