"""The library's log lines: nobody waits for a handler, the user's configuration works, nothing is kept or left."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from inprocess.exception import RankShouldRestart
from inprocess.system import clock, logs, writing

#: a ceiling, not a duration (seconds)
SOON = 20.0
log = logs.get_logger("inprocess.tested")
TOP = logging.getLogger("inprocess")


class Kept(logging.Handler):
    """Keeps the lines; each waits until it is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.records: list[logging.LogRecord] = []
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.reached.set()
        assert self.open.wait(SOON)
        self.lines.append(self.format(record))
        self.records.append(record)

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """While a line waits in it."""
        self.open.clear()
        self.reached.clear()
        log.warning("blocked")
        assert self.reached.wait(SOON)
        try:
            yield
        finally:
            self.open.set()


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    TOP.addHandler(handler)
    TOP.setLevel(logging.INFO)
    yield handler
    logs.end(SOON)
    TOP.removeHandler(handler)
    TOP.setLevel(logging.NOTSET)


def written() -> None:
    assert logs.end(SOON)


# --- what reaches the handlers ----------------------------------------------------------------------------------------


def test_lines_come_in_order_from_all_threads(kept: Kept) -> None:
    def say(name: str) -> None:
        for number in range(100):
            log.info("%s %d", name, number)

    threads = [threading.Thread(target=say, args=[name]) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written()
    for name in "ab":
        assert [line for line in kept.lines if line[0] == name] == [f"{name} {number}" for number in range(100)]


def test_the_user_s_levels_filters_and_handlers_work(kept: Kept) -> None:
    assert logging.getLogger("inprocess.tested") is log
    log.addFilter(secret := lambda record: "secret" not in record.getMessage())
    kept.addFilter(lambda record: "noise" not in record.getMessage())
    own, errors = Kept(), Kept()
    errors.setLevel(logging.ERROR)
    log.addHandler(own)
    log.addHandler(errors)
    for level, text in [("debug", "1"), ("info", "secret"), ("info", "noise"), ("info", "2"), ("error", "3")]:
        getattr(log, level)("%s", text)
    written()
    log.propagate = False
    log.error("4")
    written()
    log.propagate = True
    log.removeFilter(secret)
    log.removeHandler(own)
    log.removeHandler(errors)
    assert own.lines == ["noise", "2", "3", "4"]
    assert errors.lines == ["3", "4"]
    assert kept.lines == ["2", "3"]


def test_without_any_handler_warnings_go_to_standard_error() -> None:
    program = "from inprocess.system import logs; logs.get_logger('inprocess.x').warning('seen'); import logging"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SOON, check=True)
    assert done.stderr == "seen\n"


def test_a_line_says_where_it_was_logged(kept: Kept) -> None:
    log.info("here")
    written()
    record = kept.records[0]
    assert (record.funcName, record.threadName) == ("test_a_line_says_where_it_was_logged", "MainThread")


def test_an_exception_is_text(kept: Kept) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("it failed")
    written()
    assert kept.lines[0].startswith("it failed\nTraceback") and kept.lines[0].endswith("ValueError: broken")
    assert 'raise ValueError("broken")' in kept.lines[0]
    assert kept.records[0].exc_info is None


class Thing:
    """Somebody's tensor."""

    def __str__(self) -> str:
        return "thing"


def test_arguments_and_exceptions_are_not_kept(kept: Kept) -> None:
    with kept.blocked():
        thing, error = Thing(), ValueError(local := Thing())
        seen = [weakref.ref(thing), weakref.ref(local)]
        log.info("a %s", thing)
        try:
            raise error
        except ValueError:
            log.exception("failed with %r", error)
        del thing, local, error
        gc.collect()
        assert [one() for one in seen] == [None, None]
    written()
    assert kept.lines[1] == "a thing"


def test_later_changes_of_an_argument_are_not_seen(kept: Kept) -> None:
    with kept.blocked():
        numbers = [1]
        log.info("%s", numbers)
        numbers.append(2)
    written()
    assert kept.lines[1] == "[1]"


class Hostile:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __str__(self) -> str:
        raise self.error


@pytest.mark.parametrize("error", [ValueError(), SystemExit(1), GeneratorExit()])
def test_an_argument_that_cannot_be_shown_harms_nobody(kept: Kept, error: BaseException) -> None:
    log.info("value: %s", Hostile(error))
    log.info("%d %d", *[1])
    log.info(Hostile(error))  # type: ignore[arg-type]
    written()
    why = type(error).__name__
    assert kept.lines == [
        f"value: %s (its arguments cannot be shown: {why})",
        "%d %d (its arguments cannot be shown: TypeError)",
        f"Hostile (its arguments cannot be shown: {why})",
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RankShouldRestart()])
def test_what_is_raised_from_outside_is_not_swallowed(kept: Kept, error: BaseException) -> None:
    with pytest.raises(type(error)):
        log.info("%s", Hostile(error))


# --- what blocks ------------------------------------------------------------------------------------------------------


def test_a_blocked_handler_is_not_waited_for_and_lines_are_counted(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_QUEUED", 10)
    with kept.blocked():
        for number in range(25):
            log.info("%d", number)
    written()
    assert kept.lines == [
        "blocked",
        *map(str, range(10)),
        "15 log lines dropped: they were not written as fast as they came",
    ]
    log.info("later")
    written()
    assert kept.lines[-1] == "later"


def test_no_drop_is_missed_where_many_threads_drop(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_QUEUED", 5)
    with kept.blocked():
        threads = [threading.Thread(target=lambda: [log.info("x") for _ in range(200)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    written()
    *lines, last = kept.lines
    assert len(lines) - 1 + int(last.split()[0]) == 800


def test_a_blocked_writer_is_abandoned_once_and_there_is_no_second_one(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept.blocked():
        assert not logs.end(0.01)
        monkeypatch.setattr(writing, "FLUSH_LIMIT_S", 10**6)  # it was abandoned: not waited for again
        logs.leave()
        log.info("meanwhile")
        logs.leave()
        assert [thread.name for thread in threading.enumerate()].count("inprocess-log") == 1
    written()
    assert kept.lines == ["blocked", "meanwhile"]
    assert "inprocess-log" not in {thread.name for thread in threading.enumerate()}


def test_the_writer_starts_again(kept: Kept) -> None:
    for number in range(3):
        log.info("%d", number)
        written()
        assert "inprocess-log" not in {thread.name for thread in threading.enumerate()}
    assert kept.lines == ["0", "1", "2"]


def test_a_writer_with_nothing_to_do_ends(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "IDLE_LIMIT_S", 0.001)
    log.info("1")
    writer = logs._queue.writer()
    assert writer is not None
    writer.join(SOON)
    assert not writer.is_alive() and kept.lines == ["1"]


def test_during_a_call_there_is_a_writer_before_the_first_line(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no restart waits until a thread has started."""
    monkeypatch.setattr(writing, "IDLE_LIMIT_S", 0.001)
    logs.begin()
    writer = logs._queue.writer()
    assert writer is not None and writer.is_alive()
    writer.join(0.02)  # it has nothing to do
    log.info("1")
    assert logs._queue.writer() is writer
    written()  # in the middle of the call, as at its end
    assert kept.lines == ["1"] and not writer.is_alive()
    logs.begin()
    logs.leave()
    writer = logs._queue.writer()
    assert writer is not None and not writer.is_alive()


def test_a_writer_that_was_about_to_end_stays_for_the_call(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    class Lines(queue.SimpleQueue):  # type: ignore[type-arg]
        """In which the call begins just as the writer has waited long enough."""

        def get(self, block: bool = True, timeout: float | None = None) -> object:
            if timeout is None or begun.is_set():
                return super().get(block, timeout)
            logs.begin()
            begun.set()
            raise queue.Empty

    monkeypatch.setattr(logs._queue, "_lines", Lines())
    log.info("before")
    writer = logs._queue.writer()
    assert writer is not None and begun.wait(SOON)
    log.info("during")
    assert logs._queue.writer() is writer
    logs.leave()
    assert sorted(kept.lines) == ["before", "during"] and not writer.is_alive()


def test_a_line_that_comes_just_as_the_writer_ends_is_written(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lying:
        """A lock whose release is late: somebody who comes meanwhile takes the writer for alive."""

        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.acquire, self.locked = self.lock.acquire, self.lock.locked
            self.late = ["late"]

        def release(self) -> None:
            if self.late:
                log.info(self.late.pop())
            self.lock.release()

    monkeypatch.setattr(logs._queue, "_has_writer", Lying())
    monkeypatch.setattr(writing, "IDLE_LIMIT_S", 0.001)
    arrived = threading.Event()
    kept.addFilter(lambda record: record.getMessage() != "late" or arrived.set() or True)
    log.info("1")
    assert arrived.wait(SOON)  # without anybody who waits for the end
    written()
    assert kept.lines == ["1", "late"]


def test_a_writer_that_another_thread_is_just_starting_is_waited_for(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the line lost that came to it meanwhile."""
    reached, go, start = threading.Event(), threading.Event(), threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "inprocess-log":
            reached.set()
            assert go.wait(SOON)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    another = threading.Thread(target=log.info, args=("1",))
    another.start()
    assert reached.wait(SOON)
    log.info("2")
    assert not logs.end(0.01)
    go.set()
    written()
    another.join(SOON)
    assert kept.lines == ["1", "2"]


def test_where_no_thread_can_be_started_the_next_line_tries_again(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        log.info("1")
    log.info("2")
    written()
    assert kept.lines == ["1", "2"]


def test_a_handler_that_raises_ends_nothing(kept: Kept) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "1":
                raise SystemExit

    log.addHandler(broken := Broken())
    with kept.blocked():
        log.info("1")
        log.info("2")
    written()
    log.removeHandler(broken)
    assert kept.lines == ["blocked", "2", "1 log lines dropped: a log handler raised SystemExit"]


def test_lines_that_cannot_be_written_are_told_of_once_it_works_again(kept: Kept) -> None:
    class Full(logging.Handler):
        full = True

        def __init__(self) -> None:
            super().__init__()
            self.lines: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            if self.full:
                logs.lose("no space left")
            else:
                self.lines.append(record.getMessage())

    TOP.addHandler(full := Full())
    for number in range(3):
        log.info("%d", number)
        written()
    full.full = False
    log.info("4")
    written()
    TOP.removeHandler(full)
    assert full.lines == ["4", "3 log lines dropped: no space left"]


def test_a_forked_child_has_a_writer_of_its_own(kept: Kept) -> None:
    reading, writing = os.pipe()
    with kept.blocked():
        log.info("the parent's")
        assert not logs.end(0.01)
        if (child := os.fork()) == 0:
            kept.open.set()
            log.info("the child's")
            written()
            os.write(writing, repr(kept.lines).encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as file:
            assert file.read() == '["the child\'s"]'
        os.waitpid(child, 0)
    written()
    assert kept.lines == ["blocked", "the parent's"]


#: this thread is about to fork
FORKING = threading.Event()
os.register_at_fork(before=FORKING.set)


class Streaming(logging.Handler):
    """Has a lock that nobody renews in a forked child, as the buffer of a stream has; gives it up when a fork begins.

    The thread that forks keeps the interpreter lock, so without waiting for this one it has forked before that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stream, self.reached = threading.Lock(), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        with self.stream:
            self.reached.set()
            assert FORKING.wait(SOON)


@pytest.fixture
def streaming() -> Iterator[Streaming]:
    handler = Streaming()
    TOP.addHandler(handler)
    yield handler
    logs.end(SOON)
    TOP.removeHandler(handler)


def fork(child: Callable[[], bool]) -> bool:
    if (pid := os.fork()) == 0:
        os._exit(not child())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_fork_waits_for_the_line_that_is_being_written(streaming: Streaming) -> None:
    """Else a child that writes to the same stream would wait for ever."""
    FORKING.clear()
    log.warning("a line")
    assert streaming.reached.wait(SOON)
    assert fork(lambda: streaming.stream.acquire(blocking=False))
    log.warning("the parent's writer goes on")
    assert logs.end(SOON)


def test_a_handler_that_blocks_is_waited_for_by_one_fork(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "FORK_LIMIT_S", limit := 1.0)
    with kept.blocked():
        begin = time.monotonic()
        assert fork(lambda: True)
        first = time.monotonic()
        assert all(fork(lambda: True) for _ in range(3))
        assert first - begin >= limit
        assert time.monotonic() - first < 3 * limit
    log.warning("the writer goes on")
    written()
    assert kept.lines == ["blocked", "the writer goes on"]


def test_a_handler_may_fork(kept: Kept) -> None:
    ended: list[bool] = []
    kept.addFilter(lambda record: ended.append(fork(lambda: True)) is None)
    log.warning("a line")
    written()
    assert (kept.lines, ended) == (["a line"], [True])


# --- where the process was --------------------------------------------------------------------------------------------


def test_a_record_says_where_its_process_was(kept: Kept) -> None:
    """When the line was logged, not when it is written; between calls there is nothing to say."""
    position = logs.Position(call=0, iteration=2, rank=1, initial_rank=1, phase="run")
    renumbered = dataclasses.replace(position, initial_rank=3)
    with kept.blocked():
        for each in (position, renumbered):
            logs.locate(lambda each=each: each)
            log.warning("a line")
        logs.leave()
        log.warning("a line")
    written()
    assert [record.inprocess for record in kept.records] == ["no call", position, renumbered, "no call"]
    assert [str(record.inprocess) for record in kept.records[1:3]] == [
        "call 0, iteration 2, rank 1, run",
        "call 0, iteration 2, rank 1 (initial rank 3), run",
    ]


def test_a_position_is_unpickled_without_this_library() -> None:
    position = logs.Position(call=0, iteration=2, rank=1, initial_rank=1, phase="run")
    assert pickle.loads(pickle.dumps(position)) == "call 0, iteration 2, rank 1, run"
    assert b"inprocess" not in pickle.dumps(position)


# --- the end of the process -------------------------------------------------------------------------------------------

FULL = """
import fcntl, logging, os, sys, threading
from inprocess.system import logs
reading, writing = os.pipe()
os.set_blocking(writing, False)
try:
    while True:
        os.write(writing, b"x" * 65536)
except BlockingIOError:
    os.set_blocking(writing, True)
"""
BLOCKED = {
    "standard error": "os.dup2(writing, 2); handler = logging.StreamHandler()",
    "no handler": "os.dup2(writing, 2); handler = None",
    "pipe": "handler = logging.StreamHandler(open(writing, 'w'))",
    "lock": "handler = logging.Handler(); handler.emit = lambda record: threading.Event().wait()",
}


@pytest.mark.parametrize("kind", BLOCKED)
def test_a_process_ends_though_its_log_is_blocked(kind: str) -> None:
    program = f"""{FULL}
{BLOCKED[kind]}
if handler is not None:
    logging.getLogger().addHandler(handler)
logs.get_logger("inprocess.x").warning("never read")
sys.exit(3)
"""
    begin = clock.monotonic()
    done = subprocess.run([sys.executable, "-c", program], check=False, stdout=subprocess.DEVNULL, timeout=SOON)
    assert done.returncode == 3
    assert clock.monotonic() - begin < SOON


def test_what_was_logged_last_is_written_before_a_process_ends() -> None:
    program = "from inprocess.system import logs; [logs.get_logger('inprocess').warning('%d', n) for n in range(99)]"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SOON, check=True)
    assert done.stderr.split() == [str(number) for number in range(99)]
