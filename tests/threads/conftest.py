"""The signal that interrupts the main thread, for the tests of everything around it; a process group."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inprocess.call_wrapper import CallWrapper, Controls
from inprocess.interrupt.gate import Gate
from inprocess.interrupt.signals import Interrupter
from inprocess.monitor.board import Board


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
def call() -> Iterator[CallWrapper]:
    board = Board.create()
    yield CallWrapper(board, lambda: None)
    board.close()


@pytest.fixture(params=["of the gate", "of the call"])
def atomic_of(request: pytest.FixtureRequest, call: CallWrapper) -> Callable[[Gate], Any]:
    """The section of a gate, by either of the two that enter it."""

    def section(gate: Gate) -> Any:
        Controls(call).gate = gate
        return gate.atomic if request.param == "of the gate" else call.atomic()

    return section


@pytest.fixture
def atomic(atomic_of: Callable[[Gate], Any], gate: Gate) -> Any:
    return atomic_of(gate)


@pytest.fixture
def excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    """init_process_group installs one of torch's own."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


@pytest.fixture
def groups() -> Iterator[Any]:
    """Two ranks of Gloo in this process, connected to each other."""
    from tests.threads.groups import connected

    made = connected()
    yield made
    made.clear()


@pytest.fixture
def group(excepthook: None) -> Iterator[None]:
    from tests.threads import groups

    groups.init()
    yield
    groups.end()
