"""Fixtures: `hub`, where workers report, and `run`, which starts launchers whose workers do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.launcher.harness import CEILING, WORKER, Hub, Launcher


@pytest.fixture
def deadline() -> float:
    return time.monotonic() + CEILING


@pytest.fixture
def hub(deadline: float) -> Iterator[Hub]:
    hub = Hub(deadline)
    yield hub
    hub.close()


@pytest.fixture
def start(hub: Hub, deadline: float) -> Iterator[Callable[..., Launcher]]:
    """`start("--standalone", "script.py")`: a launcher with these arguments."""
    launchers: list[Launcher] = []

    def begin(*arguments: str, **env: str | None) -> Launcher:
        launchers.append(Launcher(list(arguments), env, deadline))
        return launchers[-1]

    yield begin
    for launcher in launchers:
        launcher.close()


@pytest.fixture
def run(start: Callable[..., Launcher], hub: Hub) -> Callable[..., Launcher]:
    """`run("--nproc-per-node", "2", wrapped=True)`: a launcher of one node, with workers that the hub commands."""

    def begin(*options: str, wrapped: bool = True, **env: str) -> Launcher:
        given = [WORKER, hub.path, *(["wrapped"] if wrapped else [])]
        return start("--standalone", *options, *given, **env)

    return begin
