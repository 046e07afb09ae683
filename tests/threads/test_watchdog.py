"""The progress watchdog: stamps while the main thread runs bytecode, and only then."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from inprocess.failover.arbiter_client import ArbiterClients
from inprocess.finalize import ThreadedFinalize
from inprocess.monitor import lease, starting
from inprocess.monitor import process as monitor_process
from inprocess.monitor import watchdog as progress_watchdog
from inprocess.monitor.board import LEASE, PROGRESS, STEPS, WATCHED, Board
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.policy import LeaseWatch
from inprocess.monitor.process import MonitorProcess, _Ends
from inprocess.progress_watchdog import ProgressWatchdog, Silence
from inprocess.protocol.phases import Phase
from inprocess.state import FrozenState
from inprocess.system import clock, interpreter

#: a ceiling, not a duration (seconds)
SOON = 20.0
POLL = select.poll
STATE = FrozenState(rank=0, world_size=1, initial_rank=0, initial_world_size=1)


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create()
    yield board
    board.close()


def spin_until(condition: object) -> None:
    """Run bytecode in the main thread until it holds."""
    end = clock.monotonic() + SOON
    while not condition():  # type: ignore[operator]
        assert clock.monotonic() < end


def is_stamped(board: Board, count: int, seconds: float) -> bool:
    """Wait for so many stamps; in any thread."""
    end = clock.monotonic() + seconds
    for _ in range(count):
        board.slots[PROGRESS] = 0
        while not board.slots[PROGRESS]:
            if clock.monotonic() > end:
                return False
    return True


def stamps(board: Board, count: int) -> None:
    assert is_stamped(board, count, SOON)


def test_it_stamps_while_the_main_thread_runs(board: Board) -> None:
    watchdog = ProgressWatchdog(board, 0.01)
    watchdog.start()
    stamps(board, 5)
    watchdog.stop()


def test_a_question_without_an_answer_is_newer_than_the_stamp(board: Board) -> None:
    """So it is known from when on the main thread has not run; while it runs, each question is answered."""
    watchdog = ProgressWatchdog(board, 0.05)
    watchdog.start()
    stamps(board, 3)
    lock = threading.Lock()
    lock.acquire()
    stayed: list[bool] = []

    def look() -> None:
        """Until one question stays without an answer for several intervals, which are no further questions."""
        end, since, question = clock.monotonic() + SOON / 4, clock.monotonic(), 0
        while clock.monotonic() - since < 0.2 and clock.monotonic() < end:
            found = board.snapshot()
            if found.question != question or found.question <= found.progress:
                since, question = clock.monotonic(), found.question
            os.sched_yield()
        stayed.append(clock.monotonic() < end)
        lock.release()

    other = threading.Thread(target=look)
    other.start()
    lock.acquire()  # in C, where no pending call runs
    other.join()
    spin_until(lambda: board.snapshot().progress > board.snapshot().question)
    watchdog.stop()
    assert stayed == [True]


def test_it_does_not_stamp_while_the_main_thread_is_in_c_code(board: Board) -> None:
    watchdog = ProgressWatchdog(board, 0.01)
    watchdog.start()
    stamps(board, 1)
    libc = ctypes.CDLL(None)
    before = board.slots[PROGRESS]
    libc.usleep(300_000)  # one call, the GIL released: every other thread runs
    during = board.slots[PROGRESS]
    stamps(board, 1)
    watchdog.stop()
    # the one call that was pending when the main thread went to sleep may have run just before
    assert during - before < 100_000_000


def test_it_answers_and_counts_beside_c_code(board: Board) -> None:
    watchdog = ProgressWatchdog(board, 0.01)
    board.steps = lambda: 7
    watchdog.start()
    number = board.ask_stacks()
    ctypes.CDLL(None).usleep(300_000)  # one call, the GIL released
    answer = board.stacks(number)
    watchdog.stop()
    assert answer is not None and board.slots[STEPS] == 7
    (main,) = (thread for thread in json.loads(answer)["threads"] if thread["main"])
    assert main["frames"][0].endswith("in test_it_answers_and_counts_beside_c_code")


def test_the_answer_of_many_threads_has_room(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main one is the last that is left out."""
    many = [{"name": "x" * 50_000, "main": number == 30, "frames": [str(number)]} for number in range(40)]
    monkeypatch.setattr(progress_watchdog.whereabouts, "stacks", lambda: many)
    found = json.loads(progress_watchdog._stacks())["threads"]
    assert 1 < len(found) < 40 and found[0] == many[30]


def test_a_standstill_is_told_once(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the main thread, in one call of C code; and again once it has run, whatever came of it the first time."""
    monkeypatch.setattr(progress_watchdog, "STILL", 0.05)
    told: list[float] = []

    def tell() -> None:
        told.append(clock.monotonic())
        raise RuntimeError("a set changed its size")

    watchdog = ProgressWatchdog(board, 0.01, on_standstill=tell)
    watchdog.start()
    stamps(board, 10)
    assert not told
    for count in (1, 2):
        begin = clock.monotonic()
        ctypes.CDLL(None).usleep(300_000)  # one call, the GIL released
        assert len(told) == count and told[-1] - begin >= 0.04
        stamps(board, 1)
    watchdog.stop()


def test_stacks_that_cannot_be_taken_do_not_end_it(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[object]:
        raise RuntimeError("a set changed its size")

    monkeypatch.setattr(progress_watchdog.whereabouts, "stacks", fail)
    watchdog = ProgressWatchdog(board, 0.01)
    board.ask_stacks()
    watchdog.start()
    stamps(board, 5)
    watchdog.stop()


def for_a_hook(board: Board) -> bool:
    seen: list[bool] = []
    ThreadedFinalize(2 * SOON, lambda: seen.append(is_stamped(board, 3, SOON / 2)))(STATE)
    return seen == [True]


def for_contacts(board: Board) -> bool:
    seen: list[bool] = []
    contacts = ArbiterClients(-1, lambda member, published: seen.append(is_stamped(board, 3, SOON / 2)))
    contacts.make(0, {1: "somewhere"})
    contacts.are_made(2 * SOON)
    contacts.close()
    return seen == [True]


def for_a_monitor(board: Board) -> bool:
    monitor = MonitorProcess(MonitorConfig(member=0, roster=(0,), store="{}"), board)
    ours, theirs = socket.socketpair()
    monitor._ends = _Ends(os.pidfd_open(os.getpid()), ours)
    says = threading.Thread(target=lambda: theirs.send(b'{"serving": %d}\n' % is_stamped(board, 3, SOON / 2)))
    says.start()
    with theirs:
        stamped = monitor.wait_serving(2 * SOON)
        says.join()
    monitor.close()
    return bool(stamped)


@pytest.mark.parametrize("wait", [for_a_hook, for_contacts, for_a_monitor])
def test_it_stamps_while_the_main_thread_waits_for(
    board: Board, monkeypatch: pytest.MonkeyPatch, wait: Callable[[Board], bool]
) -> None:
    for module in (interpreter, monitor_process):
        monkeypatch.setattr(module, "SLICE", 0.01)
    watchdog = ProgressWatchdog(board, 0.01)
    watchdog.start()
    stamped = wait(board)
    watchdog.stop()
    assert stamped


def test_one_question_at_a_time(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    probe = progress_watchdog._the_probe()
    real = probe._add

    def add(function: object, argument: object) -> int:
        asked.append(1)
        return int(real(function, argument))

    monkeypatch.setattr(probe, "_add", add)
    watchdog = ProgressWatchdog(board, 0.001)
    watchdog.start()
    stamps(board, 1)
    before = len(asked)
    ctypes.CDLL(None).usleep(200_000)
    assert len(asked) - before <= 2
    watchdog.stop()


def test_a_question_that_is_still_open_at_the_end_harms_nobody(board: Board) -> None:
    ready, stopped = threading.Event(), threading.Event()
    watchdog = ProgressWatchdog(board, 0.01)

    def stop_while_main_sleeps() -> None:
        ready.wait()
        watchdog.stop()
        board.close()
        stopped.set()

    other = threading.Thread(target=stop_while_main_sleeps)
    other.start()
    watchdog.start()
    stamps(board, 1)
    ready.set()
    ctypes.CDLL(None).usleep(200_000)
    other.join()
    fresh = Board.create()  # the call that is left over runs now; the next watchdog goes on from there
    after = ProgressWatchdog(fresh, 0.01)
    after.start()
    stamps(fresh, 2)
    after.stop()
    fresh.close()


def test_stopping_does_not_wait_for_the_interval(board: Board) -> None:
    watchdog = ProgressWatchdog(board, 3600.0)
    watchdog.start()
    begin = clock.monotonic()
    watchdog.stop()
    watchdog.stop()
    assert clock.monotonic() - begin < SOON
    assert not watchdog.is_alive()


def test_a_lease_that_is_over_outside_the_function_does_not_keep_it_awake(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    real = lease.enforce
    monkeypatch.setattr(lease, "enforce", lambda board: looks.append(1) or real(board))
    board.enter(Phase.LEAVE)
    board.slots[LEASE] = 1
    watchdog = ProgressWatchdog(board, 0.05)
    watchdog.start()
    stamps(board, 5)
    watchdog.stop()
    assert len(looks) < 100  # about three for each stamp; one per millisecond would be 250


def test_threads_switch_fast_while_no_heartbeat_gets_through(board: Board) -> None:
    """A function that makes a system call each millisecond keeps other threads from the lock for up to a second."""
    silent: list[bool] = []
    watchdog = ProgressWatchdog(board, 60.0, unheard=LeaseWatch(20.0), on_silence=lambda: silent.append(True))
    interval = sys.getswitchinterval()
    interpreter.interpreter.begin()
    try:
        for left, switches in ((15.0, interval), (3.9, interpreter.SHORT), (3.8, interpreter.SHORT), (17.0, interval)):
            board.slots[LEASE] = clock.monotonic_ns() + int(left * 1e9)
            watchdog._look_at_lease()
            assert sys.getswitchinterval() == pytest.approx(switches, rel=0.1)
    finally:
        interpreter.interpreter.end()
        watchdog.stop()
    assert not silent


def test_one_that_was_never_started_can_be_stopped(board: Board) -> None:
    ProgressWatchdog(board, 1.0).stop()


class Monitor:
    """Stands for a MonitorProcess: a process and its pidfd."""

    silence = math.inf

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
        self.fd = os.pidfd_open(self.process.pid)

    @contextlib.contextmanager
    def pidfd(self) -> Iterator[int]:
        yield self.fd

    def end(self) -> None:
        os.close(self.fd)
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def watching(board: Board, interval: float, monitor: Monitor, died: Callable[[], bool]) -> Iterator[None]:
    watchdog = ProgressWatchdog(board, interval, monitor, died)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()
        monitor.end()


def test_it_tells_the_monitor_s_death_each_time(board: Board) -> None:
    monitor, deaths, died = Monitor(), [], threading.Semaphore(0)

    def replace() -> bool:
        deaths.append(monitor.process.pid)
        monitor.end()
        monitor.start()
        died.release()
        return True

    with watching(board, 0.05, monitor, replace):
        for _ in range(2):
            pid = monitor.process.pid
            os.kill(pid, signal.SIGKILL)
            assert died.acquire(timeout=SOON)
            assert deaths[-1] == pid


def test_a_monitor_that_dies_as_soon_as_it_is_there_is_replaced_as_well(board: Board) -> None:
    monitor, died = Monitor(), threading.Semaphore(0)

    def replace() -> bool:
        monitor.end()
        monitor.start()
        monitor.process.kill()
        select.select([monitor.fd], [], [])
        died.release()
        return True

    with watching(board, 0.05, monitor, replace):
        monitor.process.kill()
        for _ in range(3):
            assert died.acquire(timeout=SOON)


def test_a_rank_that_must_not_run_gets_no_new_monitor(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its monitor, which could not end it, said so to the others and went."""
    order: list[str] = []
    monkeypatch.setattr(lease, "kill_self", lambda: order.append("ended"))
    board.enter(Phase.RUN)
    board.slots[LEASE] = 1
    watchdog = ProgressWatchdog(board, 60.0, on_monitor_death=lambda: bool(order.append("replaced")))
    watchdog._tell_monitor_death()
    watchdog.stop()
    assert order == ["ended", "replaced"]


def test_a_monitor_that_shows_no_life_is_killed_and_replaced(board: Board) -> None:
    """It counts only once it has shown life, and a new one anew."""
    monitor, deaths = Monitor(), queue.SimpleQueue[int]()
    monitor.silence = 0.2

    def replace() -> bool:
        deaths.put(board.slots[WATCHED])
        monitor.end()
        monitor.start()
        return True

    with watching(board, 0.05, monitor, replace):
        for stamp in (1, 2):
            with pytest.raises(queue.Empty):
                deaths.get(timeout=0.5)
            board.slots[WATCHED] = stamp
            assert deaths.get(timeout=SOON) == 0


def test_a_monitor_that_shows_life_is_left_alone() -> None:
    silence = Silence()
    assert not any(silence.lasts(stamp, 2) for stamp in [0] * 9 + [1, 1, 1, 2, 2, 2, 3])
    assert [silence.lasts(3, 2) for _ in range(3)] == [False, False, True]


def test_a_monitor_that_cannot_be_replaced_is_told_once(board: Board, caplog: pytest.LogCaptureFixture) -> None:
    monitor, calls = Monitor(), []

    def fail() -> bool:
        calls.append(1)
        raise OSError("no processes left")

    with watching(board, 0.01, monitor, fail):
        os.kill(monitor.process.pid, signal.SIGKILL)
        spin_until(lambda: calls)
        stamps(board, 5)  # it goes on stamping
    assert calls == [1]
    assert "no processes left" in caplog.text


# --- descriptors while they are replaced ------------------------------------------------------------------------------


class DroppedMeanwhile:
    """A poll that begins too late: the monitor has been dropped, and somebody has opened files since."""

    def __init__(self, drop: Callable[[], None], opened: list[int]) -> None:
        self._drop, self._opened, self._poll = drop, opened, POLL()
        self.register = self._poll.register

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        self._drop()
        # readable at once: they would be taken for a monitor that has died, or has something to say
        self._opened += [os.eventfd(1) for _ in range(8)]
        return self._poll.poll(milliseconds)


@pytest.fixture
def running(board: Board, monkeypatch: pytest.MonkeyPatch) -> Iterator[MonitorProcess]:
    """A monitor whose program does nothing."""
    program = [sys.executable, "-S", "-c", "input()"]
    monkeypatch.setattr(
        starting, "spawn", lambda *_: subprocess.Popen(program, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    )
    monitor = MonitorProcess(MonitorConfig(member=0, roster=(0,), store="{}"), board)
    monitor.start()
    process = monitor._process
    assert process is not None and process.stdin is not None
    yield monitor
    monitor.close()
    process.stdin.close()


def end_quietly(monitor: MonitorProcess) -> None:
    """Drop the descriptors, and leave the process: its end would be seen."""
    process, monitor._process = monitor._process, None
    monitor._drop()
    monitor._process = process


def test_a_thread_that_hears_a_monitor_never_polls_what_another_has_opened(
    running: MonitorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    monkeypatch.setattr(select, "poll", functools.partial(DroppedMeanwhile, lambda: end_quietly(running), opened))
    before = set(os.listdir("/proc/self/fd"))
    assert running._hear(0.0), "another's descriptor was taken for that of a monitor that has died"
    for fd in opened:
        os.close(fd)
    assert len(set(os.listdir("/proc/self/fd"))) == len(before) - 2, "both are closed after the last use"


def test_the_watchdog_never_polls_what_another_has_opened(
    board: Board, running: MonitorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    deaths: list[int] = []
    watchdog = ProgressWatchdog(board, 10.0, running, lambda: bool(deaths.append(1)))
    monkeypatch.setattr(select, "poll", functools.partial(DroppedMeanwhile, lambda: end_quietly(running), opened))
    assert not watchdog._wait(0.0)
    assert not deaths
    monkeypatch.undo()
    watchdog.stop()
    for fd in opened:
        os.close(fd)


def test_a_monitor_that_the_kernel_does_not_let_go_of_is_not_waited_for(
    running: MonitorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = running._process
    assert process is not None
    with monkeypatch.context() as patched:
        patched.setattr(monitor_process, "KILL_WARNING_S", 0.01)
        patched.setattr(process, "kill", lambda: None)  # as in a system call that nothing ends
        running.close()
    assert process.pid in monitor_process._lingering
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    monitor_process.reap_lingering()
    assert process.pid not in monitor_process._lingering
