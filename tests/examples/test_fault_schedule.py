"""Fault schedules: the grammar, clear errors, and that a fault strikes once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import fault_schedule
import pytest
from fault_schedule import STRIKES, Fault, Faults, idle, in_words, option, parse, usual


def test_grammar():
    assert parse("kill:rank=2,step=60  raise:rank=1,step=120\n") == [Fault("kill", 2, 60), Fault("raise", 1, 120)]
    assert parse("") == []


@pytest.mark.parametrize("kind", STRIKES)
def test_every_kind_is_understood_and_shown_as_it_is_written(kind):
    text = f"{kind}:rank=3,step=4"
    assert [str(fault) for fault in parse(text)] == [text]


@pytest.mark.parametrize(
    "part",
    [
        "kil:rank=1,step=2",
        "kill",
        "kill:rank=1",
        "kill:rank=-1,step=2",
        "kill:step=1,rank=2",
        "kill:rank=1,step=2x",
        ":",
    ],
)
def test_a_bad_part_is_named_with_the_grammar(part):
    with pytest.raises(ValueError, match=r"KIND:rank=R,step=S.*kill, term, segv") as caught:
        parse(f"raise:rank=0,step=1 {part}")
    assert repr(part) in str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "schedule"),
    [
        (1, "raise:rank=0,step=80"),
        (2, "kill:rank=0,step=55 raise:rank=1,step=80"),
        (3, "kill:rank=1,step=30 kill:rank=0,step=55 raise:rank=2,step=80"),
        (8, "kill:rank=1,step=30 kill:rank=0,step=55 raise:rank=7,step=80"),
    ],
)
def test_the_usual_schedule(ranks, schedule):
    assert usual(ranks, steps=100) == parse(schedule)


@pytest.mark.parametrize(("ranks", "steps"), [(1, 1), (2, 1), (3, 2), (4, 120)])
def test_all_of_the_usual_schedule_strikes(ranks, steps):
    faults = usual(ranks, steps)
    assert idle(faults, ranks, steps) is None
    assert len({fault.rank for fault in faults}) == len(faults)  # who replaces a rank has no faults


def test_no_such_rank_or_step():
    faults = parse("kill:rank=1,step=9 raise:rank=2,step=0 raise:rank=0,step=10")
    assert [idle(faults, *size) for size in ((3, 11), (2, 11), (3, 10))] == [None, faults[1], faults[2]]


@pytest.mark.parametrize("text", ["none", ""])
def test_no_faults(text):
    assert option(text) == []


def test_exit_codes_in_words():
    assert [in_words(code) for code in (0, 5, -9)] == ["finished", "ended with an error", "killed by SIGKILL"]


def test_a_fault_strikes_its_own_rank_once_even_if_the_step_is_run_again(monkeypatch):
    struck = []
    monkeypatch.setitem(fault_schedule.STRIKES, "raise", lambda: struck.append("raise"))
    faults = Faults(parse("raise:rank=1,step=5 raise:rank=0,step=6"), initial_rank=1)
    for step in [3, 4, 5, 4, 5, 6]:
        faults.strike(step)
    assert struck == ["raise"]


def test_two_faults_at_one_step_strike_in_two_runs():
    faults = Faults(parse("raise:rank=0,step=5 raise:rank=0,step=5"), initial_rank=0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="scheduled"):
            faults.strike(5)
    faults.strike(5)


ENDS = {"kill": -signal.SIGKILL, "term": -signal.SIGTERM, "segv": -signal.SIGSEGV, "exit": 5, "sysexit": 6, "raise": 1}
STRIKE = "import fault_schedule; print('here', flush=True); fault_schedule.STRIKES['{kind}']()"


@pytest.mark.parametrize("kind", STRIKES)
def test_what_becomes_of_a_process(kind):
    examples = str(Path(fault_schedule.__file__).parent)
    command = [sys.executable, "-c", STRIKE.format(kind=kind)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": examples}, **pipes) as process:
        try:
            assert process.stdout.readline() == b"here\n"
            if kind in ENDS:
                assert process.wait() == ENDS[kind]
            elif kind == "stop":
                assert os.waitid(os.P_PID, process.pid, os.WSTOPPED).si_status == signal.SIGSTOP
            else:  # for ever
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.3)
        finally:
            process.kill()
