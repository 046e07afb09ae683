"""During a restart threads switch fast and no garbage is collected; before and after, all is as the program set it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from inprocess.system.interpreter import SHORT, Interpreter
from tests.harness.strike import Strike

OWN = 0.003


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(OWN)
    gc.enable()
    yield
    sys.setswitchinterval(before)
    gc.enable()


def state() -> tuple[float, bool]:
    return pytest.approx(sys.getswitchinterval()), gc.isenabled()


def test_in_a_hurry_between_interruption_and_entry() -> None:
    interpreter = Interpreter()
    interpreter.begin()
    for _ in range(2):
        interpreter.hurry()
        interpreter.hurry()
        assert state() == (SHORT, False)
        interpreter.relax()
        assert state() == (OWN, True)


def test_a_late_thread_changes_nothing() -> None:
    interpreter = Interpreter()
    interpreter.hurry()
    assert state() == (OWN, True)
    interpreter.begin()
    interpreter.hurry()
    interpreter.end()
    interpreter.hurry()
    assert state() == (OWN, True)


def test_what_the_program_sets_meanwhile_stays() -> None:
    interpreter = Interpreter()
    interpreter.begin()
    interpreter.hurry()
    sys.setswitchinterval(0.002)
    gc.enable()
    interpreter.end()
    assert state() == (0.002, True)


def test_what_the_program_had_set_stays() -> None:
    sys.setswitchinterval(1e-6)
    gc.disable()
    interpreter = Interpreter()
    interpreter.begin()
    interpreter.hurry()
    assert state() == (1e-6, False)
    interpreter.end()
    assert state() == (1e-6, False)


@pytest.mark.parametrize("interval", [0.000231, 0.005, 0.003975, 0.000029])
def test_the_interval_is_the_same_after_many_restarts(interval: float) -> None:
    sys.setswitchinterval(interval + 5e-7)
    before = sys.getswitchinterval()
    interpreter = Interpreter()
    interpreter.begin()
    for _ in range(100):
        interpreter.hurry()
        interpreter.relax()
    assert sys.getswitchinterval() == before


def _struck(interpreter: Interpreter, number: int) -> bool:
    """Whether Ctrl-C came at that moment, before the call ended."""
    tracing = sys.gettrace()
    sys.settrace(Strike(number, [Interpreter.relax.__code__]))
    try:
        interpreter.relax()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(tracing)
        interpreter.end()
    return False


def test_ctrl_c_leaves_no_haste() -> None:
    number, came = 0, True
    while came:
        interpreter = Interpreter()
        interpreter.begin()
        interpreter.hurry()
        came = _struck(interpreter, number)
        assert state() == (OWN, True), number
        number += 1
    assert number > 3
