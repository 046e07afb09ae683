"""The share of a call that was productive, as its first rank says it in the last line."""

from __future__ import annotations

from inprocess.call.goodput import Goodput


def test_time_in_the_function_counts_where_its_steps_are_kept() -> None:
    time = Goodput(100.0)
    time.called(101.0)
    time.interrupted(105.0, steps=8, kept=6)  # 4 s, of which 1 s is done again
    time.called(105.5)
    time.interrupted(107.5, steps=0, kept=0)  # without ping() no step is known to be done again
    time.interrupted(107.6, steps=0, kept=0)  # before the function was called again
    time.called(108.0)
    assert time.line(110.0) == "3 restarts in 10.0 s; goodput 70.0%"


def test_nothing_was_kept() -> None:
    time = Goodput(0.0)
    time.called(0.0)
    time.interrupted(5.0, steps=5, kept=0)
    assert time.line(5.0) == "1 restart in 5.0 s; goodput 0.0%"


def test_a_fault_before_the_function_was_called_is_no_negative_time() -> None:
    """The last ping of a rank that stood still may be older than its function's call."""
    time = Goodput(0.0)
    time.called(3.0)
    time.interrupted(2.0, steps=1, kept=1)
    time.called(4.0)
    assert time.line(8.0) == "1 restart in 8.0 s; goodput 50.0%"
