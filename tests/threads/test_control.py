"""The launcher's socket: what workers say, what is none of a worker's, and workers that die, fork or come again."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inprocess.exception import NobodyLeft, OptionError, RestartError, TimeoutError
from inprocess.heartbeats import launcher
from inprocess.heartbeats import watch as watching
from inprocess.heartbeats.board import WatchBoard
from inprocess.heartbeats.launcher import announce_modules
from inprocess.launcher import control, control_socket
from inprocess.launcher.control import ControlServer, Request
from inprocess.launcher.ft_config import Settings
from inprocess.watch import announce_nobody_left, announce_over, announce_wrapped, ask_launcher, monitored

S = 1_000_000_000
#: how long a test waits for what should come at once
SOON = 5.0
SETTINGS = Settings(
    initial_rank_heartbeat_timeout=60,
    rank_heartbeat_timeout=30,
    rank_section_timeouts={"save": 100},
    rank_out_of_section_timeout=50,
    workload_check_interval=1e6,
)


class Time:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000 * S

    def __call__(self) -> int:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += int(seconds * S)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(watching.clock, "monotonic_ns", time)
    return time


@pytest.fixture
def server(time: Time) -> Iterator[ControlServer]:
    server = ControlServer(SETTINGS, time)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def anew() -> None:
    """The warning that comes once per process comes once per test."""
    watching._say_once.cache_clear()


@pytest.fixture
def worker(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], dict[str, str]]:
    """Makes this process the worker of a rank."""

    def become(rank: int) -> dict[str, str]:
        environ = server.environment(rank)
        server.started(rank, os.getpid())
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return environ

    return become


def overdue(server: ControlServer) -> list[tuple[int, str]]:
    """Rank and option."""
    return [(each.rank, each.reason.rpartition("(")[2].rstrip(")")) for each in server.overdue()]


def heard(server: ControlServer) -> None:
    """Everything that was sent so far has been read."""
    server.is_wrapped(0)


def is_watched(server: ControlServer, rank: int) -> bool:
    heard(server)
    return server._workers[rank].board is not None


# --- what workers say ---------------------------------------------------------------------------------------------


def test_a_worker_that_stops_to_ping_is_overdue(server: ControlServer, time: Time, worker: Any) -> None:
    worker(3)
    with monitored() as watch:
        assert watch.watched
        time.passes(59)
        assert overdue(server) == []
        time.passes(1)
        assert overdue(server) == [(3, "initial_rank_heartbeat_timeout")]
        watch.ping()
        time.passes(29)
        watch.ping()
        time.passes(29)
        assert overdue(server) == []
        time.passes(1)
        assert overdue(server) == overdue(server) == [(3, "rank_heartbeat_timeout")], "until it has ended"
        server.ended(3)
        assert overdue(server) == []


def test_sections(server: ControlServer, time: Time, worker: Any) -> None:
    worker(3)
    with monitored() as watch:
        watch.ping()
        with watch.section("save"):
            time.passes(99)
            assert overdue(server) == [], "the ping's limit does not count inside"
            with watch.section("compress", timeout=20), watch.section("without a limit"):
                time.passes(0.5)
                assert overdue(server) == []
                time.passes(0.5)
                found = server.overdue()
                assert [each.reason for each in found] == [
                    "in section 'save' for more than 100 s (rank_section_timeouts)"
                ], "the time of the outer one counts, too"
        time.passes(29)
        assert overdue(server) == [], "a section that has ended counts as a ping"
        time.passes(1)
        assert overdue(server) == [(3, "rank_heartbeat_timeout")]
        watch.ping()
        time.passes(20)
        assert overdue(server) == [(3, "rank_out_of_section_timeout")]


def test_a_section_without_a_limit_keeps_to_the_pings(server: ControlServer, time: Time, worker: Any) -> None:
    worker(3)
    with monitored() as watch, watch.section("train"):
        time.passes(1000)
        assert overdue(server) == [], "no ping yet, and a section is a sign of life"
        watch.ping()
        time.passes(30)
        assert overdue(server) == [(3, "rank_heartbeat_timeout")]


def test_nothing_is_limited_after_the_watch(server: ControlServer, time: Time, worker: Any) -> None:
    worker(3)
    watch = monitored()
    watch.ping()
    time.passes(1000)
    watch.close()
    watch.close()
    watch.ping()
    with watch.section("save"):
        assert overdue(server) == []
    with monitored() as again:
        assert again.watched, "one after the other"


def test_a_watch_that_is_dropped_ends(server: ControlServer, worker: Any) -> None:
    worker(3)
    watch = monitored()
    assert is_watched(server, 3)
    del watch
    assert not is_watched(server, 3)


def test_no_silence_counts_in_which_the_launcher_stood_still(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ControlServer(Settings(workload_check_interval=5, rank_heartbeat_timeout=30), time)
    for name, value in server.environment(0).items():
        monkeypatch.setenv(name, value)
    with contextlib.closing(server), monitored() as watch:
        watch.ping()
        time.passes(500)
        assert server.overdue() == []
        for _ in range(5):
            time.passes(5)
            assert server.overdue() == []
        time.passes(5)
        assert overdue(server) == [(0, "rank_heartbeat_timeout")]


def test_who_finds_nobody_to_join_says_so(
    server: ControlServer, worker: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the launcher, and in one line to people: no traceback of what is the normal way to recovery."""
    others: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: others.append(error))
    nobody, other = NobodyLeft("nobody is left.", history=["iteration -1: join: quit"]), RestartError("another one")
    announce_nobody_left(nobody)  # no launcher
    sys.excepthook(NobodyLeft, nobody, None)
    assert others == [nobody]
    worker(3)
    announce_wrapped()
    assert not server.is_stranded(3)
    announce_nobody_left(nobody)
    assert server.is_stranded(3) and server.is_wrapped(3) and not server.is_stranded(4)
    for error in (nobody, other):
        sys.excepthook(type(error), error, None)
    assert others == [nobody, other]
    assert capsys.readouterr().err == (
        f"rank {os.environ.get('RANK')} (pid {os.getpid()}): nobody is left. The launcher restarts all workers.\n"
    )
    worker(3)
    assert not server.is_stranded(3), "the one that comes after it has not said so"


def test_a_call_that_ended_on_all_ranks_is_told(server: ControlServer, worker: Any) -> None:
    """It counts until the function is called again."""
    announce_over()  # no launcher
    worker(3)
    announce_wrapped()
    assert not server.is_over(3)
    announce_over()
    assert server.is_over(3) and server.is_wrapped(3) and not server.is_over(4)
    announce_wrapped()
    assert not server.is_over(3)


def test_a_wrapper_announces_itself(server: ControlServer, worker: Any) -> None:
    worker(3)
    assert not server.is_wrapped(3)
    announce_wrapped()
    announce_wrapped()
    assert server.is_wrapped(3) and not server.is_wrapped(4)
    worker(3)
    assert not server.is_wrapped(3), "the one that comes after it has not said so"


def test_modules_are_told_where_they_are_wanted(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until one worker has told."""
    monkeypatch.setenv("TEST_CHANGED", "by the program")
    server = ControlServer(SETTINGS, time, learns=True)
    try:
        for rank in (3, 4):
            environ = server.environment(rank)
            assert ("INPROCESS_LAUNCHER_LEARNS" in environ) == (rank == 3)
            with pytest.MonkeyPatch.context() as patch:
                for name, value in environ.items():
                    patch.setenv(name, value)
                assert (server.modules() is None) == (rank == 3)
                announce_modules()
                heard(server)
                assert "INPROCESS_LAUNCHER_LEARNS" not in os.environ, "it is told once in a process"
        found = server.modules()
    finally:
        server.close()
    assert found is not None and "json" in found.names and "tests" in found.own
    assert found.environ["TEST_CHANGED"] == "by the program"


def test_requests_are_delivered_once(server: ControlServer, worker: Any) -> None:
    worker(3)
    ask_launcher("exclude_this_node", "too many\nECC errors \x1b[31m")
    worker(4)
    ask_launcher("continue", "x" * 2000)
    first, second = server.requests()
    assert first == Request(3, "exclude_this_node", r"too many ECC errors \x1b[31m")
    assert (second.rank, second.action, len(second.reason)) == (4, "continue", 1000)
    assert server.requests() == []


def test_threads(server: ControlServer, worker: Any) -> None:
    """Sections of several threads at once, while the launcher looks."""
    worker(3)
    with monitored() as watch:

        def work() -> None:
            for _ in range(60):
                watch.ping()
                with watch.section("save"), watch.section("inner", timeout=1):
                    watch.ping()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert server.overdue() == []
        for thread in threads:
            thread.join()
        assert watch.timeouts.observed.times("save") == watch.timeouts.observed.times("inner") == (240, 0.0)
        board = server._workers[3].board
        assert board is not None and not board.seen().section and board.seen().outside_since


def test_a_section_that_raises_teaches_nothing(server: ControlServer, time: Time, worker: Any) -> None:
    worker(3)
    with monitored() as watch:
        with pytest.raises(ValueError), watch.section("save"):
            time.passes(20)
            raise ValueError
        time.passes(49)
        assert overdue(server) == [] and watch.timeouts.observed.times("save") == (0, 0.0)


def test_nothing_of_torch_is_imported() -> None:
    """The launcher's and the watch's files cost a process nothing."""
    program = (
        "import sys, inprocess.launcher.control, inprocess\ninprocess.monitored\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# --- workers that die, fork or come again -------------------------------------------------------------------------

KILLED = """
import os, signal
from inprocess.watch import announce_wrapped, monitored
watch = monitored()
assert watch.watched
watch.ping()
announce_wrapped()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_that_is_killed(server: ControlServer) -> None:
    """What it said counts, and its silence does not: the agent sees by itself that it is dead."""
    environ = {**os.environ, **server.environment(3)}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environ, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert server.is_wrapped(3)
    assert not is_watched(server, 3)


def test_a_forked_child_neither_pings_nor_holds_the_connection(server: ControlServer, worker: Any, time: Time) -> None:
    worker(3)
    watch = monitored()
    watch.ping()
    board = server._workers[3].board
    assert board is not None
    stay, leave = os.pipe()
    said, say = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            time.passes(7)
            watch.ping()
            with watch.section("save"):
                os.write(say, b"pinged")
            os.close(leave)
            os.read(stay, 1)
            code = 0
        finally:
            os._exit(code)
    assert os.read(said, 9) == b"pinged"
    assert board.seen().ping == time.now and not board.seen().section
    watch.close()
    assert not is_watched(server, 3), "the child still lives"
    for fd in (stay, leave, said, say):
        os.close(fd)
    assert os.waitpid(child, 0)[1] == 0


def test_a_fork_while_another_thread_holds_the_lock(server: ControlServer, worker: Any) -> None:
    worker(3)
    with monitored() as watch, watch._lock:
        child = os.fork()
        if child == 0:
            watch._lock = _Held()  # type: ignore[assignment]
            watching._forked()
            os._exit(0 if not watch.watched else 1)
        assert os.waitpid(child, 0)[1] == 0


class _Held:
    def __enter__(self) -> None:
        os._exit(2)

    def __exit__(self, *exc_info: object) -> None: ...


def test_a_worker_that_comes_again(server: ControlServer, worker: Any, time: Time, caplog: Any) -> None:
    """Its predecessor's watch is over, and nobody who has the old key can speak for the rank."""
    old = worker(3)
    before = monitored()
    before.ping()
    time.passes(1000)
    new = worker(3)
    assert overdue(server) == [] and not is_watched(server, 3)
    os.environ.update(old)
    announce_wrapped()
    assert not monitored().watched
    with pytest.raises(RestartError, match=r"hung up|reset|Broken pipe"):
        ask_launcher("shutdown_workload", "I am a ghost")
    assert not server.is_wrapped(3) and server.requests() == []
    os.environ.update(new)
    with monitored() as watch:
        assert watch.watched and is_watched(server, 3)
        before.close()
        assert is_watched(server, 3)
    server.ended(3)
    assert not monitored().watched
    assert "its key is none of a worker that runs" in caplog.text


def test_of_two_watches_the_first_counts(server: ControlServer, worker: Any, caplog: Any) -> None:
    worker(3)
    with monitored() as first, monitored() as second:
        assert first.watched and not second.watched
        second.ping()
        board = server._workers[3].board
        assert board is not None and not board.seen().ping
    assert f"rank 3 is watched already, process {os.getpid()} was first" in caplog.text


# --- what is none of a worker's -----------------------------------------------------------------------------------


def connect(server: ControlServer) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(SOON)
    connection.connect(server._path)
    return connection


def is_hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def still_serves(server: ControlServer, worker: Any) -> None:
    worker(9)
    with monitored() as watch:
        assert watch.watched


def line(key: str, **message: Any) -> bytes:
    return json.dumps({"key": key, **message}).encode() + b"\n"


@pytest.mark.parametrize(
    "say",
    [
        lambda key: b"garbage\n",
        lambda key: b"\xff\xfe\x00\n",
        lambda key: b"\n",
        lambda key: b"[]\n",
        lambda key: b"{}\n",
        lambda key: b"[" * 60_000 + b"\n",
        lambda key: b"x" * 200_000,
        lambda key: b"\0" * 66_000 + b"\n",
        lambda key: line("0" * 32, say="wrapped"),
        lambda key: line(key[:-1], say="wrapped"),
        lambda key: line([key], say="wrapped"),  # type: ignore[arg-type]
        lambda key: line(key, say="kill"),
        lambda key: line(key, say=["wrapped"]),
        line,
        lambda key: line(key, say="watch"),
        lambda key: line(key, say="ask", action="format_disk", reason="why not"),
        lambda key: line(key, say="ask", action=["continue"], reason="x"),
        lambda key: line(key, say="ask", action="continue"),
        lambda key: line(key, say="ask", action="continue", reason=5),
        lambda key: b'{"key": "' + key.encode() + b'", "key": "a", "say": "wrapped"}\n',
    ],
)
def test_garbage(server: ControlServer, worker: Any, say: Callable[[str], bytes]) -> None:
    key = worker(3)["INPROCESS_LAUNCHER_KEY"]
    with connect(server) as connection:
        with contextlib.suppress(ConnectionError):  # it hangs up before it has read all
            connection.sendall(say(key))
        assert is_hung_up(connection)
    assert not server.is_wrapped(3) and not server.requests()
    still_serves(server, worker)


def sealed(size: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def is_refused(server: ControlServer, said: bytes, fd: int) -> None:
    """With this descriptor, which is closed."""
    try:
        with connect(server) as connection:
            socket.send_fds(connection, [said], [fd])
            assert is_hung_up(connection)
    finally:
        os.close(fd)


def board_size() -> int:
    board = WatchBoard.create()
    try:
        return os.fstat(board.fd).st_size
    finally:
        board.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: os.open("/dev/null", os.O_RDWR),
        lambda: os.open("/proc/self/status", os.O_RDONLY),
        lambda: os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR),
        lambda: os.open("/", os.O_RDONLY),
        lambda: sealed(board_size(), 0),
        lambda: sealed(board_size(), fcntl.F_SEAL_GROW),
        lambda: sealed(8, fcntl.F_SEAL_SHRINK),
        lambda: sealed(0, fcntl.F_SEAL_SHRINK),
    ],
    ids=["null", "proc", "file", "directory", "no seal", "wrong seal", "short", "empty"],
)
def test_descriptors_that_are_no_board(server: ControlServer, worker: Any, make: Callable[[], int]) -> None:
    is_refused(server, line(worker(3)["INPROCESS_LAUNCHER_KEY"], say="watch"), make())
    assert not is_watched(server, 3)


def memory(text: str) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(fd, text.encode())
    return fd


@pytest.mark.parametrize(
    "make",
    [
        lambda: os.open("/dev/zero", os.O_RDONLY),
        lambda: os.open("/proc/self/status", os.O_RDONLY),
        lambda: os.eventfd(0),
        lambda: memory(""),
        lambda: memory("[]"),
        lambda: memory('{"names": [], "own": []}'),
        lambda: memory('{"names": "abc", "own": [], "environ": {}}'),
        lambda: memory('{"names": [1], "own": [], "environ": {}}'),
        lambda: memory('{"names": [], "own": {}, "environ": {}}'),
        lambda: memory('{"names": [], "own": [], "environ": {"A": 1}}'),
        lambda: memory('{"names": [], "own": [], "environ": []}'),
        lambda: memory(json.dumps({"names": ["a" * 100] * 50_000, "own": [], "environ": {}})),
    ],
)
def test_descriptors_that_are_no_modules(server: ControlServer, worker: Any, make: Callable[[], int]) -> None:
    key = worker(3)["INPROCESS_LAUNCHER_KEY"]
    is_refused(server, line(key, say="modules"), make())
    with connect(server) as connection:
        connection.sendall(line(key, say="modules"))
        assert is_hung_up(connection)
    assert server.modules() is None
    still_serves(server, worker)


def test_more_descriptors_than_one(server: ControlServer, worker: Any) -> None:
    """At once, or one with each letter of a line that never ends."""
    key = worker(3)["INPROCESS_LAUNCHER_KEY"]
    with connect(server) as connection, open(os.devnull) as null:
        socket.send_fds(connection, [line(key, say="wrapped")], [null.fileno()] * 50)
        assert is_hung_up(connection)
    with connect(server) as connection, open(os.devnull) as null:
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                socket.send_fds(connection, [b"{"], [null.fileno()])
        assert is_hung_up(connection)
    still_serves(server, worker)


def test_whatever_a_board_shows(server: ControlServer, worker: Any) -> None:
    worker(3)
    with monitored() as watch:
        assert watch._board is not None
        slots = watch._board.slots
        for value in (-1, 1, -(1 << 63), (1 << 63) - 1):
            for slot in range(len(slots)):
                slots[slot] = value
            watch._board._memory[88:] = b"\xff\x1b\n" * 21 + b"!"
            found = server.overdue()
            assert all(each.reason.isprintable() for each in found)
            assert bool(found) == (value == 1)


def test_a_line_that_breaks_off(server: ControlServer, worker: Any) -> None:
    key = worker(3)["INPROCESS_LAUNCHER_KEY"]
    board = WatchBoard.create()
    with connect(server) as connection:
        socket.send_fds(connection, [line(key, say="watch")[:-5]], [board.fd])
    board.close()
    with connect(server) as connection:
        for letter in line(key, say="wrapped"):
            connection.send(bytes([letter]))
        heard(server)
    assert server.is_wrapped(3), "a line that comes in pieces is a line"
    assert not is_watched(server, 3)


def test_a_worker_that_does_not_read_its_answers(server: ControlServer, worker: Any) -> None:
    key = worker(3)["INPROCESS_LAUNCHER_KEY"]
    logging.getLogger("inprocess.launcher").disabled = True
    try:
        with connect(server) as connection, contextlib.suppress(ConnectionError):
            for _ in range(1_000_000):
                connection.sendall(line(key, say="ask", action="continue", reason="") * 100)
            pytest.fail("it was listened to for ever")
    finally:
        logging.getLogger("inprocess.launcher").disabled = False
    assert 0 < len(server.requests()) <= control.MAX_REQUESTS
    still_serves(server, worker)


def test_more_connections_than_fit(server: ControlServer, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_CONNECTIONS", 2)
    with connect(server), connect(server):
        heard(server)
        with connect(server) as third:
            assert is_hung_up(third)
    heard(server)
    still_serves(server, worker)


def test_another_user_is_not_listened_to(server: ControlServer, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(3)
    uid = os.geteuid()
    monkeypatch.setattr(control.os, "geteuid", lambda: uid + 1)
    assert not monitored().watched
    with connect(server) as connection:
        assert is_hung_up(connection)


def test_an_error_inside_does_not_end_it(
    server: ControlServer, worker: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    worker(3)
    with monkeypatch.context() as broken:
        broken.setattr(control, "ACTIONS", None)
        with pytest.raises(RestartError):
            ask_launcher("continue", "x")
    assert "led to an error" in caplog.text
    still_serves(server, worker)


# --- the server itself --------------------------------------------------------------------------------------------


def test_it_is_private_and_leaves_nothing(worker: Any, server: ControlServer) -> None:
    environ = worker(3)
    directory = Path(environ["INPROCESS_LAUNCHER"]).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    watch = monitored()
    server.close()
    server.close()
    assert not directory.exists()
    watch.ping()
    watch.close()
    announce_wrapped()
    assert not monitored().watched
    assert (server.overdue(), server.requests(), server.is_wrapped(3)) == ([], [], False)
    server.ended(3)


def test_a_long_name_of_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with contextlib.closing(ControlServer()) as server:
        connect(server).close()
        assert not list(long.iterdir())


def test_what_a_killed_launcher_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: neither a live one's directory, nor one that is just being made, nor what a link points to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with contextlib.closing(ControlServer()) as alive:
        names = ("dead", "making", "target")
        dead, making, target = (tmp_path / f"{control_socket.PREFIX * (name != 'target')}{name}" for name in names)
        for directory, name in ((dead, "control"), (making, "control.new"), (target, "control")):
            directory.mkdir(0o700)
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(str(directory / name))
        link = tmp_path / f"{control_socket.PREFIX}link"
        link.symlink_to(target)
        (tmp_path / f"{control_socket.PREFIX}file").touch()
        with contextlib.closing(ControlServer()):
            assert not dead.exists()
            assert making.exists() and target.exists() and link.is_symlink()
            connect(alive).close()


# --- the worker's side --------------------------------------------------------------------------------------------


def test_without_a_launcher_it_measures_and_says_so_once(time: Time, caplog: Any) -> None:
    with monitored() as watch, monitored():
        assert not watch.watched
        time.passes(3)
        watch.ping()
        time.passes(5)
        watch.ping()
        for duration in (1, 4, 2):
            with watch.section("save"):
                time.passes(duration)
            time.passes(6)
        assert watch.timeouts.calculate() == {
            "first": 15.0,
            "heartbeat": 30.0,
            "out_of_section": 30.0,
            "sections": {"save": 20.0},
        }
    assert caplog.text.count("INPROCESS_LAUNCHER is not set") == 1
    announce_wrapped()


def test_learned_timeouts_count_once_they_are_calculated(server: ControlServer, time: Time, worker: Any) -> None:
    worker(3)
    with monitored() as watch:
        watch.ping()
        for _ in range(3):
            time.passes(2)
            watch.ping()
            with watch.section("save"):
                time.passes(8)
        time.passes(20)
        assert overdue(server) == []
        watch.timeouts.calculate()
        learned = [(3, "learned, in place of rank_heartbeat_timeout")]
        assert overdue(server) == learned, "2 s between pings, so 10 s from now on"
        with watch.section("new"):
            time.passes(29)
            assert overdue(server) == [], "in a section that is not known yet: as configured"
            time.passes(1)
            assert overdue(server) == [(3, "rank_heartbeat_timeout")]
        with watch.section("save"):
            time.passes(39)
            assert overdue(server) == []
            time.passes(1)
            assert [each.reason for each in server.overdue()] == [
                "in section 'save' for more than 40 s (learned limit of this section)"
            ]
        with watch.section("save", timeout=1):
            time.passes(1)
            assert server.overdue()[0].reason == "in section 'save' for more than 1 s (the timeout given to section())"
    state = watch.timeouts.state_dict()
    worker(3)
    with monitored() as again:
        again.timeouts.load_state_dict(state)
        again.ping()
        time.passes(10)
        assert overdue(server) == learned


@pytest.mark.parametrize("limited", [True, False])
def test_time_between_sections_that_is_unlimited_stays_so(
    time: Time, worker: Callable[[int], dict[str, str]], server: ControlServer, limited: bool
) -> None:
    """calculate() replaces limits, it makes none where the launcher was told that there is none."""
    outside = 60.0 if limited else None
    server._settings = dataclasses.replace(SETTINGS, rank_out_of_section_timeout=outside, rank_heartbeat_timeout=None)
    worker(3)
    with monitored() as watch:
        for _ in range(2):
            with watch.section("step"):
                time.passes(1)
            time.passes(2)
        found = watch.timeouts.calculate()
        assert found["out_of_section"] == (10.0 if limited else None)
        assert watch.timeouts.state_dict()["out_of_section"] == 2.0, "measured all the same"
        time.passes(9)
        assert overdue(server) == ([(3, "learned, in place of rank_out_of_section_timeout")] if limited else [])
        time.passes(10_000)
        assert bool(overdue(server)) == limited


@pytest.mark.parametrize("timeout", [0, -1, "soon"])
def test_timeout_of_a_section_must_be_positive(timeout: Any) -> None:
    with monitored() as watch, pytest.raises(OptionError, match="timeout"), watch.section("save", timeout):
        pass


def test_what_cannot_be_asked(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"INPROCESS_LAUNCHER is not set.*inprocess run"):
        ask_launcher("continue", "x")
    with pytest.raises(OptionError, match=r"unknown action='shutdown': did you mean 'shutdown_workload'"):
        ask_launcher("shutdown", "x")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"known actions: continue, exclude_this_node, shutdown_workload"):
        ask_launcher("xyz", "x")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="must say why"):
        ask_launcher("continue", " \n")


class Silent:
    """A launcher that was stopped, or that answers like this."""

    def __init__(self, path: Path, answer: bytes = b"") -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.environ = {"INPROCESS_LAUNCHER": str(path), "INPROCESS_LAUNCHER_KEY": "key"}


def test_a_launcher_that_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(launcher, "ANSWER_TIMEOUT_S", 0.05)
    silent = Silent(tmp_path / "s")
    with silent.listener:
        for name, value in silent.environ.items():
            monkeypatch.setenv(name, value)
        announce_wrapped()
        assert not monitored().watched
        assert "its launcher does not watch it: timed out" in caplog.text
        with pytest.raises(TimeoutError, match=r"did not answer within 0.05 s"):
            ask_launcher("continue", "x")
    announce_wrapped()
    with pytest.raises(RestartError, match="cannot be reached"):
        ask_launcher("continue", "x")


def test_an_answer_without_limits(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed at once, not by a collection of garbage."""
    worker(3)
    here, there = socket.socketpair()
    monkeypatch.setattr(watching, "ask", lambda *_: (here, {"limits": "none"}))
    with there:
        assert not monitored().watched
        assert here.fileno() == -1


def test_a_launcher_that_refuses(server: ControlServer, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(3)
    monkeypatch.setattr(ControlServer, "_ask", lambda *_: {"ok": False, "why": "not\nnow"})
    with pytest.raises(RestartError, match="the launcher refused: not now"):
        ask_launcher("continue", "x")
    monkeypatch.setattr(ControlServer, "_ask", lambda *_: ["ok"])
    with pytest.raises(RestartError, match=r"cannot be reached: .* is no answer"):
        ask_launcher("continue", "x")
