"""The fixtures of the partition tests: hosts, what their ranks share, and ranks that run there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from inprocess.testing.network import Network, Refused
from tests.harness import Run

from .shared import Shared
from .times import WATCHFUL


@pytest.fixture
def network() -> Iterator[Callable[..., Network]]:
    """Make hosts: `network(3)`. The test is skipped where the kernel refuses."""
    made: list[Network] = []

    def make(hosts: int, seed: int = 0) -> Network:
        try:
            made.append(Network(hosts, seed))
        except Refused as refused:
            pytest.skip(f"the kernel makes no hosts for us: {refused}")
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    """The shared disk."""
    made = Shared.create(tmp_path)
    yield made
    made.close()


@pytest.fixture
def start(launch: Callable[..., Run], network: Callable[..., Network], shared: Shared) -> Callable[..., Any]:
    """Start ranks on hosts of their own: `run, switch = start(target, [0, 0, 1])`, the host of each rank.

    Comes back when `busy` ranks, all of them by default, are well inside their function. `later`: the host of each
    process that the test starts later with that rank, by `run.start_another(rank, place=run.later)`.
    """

    def start(
        target: Callable[..., Any],
        host_of: Sequence[int],
        *,
        busy: int | None = None,
        seed: int = 0,
        later: Sequence[int] = (),
        **more: Any,
    ) -> Any:
        wired = network(max([*host_of, *later]) + 1, seed)
        more = {"wrapper": WATCHFUL} | more
        args = {"folder": str(shared.folder)} | more.pop("args", {})
        place = wired.place(host_of)
        run = launch(target, len(host_of), place=place, env=wired.variables(), args=args, **more)
        run.later = wired.place(later)
        run.wait_event("busy", count=len(host_of) if busy is None else busy)
        return run, wired.switch

    return start
