"""The fixture `job`: ranks on the GPU that is here, run to their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import Ranks, Run

from . import machine, targets


@pytest.fixture
def job(launch: Callable[..., Run]) -> Callable[..., Ranks]:
    """`job(target, world_size, deadline=..., faults=..., wrapper=..., args=...)`; see harness.Run."""

    def run(target: Any, size: int, deadline: float = machine.DEADLINE, **options: Any) -> Ranks:
        run = launch(target, size, env=machine.ENVIRONMENT, place=targets.warm_up, **options)
        return machine.finish(run, deadline)

    return run
