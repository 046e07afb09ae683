"""The interpreter's switch interval is short during a restart, and the program's own before and after."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from inprocess.switching import SHORT, SwitchInterval

OWN = 0.003


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(OWN)
    yield
    sys.setswitchinterval(before)


def interval() -> float:
    return pytest.approx(sys.getswitchinterval())  # type: ignore[no-any-return]


def test_short_between_interruption_and_entry() -> None:
    switching = SwitchInterval()
    switching.begin()
    for _ in range(2):
        switching.shorten()
        switching.shorten()
        assert interval() == SHORT
        switching.restore()
        assert interval() == OWN


def test_a_late_thread_changes_nothing() -> None:
    switching = SwitchInterval()
    switching.shorten()
    assert interval() == OWN
    switching.begin()
    switching.shorten()
    switching.end()
    switching.shorten()
    assert interval() == OWN


def test_what_the_program_sets_stays() -> None:
    switching = SwitchInterval()
    switching.begin()
    switching.shorten()
    sys.setswitchinterval(0.002)
    switching.end()
    assert interval() == 0.002


def test_a_shorter_one_stays() -> None:
    sys.setswitchinterval(1e-6)
    switching = SwitchInterval()
    switching.begin()
    switching.shorten()
    assert interval() == 1e-6
