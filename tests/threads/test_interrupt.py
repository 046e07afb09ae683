"""The main thread is interrupted wherever it is inside the function, and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import itertools
import logging
import math
import multiprocessing.process
import os
import queue
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Pipe
from multiprocessing.heap import Arena
from multiprocessing.managers import SyncManager
from multiprocessing.pool import Pool
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import SemLock
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import _functional_collectives as functional
from torch.multiprocessing import reductions

from inprocess.exception import InternalError, OptionError, RankShouldRestart, RestartAbort, RestartError
from inprocess.interrupt import frames, judging, signals
from inprocess.interrupt import gate as gate_module
from inprocess.interrupt.gate import (
    IMPORT_PATIENCE,
    LOSS_PATIENCE,
    PATIENCE,
    START_PATIENCE,
    Gate,
    Interrupted,
    Outcome,
    Raised,
    Returned,
)
from inprocess.interrupt.signals import Interrupter
from inprocess.system.errors import PACKAGE

Go = Callable[[], None]  # what the function calls when it may be interrupted

FORK, SPAWN = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
CEILING = 5.0  # seconds; a run that takes longer waited for something that should have been interrupted


@pytest.fixture
def eager() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


class Monitor(threading.Thread):
    """Interrupts a gate as soon as `go` is set."""

    def __init__(self, gate: Gate, retry_after: float = 1.0, release: Callable[[], object] = lambda: None) -> None:
        super().__init__(name="monitor")
        self.gate, self.retry_after, self.release, self.go = gate, retry_after, release, threading.Event()
        self.asked_at = math.inf

    def run(self) -> None:
        self.go.wait()
        self.asked_at = time.monotonic()
        self.gate.close_for_abort()
        self.gate.interrupt_until_left(self.retry_after, self.release)


def run_interrupted(
    gate: Gate,
    fn: Callable[[Go], object],
    retry_after: float = 1.0,
    show: bool = True,
    release: Callable[[], object] = lambda: None,
) -> Outcome:
    """Run ``fn(go)``, interrupting it when it calls ``go()``; returns only after the monitor has ended, too."""
    monitor = Monitor(gate, retry_after, release)
    monitor.start()
    try:
        outcome = gate.run(fn, (monitor.go.set,))
        waited = time.monotonic() - monitor.asked_at
    finally:
        monitor.go.set()
        monitor.join()
    assert waited < CEILING
    if show:
        print(f"left after {waited * 1e3:.2f} ms")
    return outcome


def spin() -> None:
    while True:
        pass


def sleep_in_bits(go: Go) -> None:
    go()
    while True:
        time.sleep(0.001)


def wait_for_lock(go: Go) -> None:
    lock = threading.Lock()
    lock.acquire()
    go()
    lock.acquire()


def wait_for_socket(go: Go) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        go()
        ours.recv(1)


def wait_for_select(go: Go) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        go()
        select.select([ours], [], [])


def wait_for_process(go: Go) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as process:
        try:
            go()
            process.wait()
        finally:
            process.kill()


def wait_for_pipe(go: Go) -> None:
    reading, writing = os.pipe()
    try:
        go()
        os.read(reading, 1)
    finally:
        os.close(reading)
        os.close(writing)


def wait_in_asyncio(go: Go) -> None:
    async def main() -> None:
        go()
        await asyncio.sleep(60)

    asyncio.run(main())


def iterate_generator(go: Go) -> None:
    def generator() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            time.sleep(0)

    go()
    for _ in generator():
        pass


def spin_in_context_managers(go: Go) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(contextlib.nullcontext())
        go()
        try:
            try:
                spin()
            finally:
                stack.callback(spin_a_little)
        finally:
            stack.callback(spin_a_little)


def spin_a_while() -> None:
    """For a function that swallows everything, the test's timeout included."""
    end = time.monotonic() + CEILING
    while time.monotonic() < end:
        pass


def spin_a_little() -> None:
    for _ in range(100):
        pass


def then(fn: Callable[[], object]) -> Callable[[Go], None]:
    def go_then(go: Go) -> None:
        go()
        fn()

    return go_then


BLOCKED = {
    "running": then(spin),
    "short sleeps": sleep_in_bits,
    "time.sleep": then(lambda: time.sleep(60)),
    "lock.acquire": wait_for_lock,
    "queue.get": then(lambda: queue.Queue[int]().get()),
    "SimpleQueue.get": then(lambda: queue.SimpleQueue[int]().get()),
    "Event.wait": then(lambda: threading.Event().wait(60)),
    "socket.recv": wait_for_socket,
    "select": wait_for_select,
    "process.wait": wait_for_process,
    "os.read": wait_for_pipe,
    "asyncio": wait_in_asyncio,
    "generator": iterate_generator,
    "context managers": spin_in_context_managers,
}


@pytest.mark.parametrize("name", BLOCKED)
def test_blocked_function_is_left(gate: Gate, name: str) -> None:
    assert run_interrupted(gate, BLOCKED[name]) == Interrupted()


def test_builtin_called_directly_is_left(gate: Gate) -> None:
    monitor = Monitor(gate)
    monitor.start()
    monitor.go.set()
    assert gate.run(time.sleep, (60,)) == Interrupted()
    monitor.join()


def test_result_and_exception_pass_unchanged(interrupter: Interrupter) -> None:
    assert interrupter.new_gate().run(lambda a, *, b: a + b, (1,), {"b": 2}) == Returned(3)
    error = ValueError("mine")

    def fail() -> None:
        raise error

    outcome = interrupter.new_gate().run(fail)
    assert isinstance(outcome, Raised)
    assert outcome.exception is error


def test_interruption_before_the_function_starts_skips_it(gate: Gate) -> None:
    gate.close_for_abort()
    assert gate.run(pytest.fail) == Interrupted()


def test_interrupting_without_closing_first_is_refused(gate: Gate) -> None:
    with pytest.raises(InternalError, match="close_for_abort"):
        gate.interrupt_until_left()


# --- what the function makes of the interruption ------------------------------------------------------------------


def answer_with(error: BaseException) -> Callable[[Go], None]:
    def fn(go: Go) -> None:
        go()
        try:
            spin()
        except RankShouldRestart as interruption:
            raise error from interruption

    return fn


def test_another_exception_in_answer_counts_as_interrupted(gate: Gate) -> None:
    assert run_interrupted(gate, answer_with(ValueError("torn"))) == Interrupted("ValueError: torn")


def test_exit_in_answer_counts_as_interrupted(gate: Gate) -> None:
    assert run_interrupted(gate, answer_with(SystemExit(1))) == Interrupted("SystemExit: 1")


@pytest.mark.parametrize("error", [RestartAbort("enough"), KeyboardInterrupt()])
def test_abort_and_ctrl_c_stay_the_users(gate: Gate, error: BaseException) -> None:
    outcome = run_interrupted(gate, answer_with(error))
    assert isinstance(outcome, Raised)
    assert outcome.exception is error


@pytest.mark.parametrize("error", [RestartAbort("enough"), KeyboardInterrupt(), SystemExit(3)])
def test_leaving_that_is_hit_on_its_way_out_stays_the_users(gate: Gate, error: BaseException) -> None:
    def fn(go: Go) -> None:
        try:
            raise error
        finally:
            go()
            spin()

    outcome = run_interrupted(gate, fn)
    assert isinstance(outcome, Raised)
    assert outcome.exception is error


@pytest.mark.parametrize("error", [RestartAbort("enough"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exit_that_the_caller_handles_is_none_of_the_function(gate: Gate, error: BaseException) -> None:
    """As in a loop of the program's that tries again after its first job has ended."""
    try:
        raise error
    except BaseException:
        assert run_interrupted(gate, then(spin)) == Interrupted()


def test_an_exit_below_an_interruption_that_the_caller_handles_stays_the_users(gate: Gate) -> None:
    def fn() -> None:
        gate.close_for_abort()
        sys.exit(3)

    try:
        raise RankShouldRestart
    except RankShouldRestart:
        outcome = gate.run(fn)
    assert isinstance(outcome, Raised) and isinstance(outcome.exception, SystemExit)


def exit_in_answer(store: Any, meanwhile: Callable[[], object]) -> None:
    """As where another rank has failed: ``except Exception: sys.exit(1)``."""
    held = Held()
    try:
        store.wait(["key"], timedelta(milliseconds=1))
    except Exception as error:
        error.held = held  # type: ignore[attr-defined]
        meanwhile()
        sys.exit(1)


class Held:
    """What a frame holds."""


def test_exit_in_answer_to_an_error_of_a_collective_is_that_error(gate: Gate) -> None:
    """This rank has not yet heard of the interruption."""
    outcome = gate.run(exit_in_answer, (HashStore(), lambda: None))
    assert isinstance(outcome, Raised)
    assert isinstance(outcome.exception, RuntimeError)
    assert outcome.instead == "SystemExit: 1"


def test_exit_in_answer_to_an_error_of_a_collective_counts_as_interrupted(gate: Gate) -> None:
    outcome = gate.run(exit_in_answer, (HashStore(), gate.close_for_abort))
    assert outcome == Interrupted("SystemExit: 1")


@pytest.mark.parametrize("aborts", [True, False])
def test_exit_in_answer_to_a_group_that_an_abort_has_taken_away(gate: Gate, aborts: bool) -> None:
    """torch's check of its argument fails. Without an abort that is the program's own error."""

    def fn() -> None:
        if aborts:
            gate.close_for_abort()
        try:
            dist.destroy_process_group()
        except AssertionError:
            sys.exit(1)

    outcome = gate.run(fn)
    if aborts:
        assert outcome == Interrupted("SystemExit: 1")
    else:
        assert isinstance(outcome, Raised) and isinstance(outcome.exception, SystemExit)


def test_exit_in_answer_to_an_error_of_a_collective_is_hit_on_its_way_out(gate: Gate) -> None:
    def fn(go: Go) -> None:
        try:
            exit_in_answer(HashStore(), lambda: None)
        finally:
            go()
            spin()

    assert run_interrupted(gate, fn) == Interrupted("SystemExit: 1")


@pytest.mark.parametrize("closed", [False, True])
def test_exit_in_answer_to_an_error_that_the_caller_handles(gate: Gate, closed: bool) -> None:
    def fn() -> None:
        if closed:
            gate.close_for_abort()
        sys.exit(1)

    try:
        HashStore().wait(["key"], timedelta(milliseconds=1))
    except RuntimeError:
        outcome = gate.run(fn)
    assert isinstance(outcome, Raised) and isinstance(outcome.exception, SystemExit)


def test_exit_of_its_own_stays_the_users(gate: Gate) -> None:
    gate_closed = threading.Event()

    def fn(go: Go) -> None:
        go()
        gate_closed.wait()
        sys.exit(3)

    def close() -> None:
        gate.close_for_abort()
        gate_closed.set()

    thread = threading.Thread(target=close)
    outcome = gate.run(fn, (thread.start,))
    thread.join()
    assert isinstance(outcome, Raised)
    assert isinstance(outcome.exception, SystemExit)


def test_exception_that_cannot_be_printed(gate: Gate) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError

    shown = "Unprintable: (its __str__ raises ValueError)"
    assert run_interrupted(gate, answer_with(Unprintable())) == Interrupted(shown)


def test_return_in_answer_is_a_return(gate: Gate) -> None:
    def fn(go: Go) -> str:
        go()
        with contextlib.suppress(RankShouldRestart):
            spin()
        return "late"

    assert run_interrupted(gate, fn) == Returned("late")


def test_finally_blocks_have_time(gate: Gate) -> None:
    done = []

    def fn(go: Go) -> None:
        go()
        try:
            spin()
        finally:
            for number in range(1000):
                time.sleep(0)
                done.append(number)

    assert run_interrupted(gate, fn) == Interrupted()
    assert len(done) == 1000


def test_nothing_is_released_while_the_function_unwinds(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the interpreter lock from what frees a model, for 1 ms each time."""
    monkeypatch.setattr(gate_module, "FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(gate_module, "UNWINDING_S", CEILING)
    released: list[None] = []
    before: list[int] = []
    raised, wait = threading.Event(), gate.left.wait

    def note(timeout: float = -1) -> bool:
        if timeout > gate_module.FIRST_PAUSE_S:
            raised.set()
        return wait(timeout)

    monkeypatch.setattr(gate.left, "wait", note)

    def fn(go: Go) -> None:
        try:
            go()
            spin()
        finally:
            before.append(len(released))
            assert raised.wait(CEILING)  # the monitor has seen that the handler raised, and waits once more

    assert run_interrupted(gate, fn, retry_after=CEILING, release=lambda: released.append(None)) == Interrupted()
    assert before == [len(released)]


def test_a_clean_up_that_waits_is_released(gate: Gate) -> None:
    lock = threading.Lock()

    def fn(go: Go) -> None:
        try:
            go()
            spin()
        finally:
            lock.acquire()
            lock.acquire()  # until it is released

    assert (
        run_interrupted(gate, fn, retry_after=60.0, release=lambda: lock.locked() and lock.release()) == Interrupted()
    )


def test_ctrl_c_passes_as_the_users(gate: Gate) -> None:
    outcome = gate.run(lambda: signal.raise_signal(signal.SIGINT))
    assert isinstance(outcome, Raised)
    assert isinstance(outcome.exception, KeyboardInterrupt)


def test_own_restart_exception_without_interruption_is_an_exception(gate: Gate) -> None:
    def fn() -> None:
        raise RankShouldRestart

    assert isinstance(gate.run(fn), Raised)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="what is being handled cannot be set")
@pytest.mark.parametrize("outcome", ["returns", "raises"])
def test_what_stays_marked_as_handled_is_taken_back(gate: Gate, outcome: str) -> None:
    """As from Python 3.12 on, where a signal handler raises at the end of a round inside `finally`."""
    error = KeyError()

    def fn() -> None:
        ctypes.pythonapi.PyErr_SetHandledException(ctypes.py_object(SystemExit()))
        if outcome == "raises":
            raise error

    try:
        raise ValueError
    except ValueError as outer:
        result = gate.run(fn)
        assert sys.exc_info()[1] is outer
    assert sys.exc_info()[1] is None
    assert isinstance(result, Returned if outcome == "returns" else Raised)


def lock_in_condition() -> tuple[Any, Any]:
    return threading.Condition(lock := threading.Lock()), lock


def shared_lock() -> tuple[Any, Any]:
    lock = SPAWN.Lock()
    return lock, lock


def lock_in_shared_condition() -> tuple[Any, Any]:
    return SPAWN.Condition(lock := SPAWN.Lock()), lock


def lock_of_shared_value() -> tuple[Any, Any]:
    return Synchronized(ctypes.c_int(0), lock := SPAWN.Lock()), lock


GUARDS = [lock_in_condition, shared_lock, lock_in_shared_condition, lock_of_shared_value]
LINES = [*itertools.product(GUARDS, ["__enter__", "__exit__"]), (lock_of_shared_value, "value")]


def step_in(guard: Any) -> Callable[[Go], None]:
    """Its last step calls nothing, so signals are handled as the lock is given back."""

    def fn(go: Go) -> None:
        large = 1 << 1_000_000
        go()
        while True:
            with guard:
                large * large

    return fn


@pytest.mark.parametrize("make", GUARDS, ids=lambda of: of.__name__)
def test_a_loop_that_is_always_found_as_it_gives_a_lock_back_is_left(
    gate: Gate, make: Callable[[], tuple[Any, Any]]
) -> None:
    assert run_interrupted(gate, step_in(make()[0])) == Interrupted()


@pytest.mark.parametrize(("make", "which"), LINES, ids=lambda of: getattr(of, "__name__", of))
def test_lock_that_is_just_taken_or_given_back(
    gate: Gate, interrupter: Interrupter, make: Callable[[], tuple[Any, Any]], which: str
) -> None:
    """At each of its instructions. It would stay held, and a thread that is starting would never come up.

    A lock that is just given back is not interrupted however long a loop takes it again and again.
    """
    places = []
    guard, lock = make()
    found = getattr(type(guard), which)
    code = getattr(found, "fget", found).__code__

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes = frame.f_code is code
        if event == "opcode":
            places.append(frame.f_lasti)
            gate._ask(time.monotonic())
            if which == "__exit__":
                gate._spared_since[PATIENCE] = time.monotonic() - 2 * PATIENCE
            gate.atomic.closed = gate.interrupting = gate._armed = True
            interrupter._handle(interrupter.signum, frame)
        return trace

    def fn() -> None:
        sys.settrace(trace)
        if which == "value":
            assert guard.value == 0
        else:
            with guard:
                pass
        sys.settrace(None)
        signal.raise_signal(interrupter.signum)

    before = sys.gettrace()
    try:
        outcome = gate.run(fn)
    finally:
        sys.settrace(before)
    if not places and sys.version_info[:2] == (3, 12):
        pytest.skip("Python 3.12.1 does not report the instructions of this function")
    assert outcome == Interrupted()
    assert len(places) > 3
    assert lock.acquire(False)
    assert "in fn" in gate.raised_where


def test_what_is_handled_is_set_only_where_python_has_a_way_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 3.11 it has none, and needs none."""
    told: list[object] = []
    ways = SimpleNamespace()
    monkeypatch.setattr(judging, "ctypes", SimpleNamespace(pythonapi=ways, py_object=lambda exception: exception))
    judging.set_handled(None)
    ways.PyErr_SetHandledException = told.append
    judging.set_handled(error := ValueError())
    assert told == [error]


def test_a_generator_that_caught_an_earlier_error_goes_on() -> None:
    """Only what the function was left through is emptied."""
    caught: list[Exception] = []

    def numbers() -> Iterator[int]:
        try:
            raise ValueError
        except ValueError as error:
            caught.append(error)
        yield 1
        yield 2

    it = numbers()
    assert next(it) == 1
    with pytest.raises(KeyError) as left:
        raise KeyError from caught[0]
    judging.let_go(left.value, None)
    assert next(it) == 2


def test_older_function_on_the_stack_is_not_the_one_to_be_left(interrupter: Interrupter) -> None:
    """A newer gate that has not been entered yet, or has been left, is asked about."""

    def outer() -> str:
        inner = interrupter.new_gate()
        inner.atomic.closed = inner.interrupting = inner._armed = True
        signal.raise_signal(interrupter.signum)
        assert inner.run(pytest.fail) == Interrupted()
        signal.raise_signal(interrupter.signum)
        return "not left"

    assert interrupter.new_gate().run(outer) == Returned("not left")


# --- swallowed ----------------------------------------------------------------------------------------------------


def test_swallowed_interruption_is_raised_again_and_its_place_logged(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    times = []

    def swallow() -> None:
        try:
            spin_a_while()
        except BaseException:
            times.append(time.monotonic())

    def fn(go: Go) -> None:
        go()
        for _ in range(3):
            swallow()
        spin_a_while()

    gate.who = "rank 1 (initial rank 3)"
    with caplog.at_level(logging.WARNING, "inprocess.interrupt.signals"):
        assert run_interrupted(gate, fn, retry_after=0.02) == Interrupted()
    assert len(times) == 3
    assert gate._interrupter.swallowed == {False: 3, True: 0}
    (line,) = (record.getMessage() for record in caplog.records if "was swallowed" in record.getMessage())
    assert line.startswith("rank 1 (initial rank 3): the interruption raised at ")
    assert re.search(r"test_interrupt\.py:\d+ in spin_a_while, called from .*test_interrupt\.py:\d+ in swallow, ", line)
    assert "in fn was swallowed (`except BaseException`, " in line, "no farther than the function"
    assert "(1 so far in this call); the main thread is at " in line
    assert "Let RankShouldRestart pass: " in line


def swallow_twice(go: Go) -> None:
    go()
    for _ in range(2):
        with contextlib.suppress(BaseException):
            spin_a_while()
    spin_a_while()


def test_swallowed_interruptions_are_reported_once_and_then_rarely(
    interrupter: Interrupter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over the iterations of a call."""
    for ahead, reports in ((0.0, 1), (0.0, 1), (signals.SWALLOWED_EVERY, 2), (0.0, 2)):
        for dropped in interrupter._report_at:
            interrupter._report_at[dropped] -= ahead
        gate = interrupter.new_gate()
        assert run_interrupted(gate, swallow_twice, retry_after=0.02) == Interrupted()
        assert len([record for record in caplog.records if "was swallowed" in record.getMessage()]) == reports
    assert interrupter.swallowed[False] == 8
    assert "(5 so far in this call)" in caplog.text


def test_what_python_dropped_is_reported_beside_what_was_swallowed(
    interrupter: Interrupter, caplog: pytest.LogCaptureFixture
) -> None:
    """The first says little about the second, which the user is to mend."""
    for dropped in (True, True, False, True, False):
        interrupter.report_swallowed("this rank", "a place", dropped)
    assert [("dropped by Python" in line, "Let RankShouldRestart pass" in line) for line in caplog.messages] == [
        (True, False),
        (False, True),
    ]
    assert all("raising it again" in line and line.startswith("this rank: ") for line in caplog.messages)


def test_dropped_by_a_destructor_is_raised_again_at_once(
    gate: Gate, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = []

    class Slow:
        def __del__(self) -> None:
            begun.append(time.monotonic())
            spin()

    def fn(go: Go) -> None:
        thing = Slow()
        go()
        del thing
        spin()

    hook = sys.unraisablehook
    # 60 s: only noticing the drop can end this in time
    assert run_interrupted(gate, fn, retry_after=60) == Interrupted()
    assert begun
    assert "dropped by Python" in caplog.text
    assert "Exception ignored" not in capsys.readouterr().err
    assert sys.unraisablehook is hook


def test_interruption_on_top_of_the_hook_waits(gate: Gate, interrupter: Interrupter) -> None:
    """What is raised in the hook itself is dropped as well, and nobody is told."""
    raised = []

    def previous(unraisable: object) -> None:
        gate.atomic.closed = gate.interrupting = gate._armed = True
        try:
            signal.raise_signal(interrupter.signum)
        except RankShouldRestart:
            raised.append(True)

    def fn() -> None:
        gate._note_dropped(previous, None)  # type: ignore[arg-type]
        signal.raise_signal(interrupter.signum)

    assert gate.run(fn) == Interrupted()
    assert not raised


def test_other_unraisable_exceptions_reach_the_hook_that_was_there(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: seen.append(info.exc_type))

    class Broken:
        def __del__(self) -> None:
            raise ValueError

    def fn(go: Go) -> None:
        go()
        try:
            spin()
        finally:
            Broken()

    assert run_interrupted(gate, fn) == Interrupted()
    assert seen == [ValueError]


def test_a_hook_that_the_program_installs_meanwhile_stays(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # put back after the test

    def theirs(info: object) -> None:
        pass

    def fn(go: Go) -> None:
        go()
        try:
            spin()
        finally:
            sys.unraisablehook = theirs

    assert run_interrupted(gate, fn) == Interrupted()
    assert sys.unraisablehook is theirs


def test_a_place_is_the_users_unless_there_is_none() -> None:
    names: dict[str, Any] = {"places": frames.places, "here": sys._getframe}
    exec(compile("def inner():\n    return places(here())\n", f"{PACKAGE}inner.py", "exec"), names)
    inner = names["inner"]
    assert inner().startswith(f"{__file__}:")
    assert PACKAGE not in inner()
    alone: Any = SimpleNamespace(f_code=inner.__code__, f_lineno=2, f_back=None)
    assert frames.places(alone) == f"{PACKAGE}inner.py:2 in inner"
    assert frames.places(None) == "an unknown place"


# --- the signal ---------------------------------------------------------------------------------------------------


def test_blocked_signal(gate: Gate, interrupter: Interrupter) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {interrupter.signum})
    try:
        assert run_interrupted(gate, then(spin)) == Interrupted()
    finally:
        interrupter.restore()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {interrupter.signum})


def test_no_place_in_the_queue_of_signals(gate: Gate) -> None:
    """All processes of a user share that queue, and a real-time signal without a place in it is refused."""
    limits = resource.getrlimit(resource.RLIMIT_SIGPENDING)
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, limits[1]))
    try:
        assert run_interrupted(gate, BLOCKED["time.sleep"]) == Interrupted()
    finally:
        resource.setrlimit(resource.RLIMIT_SIGPENDING, limits)


def test_handler_replaced_by_the_program(gate: Gate, interrupter: Interrupter) -> None:
    calls = []

    def theirs(signum: int, frame: object) -> None:
        calls.append(signum)

    def fn(go: Go) -> None:
        signal.signal(interrupter.signum, theirs)
        go()
        spin()

    try:
        assert run_interrupted(gate, fn) == Interrupted()
        assert set(calls) <= {interrupter.signum}  # from the second signal on: it may be in a system call
        interrupter.restore()
        assert signal.getsignal(interrupter.signum) is theirs
    finally:
        signal.signal(interrupter.signum, signal.SIG_DFL)


def test_handler_replaced_by_a_program_that_then_sleeps(gate: Gate, interrupter: Interrupter) -> None:
    """A pending call does not run inside a system call; the program's handler makes the main thread run bytecode."""
    calls = []

    def fn(go: Go) -> None:
        signal.signal(interrupter.signum, lambda signum, frame: calls.append(signum))
        go()
        time.sleep(60)

    try:
        assert run_interrupted(gate, fn) == Interrupted()
    finally:
        interrupter.restore()
        signal.signal(interrupter.signum, signal.SIG_DFL)
    assert set(calls) <= {interrupter.signum}


def test_a_handler_that_the_program_has_put_in_place_of_ours_stays(interrupter: Interrupter) -> None:
    def theirs(signum: int, frame: FrameType | None) -> None:
        pass

    signal.signal(interrupter.signum, theirs)
    try:
        interrupter.restore()
        assert signal.getsignal(interrupter.signum) is theirs
    finally:
        signal.signal(interrupter.signum, signal.SIG_DFL)


def test_unanswered_interruption_is_reported(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    reported = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reported.set()

    def outside() -> None:  # as if the thread were in C code: the handler does not find the function on the stack
        with caplog.at_level(logging.WARNING, "inprocess.interrupt.signals"):
            monitor.start()
            monitor.go.set()
            assert reported.wait(CEILING)

    handler = Watch()
    monitor = Monitor(gate, retry_after=0.01)
    logging.getLogger("inprocess.interrupt.signals").addHandler(handler)
    try:
        outside()
    finally:
        logging.getLogger("inprocess.interrupt.signals").removeHandler(handler)
        gate.left.set()
        monitor.join()
    assert "has not answered" in caplog.text
    assert "in outside" in caplog.text


def test_free_signal_is_chosen_and_restored() -> None:
    first = Interrupter()
    assert first.signum == signal.SIGRTMIN + 5
    first.install()
    second = Interrupter()
    assert second.signum == signal.SIGRTMIN + 6
    first.restore()
    first.restore()
    assert signal.getsignal(first.signum) is signal.SIG_DFL


def test_a_signal_that_c_code_handles_is_not_free() -> None:
    faulthandler.register(signal.SIGRTMIN + 5)
    try:
        assert Interrupter().signum == signal.SIGRTMIN + 6
        with pytest.raises(OptionError, match="code outside Python handles it"):
            Interrupter(signal.SIGRTMIN + 5)
    finally:
        faulthandler.unregister(signal.SIGRTMIN + 5)


def test_shared_signal_goes_on_to_the_previous_handler() -> None:
    seen = []

    def theirs(signum: int, frame: object) -> None:
        seen.append(signum)

    previous = signal.signal(signal.SIGUSR2, theirs)
    try:
        interrupter = Interrupter(signal.SIGUSR2)
        interrupter.install()
        signal.raise_signal(signal.SIGUSR2)
        interrupter.nudge()  # is not theirs
        assert run_interrupted(interrupter.new_gate(), then(spin)) == Interrupted()
        interrupter.restore()
        assert signal.getsignal(signal.SIGUSR2) is theirs
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert seen == [signal.SIGUSR2]


@pytest.mark.parametrize("signum", [signal.SIGKILL, 0, 1000])
def test_unusable_signal(signum: int) -> None:
    with pytest.raises(OptionError, match=f"interrupt_signal={int(signum)}"):
        Interrupter(signum)


def test_install_outside_the_main_thread() -> None:
    errors: list[BaseException] = []

    def install() -> None:
        try:
            Interrupter().install()
        except RestartError as error:
            errors.append(error)

    thread = threading.Thread(target=install, name="worker")
    thread.start()
    thread.join()
    assert "must be called in the main thread, not in thread 'worker'" in str(errors[0])


def test_nothing_is_sent_after_restore(interrupter: Interrupter) -> None:
    gate = interrupter.new_gate()
    gate.close_for_abort()
    interrupter.restore()
    interrupter.send(again=True)  # the default handler would end this process
    signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_signal_on_its_way_during_restore_is_drained() -> None:
    interrupter = Interrupter()
    interrupter.install()
    signal.pthread_sigmask(signal.SIG_BLOCK, {interrupter.signum})
    interrupter.send(again=False)
    assert interrupter.signum in signal.sigpending()
    interrupter.restore()
    assert interrupter.signum not in signal.sigpending()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {interrupter.signum})


def test_a_signal_that_is_no_interruption_does_nothing(interrupter: Interrupter) -> None:
    signal.raise_signal(interrupter.signum)


def test_a_handler_that_should_be_put_back_after_the_end_is_not(interrupter: Interrupter) -> None:
    """Python may run a pending call late."""
    interrupter.restore()
    interrupter._reinstall()
    assert signal.getsignal(interrupter.signum) is signal.SIG_DFL


def test_no_free_signal() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda signum: print)
        with pytest.raises(OptionError, match="interrupt_signal=None finds no free signal"):
            Interrupter()


def test_one_pending_call_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python runs them late when they pile up; one that Python has no place for is tried again."""
    answers = [-1, 0]
    monkeypatch.setattr(ctypes.pythonapi, "Py_AddPendingCall", lambda *_: answers.pop(0), raising=False)
    done: list[int] = []
    for number in range(3):
        signals._in_main_thread(partial(done.append, number))
    assert not answers
    signals._run_pending(None)
    assert done == [1]


# --- where it is not raised ---------------------------------------------------------------------------------------


def ask(gate: Gate, now: float | None = None) -> None:
    """As the monitor thread does, without sending; the function calls it, then raises the signal by itself."""
    gate.close_for_abort()
    gate._ask(time.monotonic() if now is None else now)
    gate._armed = gate.interrupting = True


def test_only_its_own_gate_interrupts_a_function(interrupter: Interrupter) -> None:
    def fn() -> str:
        ask(interrupter.new_gate())
        signal.raise_signal(interrupter.signum)
        return "whole"

    assert interrupter.new_gate().run(fn) == Returned("whole")


def test_the_lines_of_atomic_are_not_interrupted(gate: Gate, interrupter: Interrupter, atomic: Any) -> None:
    """The signal comes when the lock has just been taken, and when it is about to be given back."""
    calls: list[str] = []
    ours = partial(signal.raise_signal, interrupter.signum)
    lock = gate.atomic._lock

    def fn() -> str:
        gate.atomic._lock = SimpleNamespace(acquire=ours, release=ours, _is_owned=lambda: True)
        gate._armed = gate.interrupting = True
        try:
            atomic.__enter__()
            calls.append("entered")
            atomic.__exit__(None, None, None)
            calls.append("left")
        finally:
            gate.atomic._lock = lock
        return "whole"

    assert gate.run(fn) == Returned("whole")
    assert calls == ["entered", "left"]


def test_the_lines_of_the_handler_are_not_interrupted() -> None:
    """One that is at work on a signal of the program's, and has the program's own handler called."""
    calls: list[str] = []

    def theirs(signum: int, frame: FrameType | None) -> None:
        ask(gate)
        interrupter._handle(signum, sys._getframe(1))
        calls.append("on top of ours")
        interrupter._handle(signum, sys._getframe())
        calls.append("too late")

    previous = signal.signal(signal.SIGUSR2, theirs)
    interrupter = Interrupter(signal.SIGUSR2)
    interrupter.install()
    try:
        gate = interrupter.new_gate()
        assert gate.run(signal.raise_signal, (signal.SIGUSR2,)) == Interrupted()
    finally:
        interrupter.restore()
        signal.signal(signal.SIGUSR2, previous)
    assert calls == ["on top of ours"]


def test_a_tensor_is_taken_whole_from_another_process(gate: Gate, interrupter: Interrupter) -> None:
    """Its descriptor is a bare number between two lines."""
    storage = torch.UntypedStorage(64)
    descriptor, size = storage._share_fd_cpu_()
    calls: list[str] = []

    class Sent:
        def detach(self) -> int:
            number = os.dup(descriptor)
            ask(gate)
            signal.raise_signal(interrupter.signum)
            return number

    def fn() -> None:
        reductions.rebuild_storage_fd(torch.UntypedStorage, Sent(), size)
        calls.append("taken")
        signal.raise_signal(interrupter.signum)
        calls.append("too late")

    before = os.listdir("/proc/self/fd")
    assert isinstance(gate.run(fn), Interrupted)
    assert calls == ["taken"]
    assert os.listdir("/proc/self/fd") == before


def test_a_child_that_ended_is_not_lost(gate: Gate, interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else learns of its end, nor closes its descriptors."""
    context, wait = multiprocessing.get_context("fork"), os.waitpid
    before = os.listdir("/proc/self/fd")
    started: list[Any] = []

    def waited(pid: int, flags: int) -> tuple[int, int]:
        found = wait(pid, flags)
        if found[0] == started[0].pid:
            ask(gate)
            signal.raise_signal(interrupter.signum)
        return found

    def fn() -> None:
        started.append(context.Process(target=os.getpid))
        started[0].start()
        started[0].join()
        signal.raise_signal(interrupter.signum)

    monkeypatch.setattr(os, "waitpid", waited)
    assert isinstance(gate.run(fn), Interrupted)
    assert started.pop().exitcode == 0
    gc.collect()
    assert os.listdir("/proc/self/fd") == before


class Freed:
    """Its destructor has two lines."""

    def __init__(self) -> None:
        self.held = [os.dup(0), os.dup(0)]

    def __del__(self) -> None:
        os.close(self.held.pop())
        os.close(self.held.pop())


def ended() -> Any:
    process = multiprocessing.get_context("fork").Process(target=os.getpid)
    process.start()
    process.join()
    return process


def filled() -> Any:
    found = multiprocessing.get_context("fork").Queue()
    found.put("what its thread sends")
    return found


def watched() -> Any:
    found = {1}
    weakref.finalize(found, os.close, os.dup(0))
    return found


def opened() -> Any:
    return subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def strikes(gate: Gate, interrupter: Interrupter, doing: Callable[[], object]) -> int:
    """At how many lines below ``doing``, which are not those of this file, a signal was handled."""
    lines = 0

    def step(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename != __file__:
            lines += 1
            gate._armed = True
            signal.raise_signal(interrupter.signum)
        return step

    with gate._watching_unraisable():
        sys.settrace(step)
        try:
            doing()
        finally:
            sys.settrace(None)
    return lines


@pytest.mark.parametrize("make", [Pipe, ended, filled, watched, Freed])
def test_what_holds_descriptors_is_freed_whole(gate: Gate, interrupter: Interrupter, make: Callable[[], Any]) -> None:
    """Python drops what is raised in a destructor, so nobody would free the rest; `nothing_left` would see it."""
    lines = 0

    def fn() -> None:
        nonlocal lines
        found = [make()]
        ask(gate)
        lines = strikes(gate, interrupter, found.clear)
        signal.raise_signal(interrupter.signum)

    assert isinstance(gate.run(fn), Interrupted)
    assert lines > 1


def test_a_destructor_has_time_of_its_own(
    gate: Gate, interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after something that has more, and took it: a lock of multiprocessing, whose tracker is started first."""
    now, lines, found = 100.0, 0, [Freed()]
    monkeypatch.setattr("inprocess.interrupt.gate.clock", SimpleNamespace(monotonic=lambda: now))

    def fn() -> None:
        nonlocal now, lines
        ask(gate, now)
        strikes(gate, interrupter, lambda: SemLock(0, 1, 1, ctx=FORK))
        now += LOSS_PATIENCE / 2
        lines = strikes(gate, interrupter, found.clear)
        signal.raise_signal(interrupter.signum)

    assert isinstance(gate.run(fn), Interrupted)
    assert lines > 1 and not gate._dropped


def shared() -> SharedMemory:
    memory = SharedMemory(create=True, size=1)
    memory.unlink()
    memory.close()
    return memory


def started(make: Callable[[], Any], start: Callable[[Any], object]) -> Any:
    step = sys.gettrace()
    sys.settrace(None)  # the constructor may be left
    made = make()
    sys.settrace(step)
    start(made)
    return made


#: what is made, where a bare descriptor, child or file passes between two lines
MADE: dict[str, Callable[[], Any]] = {
    "pipe": Pipe,
    "command": opened,
    "file": tempfile.NamedTemporaryFile,
    "folder": tempfile.TemporaryDirectory,
    "memory": shared,
    "arena": lambda: Arena(1, -1),
    "lock": lambda: SemLock(0, 1, 1, ctx=SPAWN),
    "manager": lambda: started(lambda: SyncManager(ctx=FORK), SyncManager.start),
    "pool": lambda: Pool(1, context=FORK),
    "executor": lambda: started(
        lambda: ProcessPoolExecutor(1, FORK),
        ProcessPoolExecutor._start_executor_manager_thread,  # type: ignore[attr-defined]
    ),
}


@pytest.mark.parametrize("what", MADE)
def test_what_would_leave_something_behind_is_made_whole(
    gate: Gate, interrupter: Interrupter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A descriptor, a child or a file that was not yet noted would be nobody's."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # which is found by making a file there
    found: list[Any] = []
    lines = 0

    def fn() -> None:
        nonlocal lines
        gc.collect()  # the destructors of others have less time than some of these
        gc.disable()
        ask(gate)
        lines = strikes(gate, interrupter, lambda: found.append(MADE[what]()))
        signal.raise_signal(interrupter.signum)

    try:
        assert isinstance(gate.run(fn), Interrupted)
    finally:
        gc.enable()
    assert lines > 1 and found
    with found.pop() if hasattr(found[0], "__exit__") else contextlib.nullcontext():
        found.clear()
    assert os.listdir(tmp_path) == []
    resource_tracker._resource_tracker._stop()


@pytest.mark.parametrize(("filename", "patience"), [(logging.__file__, PATIENCE), (functional.__file__, LOSS_PATIENCE)])
@pytest.mark.parametrize("later", [0.0, 5.0])
def test_logging_and_collectives_are_left_alone_for_a_while(
    gate: Gate, interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch, filename: str, patience: float, later: float
) -> None:
    """Also where it was asked for long before, during an import perhaps."""
    now = 100.0
    monkeypatch.setattr("inprocess.interrupt.gate.clock", SimpleNamespace(monotonic=lambda: now))
    inside = compile("raise_signal(signum)", filename, "exec")
    names = {"raise_signal": signal.raise_signal, "signum": interrupter.signum}
    whole: list[float] = []

    def fn() -> None:
        nonlocal now
        ask(gate, now)
        begin = now + later
        for now in (begin, begin + 0.9 * patience, begin + 1.1 * patience):
            exec(inside, dict(names))
            whole.append(now)

    assert gate.run(fn) == Interrupted()
    assert len(whole) == 2


def test_an_import_is_left_alone_for_longer(
    gate: Gate, interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A module imported by half would stay broken."""
    now = 100.0
    monkeypatch.setattr("inprocess.interrupt.gate.clock", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("whole_module", "torn_module"):
        (tmp_path / f"{name}.py").write_text(
            f"import signal\nsignal.raise_signal({interrupter.signum})\nwhole = True\n"
        )
    found: list[bool] = []

    def fn() -> None:
        nonlocal now
        ask(gate, now)
        now += 0.9 * IMPORT_PATIENCE
        found.append(importlib.import_module("whole_module").whole)
        now += 0.2 * IMPORT_PATIENCE
        importlib.import_module("torn_module")

    assert gate.run(fn) == Interrupted()
    assert found == [True]
    assert sys.modules.pop("whole_module").whole
    assert "torn_module" not in sys.modules


def test_the_start_of_a_process_is_left_alone_for_longer(
    gate: Gate, interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs before anybody has noted it."""
    now = 100.0
    monkeypatch.setattr("inprocess.interrupt.gate.clock", SimpleNamespace(monotonic=lambda: now))

    class Process(multiprocessing.process.BaseProcess):
        @staticmethod
        def _Popen(process: object) -> Any:
            signal.raise_signal(interrupter.signum)
            return SimpleNamespace(sentinel=None, poll=lambda: 0)

    started: list[Process] = []

    def fn() -> None:
        nonlocal now
        ask(gate, now)
        for share in (0.9, 0.2):
            now += share * START_PATIENCE
            process = Process()
            process.start()
            started.append(process)

    assert gate.run(fn) == Interrupted()
    assert len(started) == 1
    multiprocessing.process._children.difference_update(started)  # type: ignore[attr-defined]


# --- the window under stress --------------------------------------------------------------------------------------


class Pest(threading.Thread):
    """Signals the main thread without a pause, for whatever gate is current."""

    def __init__(self, interrupter: Interrupter) -> None:
        super().__init__(name="pest")
        self.interrupter, self.over = interrupter, False

    def run(self) -> None:
        while not self.over:
            gate = self.interrupter._gate
            assert gate is not None
            gate.atomic.closed = gate._armed = gate.interrupting = True
            self.interrupter.send(again=True)


def tower(levels: int, value: int) -> int:
    """Some calls and returns, context managers and handlers; a destructor at the end."""
    try:
        with contextlib.suppress(ValueError):
            return tower(levels - 1, value) * value if levels else 1
    finally:
        value += 1
    raise AssertionError


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Nobody's garbage is finalized meanwhile: what is raised in a finalizer is dropped by Python."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_hundred_thousand_windows(interrupter: Interrupter, eager: None, no_garbage: None) -> None:
    """Interrupted at random moments: never an exception outside, none without an interruption, none lost inside."""
    pest = Pest(interrupter)
    skipped = raised = 0
    interrupter.new_gate()
    pest.start()
    deadline = time.monotonic() + 60
    try:
        for number in range(100_000):
            gate = interrupter.new_gate()
            outcome = gate.run(tower, (1, 2))
            if isinstance(outcome, Interrupted):
                assert gate.interrupting
                raised += bool(gate._raised_at)
                skipped += not gate._raised_at
            else:
                assert outcome == Returned(2)
                assert not gate._raised_at  # else the interruption got lost
            assert number % 1000 or time.monotonic() < deadline
    finally:
        pest.over = True
        pest.join()
    print(f"{raised} of 100000 interrupted inside, {skipped} before")
    assert raised


def test_random_moments_around_the_end_of_the_function(interrupter: Interrupter, eager: None) -> None:
    """The real monitor, asked while the function is about to return: it returns or is interrupted, then is quiet.

    A function that returned is longer the next time, one that was interrupted shorter: however long the monitor takes
    to wake up on this machine, most of them end just when it strikes.
    """
    counts = {Returned: 0, Interrupted: 0}
    steps = 100
    for number in range(400):
        gate = interrupter.new_gate()

        def fn(go: Go, number: int = number, steps: int = steps) -> int:
            go()
            for _ in range(steps):
                pass
            return number

        outcome = run_interrupted(gate, fn, show=False)
        assert outcome in (Returned(number), Interrupted())
        counts[type(outcome)] += 1
        steps = steps * 5 // 4 + 1 if isinstance(outcome, Returned) else steps * 4 // 5
    print(counts)
    assert all(counts.values())
