"""The signal that interrupts the main thread, for the tests of everything around it; a process group."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from inprocess.interrupt import Gate, Interrupter
from tests.threads.groups import init, settle


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    it = Interrupter()
    it.install()
    yield it
    it.restore()


@pytest.fixture
def gate(interrupter: Interrupter) -> Gate:
    return interrupter.new_gate()


@pytest.fixture
def excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    """init_process_group installs one of torch's own."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


@pytest.fixture
def group(excepthook: None) -> Iterator[None]:
    init()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    settle()
