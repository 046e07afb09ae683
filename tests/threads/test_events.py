"""Events of a process: in memory, in a file and for subscribers, where nobody waits, whatever the disk does."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inprocess.events import Event, Header, files, parse, recent, stream, subscribe, unsubscribe
from inprocess.events.record import MAX_LINE_BYTES
from inprocess.system import clock, logs, writing
from inprocess.system.observers import emit

#: a ceiling, not a duration (seconds)
SOON = 20.0
POSITION = logs.Position(call=0, iteration=2, rank=1, initial_rank=3, phase="run")


@pytest.fixture(autouse=True)
def call() -> Iterator[None]:
    """A call of a wrapped function is running, and nobody has subscribed."""
    logs.locate(lambda: POSITION)
    stream._recent.clear()
    yield
    for sink in stream._sinks:
        if callable(sink.of):
            unsubscribe(sink.of)
    stream.leave()
    logs.leave()
    stream._recent.clear()


class Disk:
    """The module ``os`` as it is seen by the file; it is full, hangs or tears lines as it is told."""

    def __init__(self) -> None:
        self.full, self.torn = False, 0
        self.open_gate, self.close_gate = threading.Event(), threading.Event()
        self.reached = threading.Event()
        self.come_back()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def hang(self) -> None:
        self.reached.clear()
        self.open_gate.clear()

    def come_back(self) -> None:
        self.open_gate.set()
        self.close_gate.set()

    def write(self, fd: int, line: bytes) -> int:
        self.reached.set()
        assert self.open_gate.wait(SOON)
        if self.full:
            with open("/dev/full", "wb", buffering=0) as device:
                device.write(line)
        if self.torn:
            torn, self.torn = self.torn, 0
            return os.write(fd, line[:torn])
        return os.write(fd, line)

    def close(self, fd: int) -> None:
        self.reached.set()
        assert self.close_gate.wait(SOON)
        os.close(fd)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(files, "os", disk)
    monkeypatch.setattr(files, "RETRY_S", 0.0)
    yield disk
    disk.full = False
    disk.come_back()
    stream.leave()
    ended()


def header() -> Header:
    return Header("29500", "rank", 3, os.getpid(), "node/7 \x1b[31m")


def begin(run_dir: Path) -> Path:
    """Where the file is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "Header", lambda *_: header())
        stream.begin(str(run_dir), "29500", "rank", 3)
    return Path(files.EventFile(str(run_dir), header()).path)


def written() -> None:
    """In the middle of the call."""
    for sink in stream._sinks:
        assert sink.end(SOON)


def ended() -> None:
    """Every thread that writes events has ended."""
    for thread in threading.enumerate():
        if thread.name in ("inprocess-events", "inprocess-subscriber"):
            thread.join(SOON)
            assert not thread.is_alive()


def read(path: Path) -> list[Event | Header]:
    return [parse(line) for line in path.read_bytes().split(b"\n") if line]


def numbers(lines: list[Event | Header] | list[Event]) -> list[Any]:
    """``number`` of each event, ``header``, and how many were dropped."""
    return [
        "header" if isinstance(line, Header) else line.attributes.get("number", line.attributes.get("count"))
        for line in lines
    ]


class Kept(list[Event]):
    """A subscriber that keeps the events; each waits until it is let through."""

    def __init__(self) -> None:
        self.gate, self.reached = threading.Event(), threading.Event()
        self.gate.set()

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, event: Event) -> None:
        self.reached.set()
        assert self.gate.wait(SOON)
        self.append(event)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        path = begin(tmp_path / "made/here")
        emit("run", number=1)
        written()
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.parent == tmp_path / "made/here/events"
    assert path.name == f"rank-3-node_7___31m-{os.getpid()}.jsonl"


def test_lines_are_whole_and_can_be_read_at_once(tmp_path: Path) -> None:
    path = begin(tmp_path)
    for number in range(3):
        emit("run", number=number)
        written()
        assert path.read_bytes().endswith(b"}\n")
        assert numbers(read(path)) == ["header", *range(number + 1)]
    first, *rest = read(path)
    assert isinstance(first, Header) and (first.job, first.host) == ("29500", header().host)
    assert rest == list(recent())
    event = rest[0]
    assert isinstance(event, Event)
    assert (event.call, event.iteration, event.rank, event.initial_rank, event.phase) == (0, 2, 1, 3, "run")


def test_each_line_is_one_write(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is whole whatever dies."""
    writes: list[bytes] = []
    monkeypatch.setattr(disk, "write", lambda fd, line: writes.append(line) or os.write(fd, line))
    path = begin(tmp_path)
    emit("run", number=1, much=["x" * 4000] * 14)
    emit("run", number=2, too_much=["x" * 4000] * 400)
    written()
    assert b"".join(writes) == path.read_bytes()
    assert [type(parse(line.strip())) for line in writes] == [Header, Event, Event]
    assert all(len(line) <= MAX_LINE_BYTES + 1 for line in writes)


def test_later_calls_go_on_in_the_same_file(tmp_path: Path) -> None:
    for number in range(3):
        path = begin(tmp_path)
        emit("run", number=number)
        stream.leave()
    assert numbers(read(path)) == ["header", 0, "header", 1, "header", 2]


def test_it_begins_anew_after_a_torn_line(tmp_path: Path) -> None:
    path = begin(tmp_path)
    path.parent.mkdir()
    path.write_bytes(b'{"time":1.0,"wall_ti')
    emit("run", number=1)
    written()
    torn, *lines = path.read_bytes().splitlines()
    assert torn == b'{"time":1.0,"wall_ti'
    assert numbers([parse(line) for line in lines]) == ["header", 1]


def test_a_line_that_is_cut_short_is_told_of(tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    path = begin(tmp_path)
    emit("run", number=1)
    written()
    disk.torn = 20
    emit("run", number=2)
    written()
    emit("run", number=3)
    written()
    lines = path.read_bytes().splitlines()
    assert numbers([parse(line) for line in [*lines[:2], *lines[3:]]]) in (["header", 1, 1, 3], ["header", 1, 3, 1])
    assert len(lines[2]) == 20
    assert caplog.text.count("only a part of a line could be written") == 1


def test_at_most_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 3000)
    path = begin(tmp_path)
    found: set[Any] = set()
    for number in range(100):
        emit("run", number=number)
        written()
        for each in path.parent.iterdir():
            lines = read(each)
            assert isinstance(lines[0], Header)
            assert each.stat().st_size < 3000 + 500
            found.update(numbers(lines))
    assert {each.name for each in path.parent.iterdir()} == {path.name, f"{path.name}.1"}
    assert found == {"header", *range(100)}
    older, newer = numbers(read(path.with_name(f"{path.name}.1"))), numbers(read(path))
    assert [*older[1:], *newer[1:]] == list(range(older[1], 100))
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_call_that_begins_with_a_full_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1000)
    path = begin(tmp_path)
    path.parent.mkdir()
    path.write_bytes(b"x" * 990)
    for number in range(2):
        emit("run", number=number)
    written()
    first, *older = path.with_name(f"{path.name}.1").read_bytes().splitlines()
    assert first == b"x" * 990
    assert numbers([parse(line) for line in older]) == ["header", 0]
    assert numbers(read(path)) == ["header", 1]
    assert caplog.text == ""


def test_a_file_that_cannot_be_set_aside_does_not_grow(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1000)
    path = begin(tmp_path)
    path.parent.mkdir()
    path.with_name(f"{path.name}.1").mkdir()
    for number in range(50):
        emit("run", number=number)
        written()
    assert path.stat().st_size < 2000
    assert caplog.text.count("events are not written: Is a directory") == 1
    path.with_name(f"{path.name}.1").rmdir()
    emit("run", number=50)
    written()
    lost = [line for line in read(path) if isinstance(line, Event) and line.kind == "dropped"]
    assert [50 in numbers(read(path)), len(lost)] == [True, 1]


def test_a_file_that_was_taken_away_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 100)
    path = begin(tmp_path)
    emit("run", number=0)
    written()
    path.unlink()
    emit("run", number=1)
    written()
    assert numbers(read(path)) == ["header", 1]


# --- what may be in its place -----------------------------------------------------------------------------------------


def put_link(path: Path) -> None:
    (path.parent.parent / "victim").write_text("mine")
    path.parent.mkdir()
    path.symlink_to(path.parent.parent / "victim")


def put_fifo(path: Path) -> None:
    path.parent.mkdir()
    os.mkfifo(path)


def put_folder(path: Path) -> None:
    path.mkdir(parents=True)


def put_file(path: Path) -> None:
    path.parent.write_text("mine")


def put_device(path: Path) -> None:
    path.parent.symlink_to("/dev/full")


IN_ITS_PLACE = {
    put_link: "Too many levels of symbolic links",
    put_fifo: "{path} is not a regular file",
    put_folder: "Is a directory",
    put_file: "{folder} is no folder: remove it, or choose another directory",
    put_device: "{folder} is a link: remove it, or choose another directory",
}


@pytest.mark.parametrize("put", IN_ITS_PLACE)
def test_something_else_in_its_place(
    put: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = begin(tmp_path)
    put(path)
    for number in range(3):
        emit("run", number=number)
        written()
    monkeypatch.setattr(files, "RETRY_S", 0.0)
    for number in range(3, 6):  # tried again each time
        emit("run", number=number)
        written()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    why = IN_ITS_PLACE[put].format(path=path, folder=path.parent)
    assert record.message == (
        f"run_dir={str(tmp_path)!r}: events are not written: {why}. The training goes on without them; "
        "choose a directory that can be written, or none."
    )
    assert numbers(list(recent())) == list(range(6))
    if put is put_link:
        assert (tmp_path / "victim").read_text() == "mine"


def test_a_file_in_place_of_the_run_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "runs").write_text("mine")
    begin(tmp_path / "runs")
    for number in range(3):
        emit("run", number=number)
    written()
    assert [record.message.split(": ")[2] for record in caplog.records] == [
        "Not a directory. The training goes on without them; choose a directory that can be written, or none."
    ]
    assert numbers(list(recent())) == [0, 1, 2]


def test_a_pipe_that_somebody_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = begin(tmp_path)
    put_fifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        emit("run", number=1)
        written()
        assert f"{path} is not a regular file. The training goes on" in caplog.text
        assert os.read(reader, 100) == b""
    finally:
        os.close(reader)


def test_it_is_tried_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    path = begin(tmp_path)
    put_file(path)
    monkeypatch.setattr(files, "clock", type("Clock", (), {"monotonic": staticmethod(lambda: now[0])}))
    emit("run", number=0)
    written()
    path.parent.unlink()
    now[0] += files.RETRY_S - 0.1
    emit("run", number=1)
    written()
    assert not path.exists()
    now[0] += 0.2
    emit("run", number=2)
    written()
    assert numbers(read(path))[0] == "header" and 2 in numbers(read(path))
    assert len(caplog.records) == 1


# --- a disk that is full, or does not answer --------------------------------------------------------------------------


def test_a_full_disk(tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    path = begin(tmp_path)
    emit("run", number=0)
    written()
    disk.full = True
    for number in range(1, 6):
        emit("run", number=number)
        written()
    disk.full = False
    emit("run", number=6)
    written()
    lines = read(path)
    assert numbers(lines) == ["header", 0, 6, 5]
    last = lines[-1]
    assert isinstance(last, Event) and last.kind == "dropped"
    assert last.attributes == {"count": 5, "why": "the run directory raised OSError"}
    assert caplog.text.count("events are not written: No space left on device") == 1
    assert numbers(list(recent())) == list(range(7))


def test_a_disk_that_is_full_from_the_start(tmp_path: Path, disk: Disk) -> None:
    """No event comes before the header."""
    disk.full = True
    path = begin(tmp_path)
    for number in range(3):
        emit("run", number=number)
        written()
    disk.full = False
    emit("run", number=3)
    written()
    assert numbers(read(path)) == ["header", 3, 3]


def test_a_header_that_is_cut_short(tmp_path: Path, disk: Disk) -> None:
    disk.torn = 10
    path = begin(tmp_path)
    emit("run", number=1)
    written()
    emit("run", number=2)
    written()
    lines = path.read_bytes().splitlines()
    assert len(lines[0]) == 10
    assert numbers([parse(line) for line in lines[1:]])[0] == "header"


def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "FLUSH_LIMIT_S", 0.05)
    monkeypatch.setattr(writing, "MAX_QUEUED", 10)
    subscribe(kept := Kept())
    disk.hang()
    path = begin(tmp_path)
    emit("run", number=0)
    assert disk.reached.wait(SOON)
    before = clock.monotonic()
    for number in range(1, 30):
        emit("run", number=number)
        assert stream._sinks[0].end(SOON)  # the subscriber has it
    assert clock.monotonic() - before < SOON / 2  # `Disk` would give up after SOON
    assert numbers(kept) == list(range(30))
    stream.leave()
    stream.leave()
    assert clock.monotonic() - before < SOON / 2
    disk.come_back()
    ended()
    assert numbers(read(path)) == ["header", *range(11), 19]
    assert numbers(list(recent())) == list(range(30))


def test_a_disk_that_hangs_keeps_one_thread(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many calls there are meanwhile; afterwards events are written again."""
    monkeypatch.setattr(writing, "FLUSH_LIMIT_S", 0.05)
    disk.hang()
    for number in range(3):
        path = begin(tmp_path)
        emit("run", number=number)
        assert disk.reached.wait(SOON)
        stream.leave()
        assert [thread.name for thread in threading.enumerate()].count("inprocess-events") == 1
    disk.come_back()
    ended()
    begin(tmp_path)
    emit("run", number=3)
    stream.leave()
    ended()
    assert numbers(read(path)) == ["header", 0, "header", 3]


def test_a_file_that_cannot_be_closed_holds_up_nobody(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with NFS, which writes only then."""
    monkeypatch.setattr(writing, "FLUSH_LIMIT_S", 0.05)
    path = begin(tmp_path)
    emit("run", number=0)
    written()
    disk.reached.clear()
    disk.close_gate.clear()
    before = clock.monotonic()
    stream.leave()
    assert clock.monotonic() - before < SOON / 2
    assert disk.reached.wait(SOON)
    disk.come_back()
    ended()
    assert numbers(read(path)) == ["header", 0]


@pytest.mark.parametrize("number", [errno.EIO, errno.EBADF, errno.ESTALE, errno.EDQUOT])
def test_an_error_of_the_disk_reaches_nobody(
    number: int, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(fd: int, line: bytes) -> int:
        raise OSError(number, os.strerror(number))

    begin(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(disk, "write", fail)
        for each in range(3):
            emit("run", number=each)
        written()
    assert caplog.text.count(os.strerror(number)) == 1
    assert numbers(list(recent())) == [0, 1, 2]


# --- subscribers ------------------------------------------------------------------------------------------------------


def test_subscribers_get_all_in_order() -> None:
    one, other = Kept(), Kept()
    assert subscribe(one) is one
    emit("run", number=0)
    subscribe(other)
    for number in range(1, 50):
        emit("run", number=number)
    written()
    assert (numbers(one), numbers(other)) == (list(range(50)), list(range(1, 50)))
    assert one == list(recent())


def test_in_a_thread_of_its_own() -> None:
    names: list[str] = []

    @subscribe
    def told(event: Event) -> None:
        names.append(threading.current_thread().name)

    emit("run")
    written()
    assert names == ["inprocess-subscriber"]


def test_one_that_raises_gets_the_next_ones(caplog: pytest.LogCaptureFixture) -> None:
    got: list[int] = []

    @subscribe
    def broken(event: Event) -> None:
        got.append(event.attributes["number"])
        raise ValueError("of the user's")

    subscribe(kept := Kept())
    emit("run", number=0)
    emit("run", number=1)
    written()
    assert got == numbers(kept) == [0, 1]
    assert caplog.text.count("a subscriber of events raised; it gets the next ones, too") == 2
    assert "ValueError: of the user's" in caplog.text


def test_one_that_exits_ends_nothing() -> None:
    got: list[str] = []

    @subscribe
    def leaving(event: Event) -> None:
        got.append(event.kind)
        if event.kind == "run":
            raise SystemExit

    emit("run")
    emit("left")
    written()
    assert sorted(got) == ["dropped", "left", "run"]


def test_one_that_blocks_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_QUEUED", 10)
    monkeypatch.setattr(writing, "FLUSH_LIMIT_S", 0.05)
    blocked, other = Kept(), Kept()
    subscribe(blocked)
    subscribe(other)
    path = begin(tmp_path)
    blocked.gate.clear()
    before = clock.monotonic()
    emit("run", number=0)
    assert blocked.reached.wait(SOON)
    for number in range(1, 30):
        emit("run", number=number)
        for sink in stream._sinks[1:]:
            assert sink.end(SOON)
    assert numbers(other) == list(range(30)) and numbers(blocked) == []
    assert numbers(read(path)) == ["header", *range(30)]
    stream.leave()
    assert clock.monotonic() - before < SOON / 2
    logs.locate(lambda: POSITION)
    blocked.gate.set()
    written()
    assert numbers(blocked) == [*range(11), 19]
    assert (blocked[-1].kind, blocked[-1].attributes["why"]) == ("dropped", writing._SLOW)


def test_unsubscribe() -> None:
    one, other = Kept(), Kept()
    subscribe(one)
    subscribe(other)
    emit("run", number=0)
    unsubscribe(one)
    emit("run", number=1)
    written()
    assert (numbers(one), numbers(other)) == ([0], [0, 1])
    with pytest.raises(ValueError, match="is no subscriber"):
        unsubscribe(one)


def test_a_method_can_be_unsubscribed() -> None:
    """Each time that one looks at it, it is another object."""

    class Sink:
        def tell(self, event: Event) -> None:
            raise AssertionError

    sink = Sink()
    subscribe(sink.tell)
    unsubscribe(sink.tell)
    emit("run")
    assert stream._sinks == ()


def test_one_that_unsubscribes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "IDLE_LIMIT_S", 0.001)
    got: list[str] = []

    @subscribe
    def once(event: Event) -> None:
        got.append(event.kind)
        unsubscribe(once)

    emit("run")
    ended()
    emit("left")
    ended()
    assert (got, stream._sinks) == (["run"], ())


@pytest.mark.parametrize("nothing", [None, "run", 7])
def test_what_cannot_be_called(nothing: Any) -> None:
    with pytest.raises(TypeError, match=r"subscribe\(.*\): pass a function that takes one Event"):
        subscribe(nothing)
    assert stream._sinks == ()


def test_the_run_directory_is_no_subscriber(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(ValueError, match="is no subscriber"):
        unsubscribe(str(tmp_path))  # type: ignore[arg-type]
    begin(tmp_path)
    assert len(stream._sinks) == 1


# --- memory, calls, processes -----------------------------------------------------------------------------------------


def test_the_last_thousand_are_kept() -> None:
    for number in range(1500):
        emit("run", number=number)
    assert numbers(list(recent())) == list(range(500, 1500))


def test_all_threads_may_emit(tmp_path: Path) -> None:
    path = begin(tmp_path)
    subscribe(kept := Kept())

    def say(name: str) -> None:
        for number in range(100):
            emit("run", number=(name, number))

    threads = [threading.Thread(target=say, args=[name]) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written()
    for name in "abcd":
        assert [each for each in numbers(kept) if each[0] == name] == [(name, number) for number in range(100)]
    assert sorted(map(tuple, numbers(read(path))[1:])) == sorted(numbers(kept))


def test_outside_a_call_nothing_is_emitted(tmp_path: Path) -> None:
    path = begin(tmp_path)
    subscribe(kept := Kept())
    logs.locate(None)
    emit("run", number=1)
    written()
    assert (kept, recent(), path.exists()) == ([], (), False)


def test_nothing_is_left(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    subscribe(kept := Kept())
    for number in range(3):
        path = begin(tmp_path)
        emit("run", number=number)
        stream.leave()
        assert len(os.listdir("/proc/self/fd")) == len(before)
        names = {thread.name for thread in threading.enumerate()}
        assert not names & {"inprocess-events", "inprocess-subscriber"}
        assert [sink.of for sink in stream._sinks] == [kept]
    assert len(kept) == 3 and len(read(path)) == 6


def test_a_forked_child_has_none_of_it(tmp_path: Path) -> None:
    path = begin(tmp_path)
    subscribe(kept := Kept())
    emit("run", number=0)
    written()  # so a thread of its own would write for the child
    if (child := os.fork()) == 0:
        before = recent()
        emit("run", number=1)
        stream.leave()
        told = len(kept) != 1 or before
        subscribe(own := Kept())
        emit("run", number=2)
        for sink in stream._sinks:
            sink.end(SOON)
        os._exit(bool(told) or numbers(own) != [2])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    emit("run", number=3)
    written()
    assert numbers(read(path)) == ["header", 0, 3]
    assert numbers(kept) == [0, 3]
    assert [each.name for each in path.parent.iterdir()] == [path.name]
