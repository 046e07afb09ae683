"""The signal that interrupts the main thread, for the tests of everything around it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inprocess.interrupt import Gate, Interrupter


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    it = Interrupter()
    it.install()
    yield it
    it.restore()


@pytest.fixture
def gate(interrupter: Interrupter) -> Gate:
    return interrupter.new_gate()
