"""During the abort the main thread stands still, but never so that the abort cannot go on."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, cast

import pytest

from inprocess.exception import StoreLost
from inprocess.interrupt.gate import PARK, Gate, Interrupted, Returned
from inprocess.monitor_thread import MonitorThread
from inprocess.protocol.membership import Membership
from inprocess.store import StoreSpec


class Abort(threading.Thread):
    """Plays the monitor thread: an abort, then the interrupt. ``work`` is the abort."""

    def __init__(self, gate: Gate, work: Callable[[Abort], object]) -> None:
        super().__init__(name="abort")
        self.gate, self.work, self.go = gate, work, threading.Event()
        #: set when the handler is about to wait
        self.parked = threading.Event()
        park = gate.park

        def noticed(frame: FrameType | None) -> None:
            self.parked.set()
            park(frame)

        gate.park = noticed  # type: ignore[method-assign]

    def run(self) -> None:
        self.go.wait()
        self.gate.close_for_abort()
        with self.gate.parked():
            self.work(self)
        self.gate.interrupt_until_left()


def run(gate: Gate, fn: Callable[[Abort], object], work: Callable[[Abort], object]) -> object:
    abort = Abort(gate, work)
    abort.start()
    try:
        return gate.run(fn, (abort,))
    finally:
        abort.go.set()
        abort.join()


def test_a_computing_function_stands_still(gate: Gate) -> None:
    """It counts as fast as it can, yet the count does not change once it is parked."""
    count = 0
    seen: list[int] = []

    def fn(abort: Abort) -> None:
        nonlocal count
        abort.go.set()
        while True:
            count += 1

    def work(abort: Abort) -> None:
        assert abort.parked.wait(10)
        seen.append(count)
        time.sleep(PARK / 5)  # time for it to count on, if it did
        seen.append(count)

    assert isinstance(run(gate, fn, work), Interrupted)
    assert seen[0] == seen[1] <= count


def test_an_abort_that_needs_a_lock_of_the_function_gets_it(gate: Gate) -> None:
    """The function holds the lock when it is parked, and gives it back some time after ``PARK``."""
    lock = threading.Lock()

    def fn(abort: Abort) -> None:
        while True:
            with lock:
                abort.go.set()
                for _ in range(10_000):
                    pass
            time.sleep(0.001)  # a lock is not fair

    def work(abort: Abort) -> None:
        assert abort.parked.wait(10)
        assert lock.acquire(timeout=10)
        lock.release()

    assert isinstance(run(gate, fn, work), Interrupted)


def test_parking_has_an_end(gate: Gate) -> None:
    """The abort waits for what the function does only after it was parked."""
    given = threading.Event()

    def fn(abort: Abort) -> None:
        abort.go.set()
        while not abort.parked.is_set():
            pass
        given.set()
        while True:
            pass

    def work(abort: Abort) -> None:
        assert given.wait(10)

    assert isinstance(run(gate, fn, work), Interrupted)


def test_the_function_may_return_while_it_is_asked_to_wait(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes late finds the library's own code, which is never parked."""
    assert isinstance(run(gate, lambda abort: abort.go.set(), lambda abort: None), Returned | Interrupted)
    monkeypatch.setattr("inprocess.interrupt.gate.PARK", 10.0)
    begin = time.monotonic()
    with gate.parked():
        sum(range(100_000))
    assert time.monotonic() - begin < 10.0


def test_it_is_raised_in_what_was_parked(gate: Gate) -> None:
    """With threads taking turns as often as they can, a hundred times."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(100):
            again = gate._interrupter.new_gate()

            def fn(abort: Abort) -> None:
                abort.go.set()
                while True:
                    pass

            assert isinstance(run(again, fn, lambda abort: None), Interrupted)
    finally:
        sys.setswitchinterval(interval)


def test_a_gate_that_was_left_is_not_entered_again() -> None:
    """A rank that was interrupted loses the store in the end round: the main thread may have left `park` by an
    exception, with the lock that it waited for."""
    left: list[str] = []

    class Left:
        def close_for_abort(self, on_wait: object) -> None:
            left.append("closed")

        @contextlib.contextmanager
        def parked(self) -> Iterator[None]:
            yield

        def interrupt_until_left(self, **_: object) -> None:
            left.append("left")

    thread = MonitorThread(
        StoreSpec(),
        Membership.founder(0, (0,), 1),
        cast(Any, None),
        cast(Any, None),
        cast(Any, None),
        lambda: cast(Gate, Left()),
        lambda _: left.append("abort"),
        lambda: None,
        lambda: None,
        lambda: 0.0,
        1.0,
        1.0,
    )
    assert thread.enter() is not None
    thread._get_out(0)
    thread._fail(StoreLost("gone"))
    assert left == ["closed", "abort", "left"]
    assert thread.mailbox.take("aborted", 0)
    with pytest.raises(StoreLost, match="gone"):
        thread.mailbox.take("next", 1)


class LyingLock:
    """A lock with which the abort ends, and the interrupt's signal comes, at the moment the main thread has it."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._lock = gate, threading.Lock()

    def acquire(self, timeout: float) -> bool:
        taken = self._lock.acquire(timeout=timeout)
        self._gate.atomic.closed = self._gate.interrupting = self._gate._armed = True
        signal.raise_signal(self._gate._interrupter.signum)
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def test_the_interrupt_finds_the_main_thread_about_to_give_the_lock_back(gate: Gate) -> None:
    """It is raised in the function, not in the handler: a second abort would wait for that lock for ever."""
    lock = LyingLock(gate)
    gate._abort_ends = lock  # type: ignore[assignment]

    def fn() -> None:
        gate.parking = True
        while True:
            signal.raise_signal(gate._interrupter.signum)

    assert gate.run(fn) == Interrupted()
    assert not lock.locked()
    assert gate.raised_where.startswith(f"{__file__}:")


class InterruptedLock:
    """A lock with which another signal comes at the moment the main thread has it."""

    def __init__(self, signum: int) -> None:
        self._signum, self._lock = signum, threading.Lock()
        self.release, self.locked = self._lock.release, self._lock.locked
        self.taken = 0

    def acquire(self, timeout: float) -> bool:
        taken = self._lock.acquire(timeout=timeout)
        self.taken += 1
        signal.raise_signal(self._signum)
        return taken


def test_near_the_recursion_limit_the_lock_is_given_back_or_not_taken(gate: Gate) -> None:
    signum = gate._interrupter.signum
    lock = InterruptedLock(signum)
    gate._abort_ends = lock  # type: ignore[assignment]

    def down() -> None:
        """On the way back there is one call more room each time. `suppress` would need some itself."""
        try:  # noqa: SIM105
            down()
        except RecursionError:
            pass
        try:  # noqa: SIM105
            signal.raise_signal(signum)
        except RecursionError:
            pass
        assert not lock.locked()

    def fn() -> None:
        gate.parking = True
        down()

    assert isinstance(gate.run(fn), Returned)
    assert lock.taken > 100


def test_no_lock_is_held_after_it(gate: Gate) -> None:
    """The same with real threads: a second abort of the same iteration, when the store is lost, waits for nothing."""

    def fn(abort: Abort) -> None:
        abort.go.set()
        while True:
            pass

    assert isinstance(run(gate, fn, lambda abort: abort.parked.wait(10)), Interrupted)
    assert gate._abort_ends.acquire(timeout=10)
    gate._abort_ends.release()
