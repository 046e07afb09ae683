"""`atomic` and abort exclude each other (invariant I6), in every thread."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest

from inprocess.call_wrapper import CallWrapper, Controls
from inprocess.exception import RankShouldRestart
from inprocess.interrupt.gate import Gate, Interrupted, Raised, Returned
from inprocess.interrupt.signals import Interrupter

CEILING = 5.0


def test_abort_waits_for_the_section_and_is_told_who_holds_it(
    gate: Gate, atomic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inprocess.interrupt.atomic.REPORT_EVERY", 0.01)
    inside, told = threading.Event(), threading.Event()
    reports: list[tuple[float, str]] = []

    def on_wait(waited: float, holder: str) -> None:
        reports.append((waited, holder))
        told.set()

    def hold() -> None:
        with atomic, atomic:
            inside.set()
            assert told.wait(CEILING)
        order.append("section")

    order: list[str] = []
    thread = threading.Thread(target=hold, name="writer")
    thread.start()
    assert inside.wait(CEILING)
    gate.close_for_abort(on_wait)
    order.append("abort")
    thread.join()
    assert reports[0][0] >= 0.01
    assert "thread 'writer' at " in reports[0][1]
    assert "test_interrupt_atomic.py" in reports[0][1]
    assert "in hold" in reports[0][1]
    assert sorted(order) == ["abort", "section"]


def test_on_wait_may_give_up(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inprocess.interrupt.atomic.REPORT_EVERY", 0.001)

    def give_up(waited: float, holder: str) -> None:
        raise TimeoutError(holder)

    failures = []

    def close() -> None:
        try:
            gate.close_for_abort(give_up)
        except TimeoutError as error:
            failures.append(str(error))

    with gate.atomic:
        thread = threading.Thread(target=close)
        thread.start()
        thread.join()
    assert "thread 'MainThread'" in failures[0]


def test_no_section_begins_after_the_abort_began_in_any_thread(gate: Gate, atomic: Any) -> None:
    gate.close_for_abort()
    refused = []

    def enter() -> None:
        try:
            with atomic:
                pass
        except RankShouldRestart:
            refused.append(threading.current_thread().name)

    thread = threading.Thread(target=enter, name="other")
    thread.start()
    thread.join()
    enter()
    assert refused == ["other", "MainThread"]


def test_held_section_may_nest_while_an_abort_waits(gate: Gate, atomic: Any) -> None:
    thread = threading.Thread(target=gate.close_for_abort)
    with atomic:
        thread.start()
        while not gate.atomic.closed:
            time.sleep(0)
        with atomic:
            pass
    thread.join()


def test_section_is_never_interrupted(interrupter: Interrupter, atomic_of: Callable[[Gate], Any]) -> None:
    """The monitor asks while the function goes in and out of sections: each of them is whole."""
    whole = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for number in range(200):
            gate = interrupter.new_gate()
            atomic = atomic_of(gate)
            count = [0, 0]
            asked = threading.Event()

            def monitor(gate: Gate = gate, asked: threading.Event = asked) -> None:
                asked.wait()
                gate.close_for_abort()
                gate.interrupt_until_left()

            def fn(
                atomic: Any = atomic, count: list[int] = count, asked: threading.Event = asked, number: int = number
            ) -> None:
                while True:
                    with atomic:
                        count[0] += 1
                        if count[0] == 1 + number % 10:
                            asked.set()
                        for _ in range(5):
                            pass
                        count[1] += 1

            thread = threading.Thread(target=monitor)
            thread.start()
            assert gate.run(fn) == Interrupted()
            thread.join()
            whole.append(count[0] == count[1] > 0)
    finally:
        sys.setswitchinterval(interval)
    assert all(whole)


def test_section_that_the_main_thread_waits_for(gate: Gate, atomic: Any) -> None:
    """Another thread holds a section, the main thread waits to begin one: after the abort it may not."""
    inside, release, closing = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        with atomic:
            inside.set()
            release.wait(CEILING)

    def abort() -> None:
        closing.set()
        gate.close_for_abort()
        gate.interrupt_until_left()

    threads = [threading.Thread(target=hold), threading.Thread(target=abort)]

    def fn() -> None:
        threads[0].start()
        inside.wait(CEILING)
        threads[1].start()
        while not gate.atomic.closed:
            time.sleep(0)
        release.set()
        with atomic:
            pytest.fail("a section began after the abort")

    assert gate.run(fn) == Interrupted()
    for thread in threads:
        thread.join()


def test_error_inside_a_section_releases_it(gate: Gate, atomic: Any) -> None:
    def fn() -> None:
        with atomic:
            raise ValueError

    assert isinstance(gate.run(fn), Raised)
    gate.close_for_abort()


def test_what_is_still_held_at_the_end_is_dropped(gate: Gate, atomic: Any) -> None:
    """As after a Ctrl-C that hit the first line of a section; the abort must not wait for it."""

    def sections() -> Generator[None, None, None]:
        with atomic:
            yield

    def fn() -> None:
        gate.atomic._lock.acquire()
        next(suspended)

    suspended = sections()
    assert gate.run(fn) == Returned(None)
    thread = threading.Thread(target=gate.close_for_abort)
    thread.start()
    thread.join(CEILING)
    assert not thread.is_alive()
    suspended.close()


def test_leaving_what_was_never_entered_is_an_error(gate: Gate, atomic: Any) -> None:
    with pytest.raises(RuntimeError):
        atomic.__exit__(None, None, None)


def test_result_keeps_no_frames_alive(interrupter: Interrupter) -> None:
    """A tensor of an interrupted function is freed without the garbage collector."""

    class Tensor:
        freed = 0

        def __del__(self) -> None:
            Tensor.freed += 1

    def fn() -> None:
        tensor = Tensor()
        assert tensor
        raise ValueError

    gc.disable()
    try:
        gate = interrupter.new_gate()
        outcome = gate.run(fn)
        assert isinstance(outcome, Raised)
        del outcome
        assert Tensor.freed == 1
        gate = interrupter.new_gate()

        def answer() -> None:
            gate.atomic.closed = True
            fn()

        assert isinstance(gate.run(answer), Interrupted)
        assert Tensor.freed == 2
    finally:
        gc.enable()


# --- whose section it is --------------------------------------------------------------------------------------------


def begins(gate: Gate) -> bool:
    """Whether another thread can begin a section."""
    begun = []

    def enter() -> None:
        try:
            with gate.atomic:
                begun.append(True)
        except RankShouldRestart:
            pass

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return bool(begun)


@pytest.mark.parametrize("close", ["before", "after"])
def test_what_was_dropped_opens_no_door(gate: Gate, atomic: Any, close: str) -> None:
    """A generator left in a section, closed before or after the abort: no other thread begins one after that."""

    def sections() -> Generator[None, None, None]:
        with atomic:
            yield

    suspended = sections()
    assert gate.run(lambda: next(suspended)) == Returned(None)
    assert begins(gate)
    if close == "before":
        suspended.close()
    gate.close_for_abort()
    assert not begins(gate)
    suspended.close()
    assert not begins(gate)


def test_leaving_the_section_of_another_thread_is_an_error(gate: Gate, atomic: Any) -> None:
    with pytest.raises(RuntimeError, match="a thread that is not inside it"):
        atomic.__exit__(None, None, None)
    gate.close_for_abort()
    assert not begins(gate)


def test_a_forked_child_is_free_of_what_others_hold(interrupter: Interrupter) -> None:
    """There is no abort in it, and no thread that could end a section; its own go on."""
    gate = interrupter.new_gate()
    other = threading.Thread(target=gate.atomic.__enter__)
    other.start()
    other.join()
    gate.atomic.closed = gate.interrupting = gate.parking = True
    interrupter.detach()
    assert not (gate.interrupting or gate.parking)
    with gate.atomic:
        assert gate.atomic.depth == 1
        gate.atomic.detach()
        assert gate.atomic.held() and gate.atomic.depth == 1
        interrupter.detach()
    assert not gate.atomic.held()


class LyingLock:
    """A lock with which a signal comes, and another one while its handler looks around, when the thread has it."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._lock = gate, threading.RLock()
        self.acquired = self.released = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(blocking, timeout)
        self.acquired += taken
        if self._gate._armed:
            signal.raise_signal(self._gate._interrupter.signum)
        return taken

    def release(self) -> None:
        self._lock.release()
        self.released += 1

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]


def test_a_signal_on_top_of_a_section_that_begins(gate: Gate, atomic: Any) -> None:
    """Where something else, such as a handler of the program, was called from `__enter__` and is interrupted itself."""
    lock = gate.atomic._lock = LyingLock(gate)
    refused = []

    def fn() -> None:
        gate.atomic.closed = gate.interrupting = gate._armed = True
        try:
            with atomic:
                pass
        except RankShouldRestart as refusal:
            refused.append(str(refusal))
            assert lock.acquired == lock.released == 1
            raise

    assert gate.run(fn) == Interrupted()
    assert "cannot begin" in refused[0]


def test_section_that_outlives_a_hook(call: CallWrapper, interrupter: Interrupter) -> None:
    """A thread begins it in `initialize` and ends it while the function runs: each gate gets what is its own."""
    inside, release = threading.Event(), threading.Event()

    def hold() -> None:
        with call.atomic():
            inside.set()
            assert release.wait(CEILING)

    def initialize() -> None:
        thread.start()
        assert inside.wait(CEILING)

    def fn() -> None:
        with call.atomic():
            release.set()
            thread.join()
        assert not call._board.snapshot().atomic

    thread = threading.Thread(target=hold)
    hook_gate = Controls(call).gate = interrupter.new_gate()
    assert hook_gate.run(initialize) == Returned(None)
    assert call._board.snapshot().atomic
    gate = Controls(call).gate = interrupter.new_gate()
    assert gate.run(fn) == Returned(None)
    for one in (hook_gate, gate):
        one.close_for_abort()
        assert not begins(one)


def test_section_of_a_generator_that_is_closed_in_the_next_iteration(
    call: CallWrapper, interrupter: Interrupter
) -> None:
    """The monitor waits longer for a rank inside a section, so it must not see one that is none."""

    def sections() -> Generator[None, None, None]:
        with call.atomic():
            yield

    suspended = sections()
    gate = Controls(call).gate = interrupter.new_gate()
    assert gate.run(lambda: next(suspended)) == Returned(None)
    call._board.begin(1)
    Controls(call).gate = interrupter.new_gate()
    suspended.close()
    assert not call._board.snapshot().atomic


@pytest.mark.parametrize("answer", ["same", "another"])
def test_an_exception_that_the_program_keeps_keeps_nothing_else(interrupter: Interrupter, answer: str) -> None:
    """Else each restart would leave a process group behind, with its threads and sockets, and a gate of ours."""

    class Tensor:
        freed = 0

        def __del__(self) -> None:
            Tensor.freed += 1

    def inner() -> None:
        tensor = Tensor()
        assert tensor
        raise RankShouldRestart

    def fn(gate: Gate) -> None:
        gate.atomic.closed = True
        del gate
        try:
            inner()
        except BaseException as error:
            kept.append(error)
            if answer == "same":
                raise
        raise ValueError from kept[0]

    kept: list[BaseException] = []
    gate = interrupter.new_gate()
    reference = weakref.ref(gate)
    gc.disable()
    try:
        assert isinstance(gate.run(fn, (gate,)), Interrupted)
        assert Tensor.freed == 1
        interrupter._gate = None
        del gate
        assert reference() is None
    finally:
        gc.enable()
    assert kept


def test_atomic_is_cheap(atomic: Any) -> None:
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(10_000):
            with atomic:
                pass
        best = min(best, (time.perf_counter() - begin) / 10_000)
    print(f"atomic: {best * 1e6:.2f} us")
    assert best < 50e-6  # a ceiling for any machine; the target is 0.6 us


@pytest.mark.parametrize("raises", [False, True])
def test_ctrl_c_as_the_function_is_being_left(interrupter: Interrupter, raises: bool) -> None:
    """The monitor thread waits for that without a limit, and for what is held of `atomic`."""
    number, struck = 1, True
    while struck:
        gate, left_to = interrupter.new_gate(), [number]

        def ctrl_c(frame: Any, event: str, argument: object, left_to: list[int] = left_to) -> None:
            left_to[0] -= event in ("call", "c_return")  # there Python looks for signals
            if left_to[0] == 0:
                raise KeyboardInterrupt

        def leave(gate: Gate = gate, ctrl_c: Any = ctrl_c) -> None:
            gate.atomic._lock.acquire()
            sys.setprofile(ctrl_c)
            if raises:
                raise ValueError("the function's own")

        try:
            gate.run(leave)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        closing = threading.Thread(target=gate.close_for_abort, daemon=True)
        closing.start()
        closing.join(CEILING)
        assert gate.left.is_set() and not closing.is_alive(), f"at call {number}"
        number, struck = number + 1, left_to[0] <= 0
    assert number > 10
