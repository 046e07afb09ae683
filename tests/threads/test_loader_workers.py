"""torch's handler of SIGCHLD raises in the user's function, and nowhere else."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data._utils import signal_handling

from inprocess.interrupt import loader_workers
from inprocess.interrupt.gate import Raised, Returned
from inprocess.interrupt.signals import Interrupter
from inprocess.system.errors import PACKAGE

CEILING = 5.0
_C: Any = torch._C
#: runs what it is given, in a line of this library
OURS: dict[str, Any] = {}
exec(compile("def ours(go): go()", f"{PACKAGE}made_up.py", "exec"), OURS)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """torch's handler is there; set once it has gone by without raising."""
    found = threading.Event()
    before = signal.signal(signal.SIGCHLD, lambda *_: found.set())
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    signal_handling._set_SIGCHLD_handler()
    yield found
    signal.signal(signal.SIGCHLD, before)


@pytest.fixture
def die(seen: threading.Event) -> Iterator[Callable[[], None]]:
    """A worker of a DataLoader dies, and the main thread handles the signal before this returns."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    _C._set_worker_pids(1, (child.pid,))

    def kill() -> None:
        child.kill()
        end = time.monotonic() + CEILING
        # in short pieces: a signal that comes as a wait begins is handled when it is over
        while not seen.wait(0.01):
            assert time.monotonic() < end

    yield kill
    _C._remove_worker_pids(1)
    assert child.stdin is not None
    child.stdin.close()
    child.kill()
    child.wait()


@pytest.fixture
def calls() -> Iterator[Callable[..., Interrupter]]:
    """A call begins; what it is given happens when an exception has left the function."""
    made: list[Interrupter] = []

    def begin(raised: Callable[[], object] = lambda: None) -> Interrupter:
        made.append(Interrupter(raised=raised))
        made[-1].install()
        return made[-1]

    yield begin
    for each in made:
        each.restore()


def test_it_raises_in_the_function(calls: Callable[..., Interrupter], die: Callable[[], None]) -> None:
    outcome = calls().new_gate().run(die)
    assert isinstance(outcome, Raised) and "DataLoader worker" in str(outcome.exception)


def test_it_raises_nothing_when_the_function_was_left(
    calls: Callable[..., Interrupter], die: Callable[[], None], seen: threading.Event
) -> None:
    def fail() -> None:
        raise KeyError("x")

    outcome = calls(raised=die).new_gate().run(fail)
    assert isinstance(outcome, Raised) and isinstance(outcome.exception, KeyError) and seen.is_set()


def test_it_raises_nothing_in_lines_of_this_library(
    calls: Callable[..., Interrupter], die: Callable[[], None], seen: threading.Event
) -> None:
    assert calls().new_gate().run(OURS["ours"], (die,)) == Returned(None)
    assert seen.is_set()


def test_after_the_call_it_raises_as_ever(calls: Callable[..., Interrupter], die: Callable[[], None]) -> None:
    calls().restore()
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        die()


def test_what_was_not_raised_is_not_raised_later(
    calls: Callable[..., Interrupter], die: Callable[[], None], seen: threading.Event
) -> None:
    call = calls(raised=die)
    call.new_gate().run(int, ("x",))
    assert seen.is_set()
    assert call.new_gate().run(signal.raise_signal, (signal.SIGCHLD,)) == Returned(None)


def test_afterwards_torch_has_its_own_again(calls: Callable[..., Interrupter]) -> None:
    own = signal_handling._error_if_any_worker_fails
    call = calls()
    assert signal_handling._error_if_any_worker_fails is not own
    call.restore()
    assert signal_handling._error_if_any_worker_fails is own


def test_without_torch_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, loader_workers.MODULE)
    deaths = loader_workers.WorkerDeaths()
    deaths.install()
    deaths.restore()
