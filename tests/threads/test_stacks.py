"""Stacks from outside: of a process whose interpreter lock is held, and what is left of that afterwards."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inprocess.monitor import stacks
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.stacks import StackMemory, parse, take
from inprocess.system import procfs

HOLDER = """
import ctypes, os, sys, threading
from inprocess.monitor.stacks import StackMemory

def hold():
    print(*StackMemory().open(), flush=True)
    while True:  # the signal ends one pause
        ctypes.PyDLL(None).pause()

def wait():
    threading.Event().wait()

threading.Thread(target=wait, daemon=True).start()
hold()
"""


def test_of_a_process_that_holds_the_interpreter_lock() -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    pidfd = os.pidfd_open(process.pid)
    try:
        assert process.stdout is not None
        signum, fd = map(int, process.stdout.readline().split())
        config = MonitorConfig(
            member=0, roster=(0,), store="", training_pid=process.pid, stacks_signal=signum, stacks_fd=fd
        )
        places = _functions(take(pidfd, config))
        assert ["hold", "<module>"] in places
        assert any("wait" in place for place in places)
        assert process.poll() is None, "it was only looked at"
        # the first time it may still have been in the line that prints
        assert _functions(take(pidfd, config)) == places, "a second time: without what was written the first time"
        assert take(pidfd, dataclasses.replace(config, stacks_fd=1)) == [], "another file has that number"
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        os.close(pidfd)


def _functions(threads: list[dict[str, Any]]) -> list[list[str]]:
    return [[frame.rpartition(" in ")[2] for frame in thread["frames"]] for thread in threads]


def test_of_a_process_that_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    pidfd = os.pidfd_open(process.pid)
    process.wait()
    config = MonitorConfig(member=0, roster=(0,), store="", training_pid=process.pid, stacks_signal=60, stacks_fd=3)
    assert take(pidfd, config) == []
    os.close(pidfd)


def test_nothing_is_left() -> None:
    before, descriptors = procfs.caught_signals(), set(os.listdir("/proc/self/fd"))
    memory = StackMemory()
    signum, fd = memory.open()
    assert procfs.caught_signals() == before | 1 << signum - 1
    assert signal.getsignal(signum) is not None and os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
    memory.close()
    memory.close()
    assert procfs.caught_signals() == before
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_a_signal_that_somebody_handles_is_left_alone() -> None:
    first, second = StackMemory(), StackMemory()  # the first one's handler is C, which `signal` does not know of
    try:
        assert len({first.open()[0], second.open()[0]}) == 2
    finally:
        first.close()
        second.close()


def test_without_a_free_signal_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "caught_signals", lambda: (1 << 64) - 1)
    memory = StackMemory()
    assert memory.open() == (0, -1)
    memory.close()


def test_what_the_handler_writes() -> None:
    text = (
        "Thread 0x00007f1 (most recent call first):\n"
        '  File "/a b/\\udc80.py", line 3 in <lambda>\n'
        "\n"
        "Current thread 0x00007f2 [python] (most recent call first):\n"
        '  File "/u/train.py", line 7 in step\n'
        f'  File "/x{stacks._CALL.removesuffix(":")}", line 99 in _body\n'
        "half a li"
    )
    assert parse(text) == [
        {"name": "0x00007f1", "main": False, "frames": ["/a b/\\udc80.py:3 in <lambda>"]},
        {"name": "0x00007f2", "main": True, "frames": ["/u/train.py:7 in step", f"/x{stacks._CALL}99 in _body"]},
    ]


def test_what_two_requests_at_the_same_time_write() -> None:
    text = 'Thread 0x7 (most recent call first):\n  File "/a.py", line 3 in f\n'
    assert parse(text * 2) == parse(text) and len(parse(text)) == 1


@pytest.mark.parametrize("text", ["", "nothing", '  File "/a.py", line 1 in f\n', "Thread 0x1 (most recent"])
def test_what_is_no_stack(text: str) -> None:
    assert parse(text) == []


def test_the_line_by_which_the_main_thread_is_known() -> None:
    assert Path(stacks.__file__).parents[1].joinpath("call", "loop.py").exists()
