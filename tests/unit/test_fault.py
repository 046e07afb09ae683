"""From when on a restart is counted: what the log, goodput and the report say of its length."""

from __future__ import annotations

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.call.fault import Fault

HERE, THERE = "here", "there"


def record(at: float = 0.0, clock: str = "", silent: float = 0.0) -> InterruptionRecord:
    return InterruptionRecord(0, Interruption.EXCEPTION).noticed(at, clock, silent)


def test_without_a_fault_nothing_is_said() -> None:
    fault = Fault()
    assert not fault
    assert fault.took(5.0) == ""
    assert fault.told(5.0) == {}
    fault.explain([], HERE, 5.0)  # the job begins
    fault.pause(1.0)
    assert not fault


def test_it_counts_from_what_the_first_process_noticed() -> None:
    fault = Fault()
    fault.interrupted(10.3)  # the main thread was busy
    fault.explain([record(10.25, HERE), record(10.2, HERE), record(0.1, THERE)], HERE, 10.4)
    assert fault.took(10.5) == " after 300 ms"
    assert fault.told(10.5) == {"took": 0.3, "silent": 0.0}


def test_another_hosts_clock_says_nothing() -> None:
    fault = Fault()
    fault.interrupted(10.3)
    fault.explain([record(3.0, THERE), record()], HERE, 10.4)
    assert fault.took(10.5) == " after 200 ms"


def test_a_moment_that_cannot_be_is_none() -> None:
    fault = Fault()
    fault.interrupted(10.3)
    fault.explain([record(11.0, HERE)], HERE, 10.4)
    assert fault.took(10.5) == " after 200 ms"
    fault.explain([record(10.0, "")], "", 10.4)  # a host whose clock has no name
    assert fault.took(10.5) == " after 200 ms"


def test_a_process_that_joins_knows_the_records_alone() -> None:
    fault = Fault()
    fault.explain([record(10.2, HERE)], HERE, 10.4)
    assert fault.took(10.5) == " after 300 ms"
    other = Fault()
    other.explain([record(10.2, THERE)], HERE, 10.4)
    assert other.took(10.5) == " after 100 ms"


def test_a_standstill_is_said_separately() -> None:
    fault = Fault()
    fault.interrupted(10.3)
    fault.explain([record(10.28, HERE, silent=3.0), record(10.27, THERE, silent=9.0)], HERE, 10.4)
    assert fault.took(10.325) == "; noticed after 3.0 s, restarted in 45 ms"
    assert fault.told(10.325) == {"took": 0.045, "silent": 3.0}


def test_restarts_that_are_told_together() -> None:
    """The line counts from the first one, the event of each from its own."""
    fault = Fault()
    fault.interrupted(10.0)
    fault.explain([record(9.9, HERE)], HERE, 10.1)
    fault.interrupted(10.5)
    fault.explain([record(10.4, HERE)], HERE, 10.6)
    assert fault.took(11.0) == " after 1100 ms"
    assert fault.told(11.0)["took"] == 0.6


def test_a_pause_is_no_part_of_it() -> None:
    fault = Fault()
    fault.interrupted(10.0)
    fault.pause(5.0)
    assert fault.took(15.1) == " after 100 ms"
    assert fault.told(15.1)["took"] == 0.1
