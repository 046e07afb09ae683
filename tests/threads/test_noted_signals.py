"""Signals that are noted: what was there before is kept and called, a forked child has that alone."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from inprocess.system import procfs
from inprocess.system.noted_signals import NotedSignals

NUMBER = signal.SIGUSR1


@pytest.fixture
def got() -> Iterator[list[int]]:
    before = signal.getsignal(NUMBER)
    yield []
    signal.signal(NUMBER, before)


def test_it_is_noted_and_the_handler_before_is_called_and_back(got: list[int]) -> None:
    def users(signum: int, frame: object) -> None:
        got.append(-signum)

    signal.signal(NUMBER, users)
    signals = NotedSignals((NUMBER,), got.append)
    signals.install()
    os.kill(os.getpid(), NUMBER)
    assert got == [NUMBER, -NUMBER]
    assert not signals.takes(NUMBER)
    signals.restore()
    assert signal.getsignal(NUMBER) is users


def test_the_default_is_put_off(got: list[int]) -> None:
    signal.signal(NUMBER, signal.SIG_DFL)
    signals = NotedSignals((NUMBER,), got.append)
    signals.install()
    assert signals.takes(NUMBER)
    os.kill(os.getpid(), NUMBER)
    assert got == [NUMBER]
    signals.restore()
    assert signal.getsignal(NUMBER) is signal.SIG_DFL and not signals.takes(NUMBER)


def test_one_that_is_ignored_stays_ignored(got: list[int]) -> None:
    signal.signal(NUMBER, signal.SIG_IGN)
    signals = NotedSignals((NUMBER,), got.append)
    signals.install()
    os.kill(os.getpid(), NUMBER)
    signals.restore()
    assert got == [] and signal.getsignal(NUMBER) is signal.SIG_IGN


def test_a_handler_that_the_program_installs_later_stays(got: list[int]) -> None:
    def later(signum: int, frame: object) -> None:
        """Of the program."""

    signals = NotedSignals((NUMBER,), got.append)
    signals.install()
    signal.signal(NUMBER, later)
    signals.restore()
    assert signal.getsignal(NUMBER) is later


def test_ctrl_c_of_python_is_no_handler_of_the_program(got: list[int]) -> None:
    """Where SIGINT is noted, it raises nothing."""
    before = signal.getsignal(signal.SIGINT)
    signals = NotedSignals((signal.SIGINT,), got.append)
    signals.install()
    try:
        signal.raise_signal(signal.SIGINT)
        assert got == [signal.SIGINT]
    finally:
        signals.restore()
    assert signal.getsignal(signal.SIGINT) is before


def test_nothing_is_done_in_another_thread(got: list[int]) -> None:
    before = signal.getsignal(NUMBER)
    signals = NotedSignals((NUMBER,), got.append)
    thread = threading.Thread(target=signals.install)
    thread.start()
    thread.join()
    assert signal.getsignal(NUMBER) is before


def test_in_a_process_that_was_forked_it_is_as_it_was(got: list[int]) -> None:
    signal.signal(NUMBER, signal.SIG_DFL)
    signals = NotedSignals((NUMBER,), got.append)
    signals.install()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), NUMBER)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    signals.restore()
    assert os.WTERMSIG(status) == NUMBER and got == []


def test_one_that_c_code_handles_is_back_afterwards(got: list[int], tmp_path: Path) -> None:
    """Python does not know of it: to it, the signal has its default."""
    signal.signal(NUMBER, signal.SIG_DFL)
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(NUMBER, file=file)
        try:
            assert signal.getsignal(NUMBER) is signal.SIG_DFL and procfs.is_handled_outside(NUMBER)
            signals = NotedSignals((NUMBER,), got.append)
            signals.install()
            os.kill(os.getpid(), NUMBER)
            assert got == [NUMBER] and (tmp_path / "stacks").read_text() == ""
            signals.restore()
            os.kill(os.getpid(), NUMBER)
            assert got == [NUMBER] and "most recent call first" in (tmp_path / "stacks").read_text()
        finally:
            faulthandler.unregister(NUMBER)
    assert not procfs.is_handled_outside(NUMBER)
