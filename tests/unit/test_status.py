"""What `inprocess status` makes of live files: whole, half, hostile, of another version, stale, or none at all."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inprocess import __main__ as command
from inprocess.events import status_files
from inprocess.reports import dump, live_reading, status
from inprocess.reports.live_reading import RankNow, current, fetch, read
from inprocess.system import clock
from inprocess.system.private_folder import look

HOSTILE = "\x1b[2J\x1b]0;x\x07\n\u202e rank 9: fine\x00\ud800"
DOCUMENT = Path(__file__).parents[2] / "docs" / "status.md"


def live(initial_rank: int = 0, ago: float = 0.0, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "format": "inprocess-live",
        "version": 1,
        "job": "10.0.0.1:29500",
        "host": "node7",
        "pid": 100 + initial_rank,
        "monitor_pid": 200 + initial_rank,
        "initial_rank": initial_rank,
        "rank": initial_rank,
        "role": "active",
        "call": 0,
        "iteration": 2,
        "phase": "run",
        "state": "running",
        "steps": 1200,
        "progress_age": 0.25,
        "heartbeat_age": None,
        "world_size": 3,
        "reserves": 0,
        "memory_bytes": 3 << 30,
        "time": clock.monotonic() - ago,
        "wall_time": clock.wall() - ago,
    }
    return {**found, **fields}


def write(run_dir: Path, *files: dict[str, Any] | bytes) -> None:
    folder = run_dir / "live"
    folder.mkdir(exist_ok=True)
    for file in files:
        data = file if isinstance(file, bytes) else json.dumps(file).encode()
        (folder / f"monitor-{len(list(folder.iterdir()))}.json").write_bytes(data)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[str]:
    assert status.main(arguments) == code
    return capsys.readouterr().out.splitlines()


def test_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, live(0), live(2, rank=1, steps=1199, atomic=True), live(3, role="reserve", rank=2, world_size=2))
    write(
        tmp_path, live(1, state="dead", memory_bytes=None, ago=90.0, iteration=1), live(4, ago=14.0, progress_age=3.0)
    )
    first, heads, *rows = shown(capsys, str(tmp_path))
    assert first == "3 of 5 ranks running, world size 3, iteration 2, 1 dead, 1 stale; job 10.0.0.1:29500"
    assert heads.split() == list(status.HEADS)
    cells = [re.split(r"  +", row) for row in rows]
    assert cells[0] == ["0", "node7", "100", "run", "2", "1200", "0.2 s", "-", "3072 MiB", "running"]
    assert cells[1][:1] == ["1"] and cells[1][-2:] == ["-", "dead"]
    assert cells[2][0] == "2 -> 1" and cells[2][3] == "run, atomic"
    assert cells[3][-1] == "reserve"
    assert cells[4][-1] == "stale for 14.0 s"


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"ago": 9.0}, "running"),
        ({"ago": 11.0}, "stale for 11.0 s"),
        ({"ago": 11.0, "state": "left"}, "left"),
        ({"ago": 11.0, "state": "dead"}, "dead"),
        ({"ago": 11.0, "interval": 32.0}, "running"),
        ({"ago": 200.0, "interval": 32.0}, "stale for 200 s"),
        ({"ago": 11.0, "interval": 1e300}, "stale for 11.0 s"),
        ({"ago": 11.0, "interval": "x"}, "stale for 11.0 s"),
        ({"ago": -3600.0}, "running"),
        ({"process_state": "T"}, "stopped"),
        ({"process_state": ["T"]}, "running"),
    ],
)
def test_the_state_of_a_rank(fields: dict[str, Any], state: str) -> None:
    assert status._state(RankNow(live(**fields), clock.wall())) == state


def test_one_file_for_each_rank_of_the_job_that_runs(tmp_path: Path) -> None:
    """A new process in the slot, a new call, a monitor that stays for others, a launch before: the one that counts."""
    write(tmp_path, live(0, pid=1, state="dead"), live(0, pid=2, ago=5.0), live(0, pid=3, ago=60.0))
    write(tmp_path, live(1, pid=4, state="left"), live(1, pid=5, state="left", ago=5.0), live(1, pid=6, ago=90.0))
    write(tmp_path, live(0, pid=7, job="before", state="left"), live(1, pid=8, job="before", ago=90.0))
    found, problems = read(str(tmp_path))
    ((job, ranks),) = current(found)
    assert (job, [rank.live["pid"] for rank in ranks], problems) == ("10.0.0.1:29500", [2, 4], [])
    ended = [rank for rank in found if not rank.is_running or rank.is_stale]
    assert [job for job, _ in current(ended)] != [] and len(current(ended)) == 1
    both = [*found, RankNow(live(0, job="beside"), clock.wall())]
    assert {job for job, _ in current(both)} == {"10.0.0.1:29500", "beside"}


BROKEN = {
    "half a file": json.dumps(live()).encode()[:200],
    "empty": b"",
    "no JSON": b"\xff\x00",
    "a list": b"[]",
    "deep": b"[" * 10_000,
    "another version": live(version=2),
    "another format": live(format=HOSTILE),
    "a field of another type": live(pid="1"),
    "a bool": live(steps=True),
    "NaN": json.dumps(live(progress_age=float("nan"))).encode(),
    "too much": live(memory_bytes=1 << 80),
    "less than nothing": live(rank=-1),
    "a long text": live(host="x" * 400),
    "an unknown state": live(state="fine"),
    "a long file": json.dumps(live(more="x" * status_files.MAX_FILE_BYTES)).encode(),
    "a field is missing": {name: value for name, value in live().items() if name != "wall_time"},
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write(tmp_path, live(0), BROKEN[name])
    assert status.main([str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.err.startswith("inprocess status: monitor-1.json: ") and len(told.err.splitlines()) == 1
    assert len(told.err) < 500 and "\x1b" not in told.err and len(told.out.splitlines()) == 3


def test_nothing_but_regular_files(tmp_path: Path) -> None:
    write(tmp_path, live(0))
    folder = tmp_path / "live"
    os.mkfifo(folder / "pipe.json")
    (folder / "link.json").symlink_to(folder / "monitor-0.json")
    (folder / "folder.json").mkdir()
    (folder / "monitor-0.json.77").write_text("half of it")
    found, problems = read(str(tmp_path))
    assert len(found) == 1 and {problem.partition(":")[0] for problem in problems} == {
        "pipe.json",
        "link.json",
        "folder.json",
    }


def test_hostile_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, live(0, job=HOSTILE, host=HOSTILE, phase=HOSTILE))
    lines = shown(capsys, str(tmp_path))
    assert len(lines) == 3 and all(line.isprintable() for line in lines)
    answer = {
        "host": HOSTILE,
        "pid": HOSTILE,
        "why": HOSTILE,
        "waits": True,
        "process": {"state": HOSTILE, "wchan": HOSTILE, "syscall": [HOSTILE]},
        "threads": [
            {"name": HOSTILE, "main": False, "frames": [HOSTILE] * 3},
            {"name": "", "main": True, "frames": [HOSTILE * 100]},
        ],
    }
    found = list(dump.lines({0: answer}))
    assert all(line.isprintable() for line in found) and max(map(len, found)) <= 450


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["/no/such/folder"], "is no directory"),
        (["HERE"], "no folder 'live' in"),
        (["EMPTY"], "says nothing of any rank"),
        (["EMPTY", "--dump"], "says nothing of any rank"),
        ([], "set INPROCESS_RUN_DIR"),
        (["HERE", "--dump", "--watch"], "leave --watch out"),
        (["node7:9000", "--dump"], "needs the run directory"),
        (["HERE", "--timeout", "0"], "not between"),
        (["HERE", "--timeout", "nan"], "not between"),
    ],
)
def test_what_cannot_be_shown(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.delenv("INPROCESS_RUN_DIR", raising=False)
    (tmp_path / "empty" / "live").mkdir(parents=True)
    places = {"HERE": str(tmp_path), "EMPTY": str(tmp_path / "empty")}
    assert status.main([places.get(each, each) for each in arguments]) == 2
    assert says in capsys.readouterr().err


def test_the_variable_names_the_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, live(0))
    monkeypatch.setenv("INPROCESS_RUN_DIR", str(tmp_path))
    assert command.main(["status", "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert (rank["stale"], rank["pid"], rank["format"]) == (False, 100, "inprocess-live") and rank["age"] < 10


# --- from an address ---------------------------------------------------------------------------------------------


class Endpoint(http.server.BaseHTTPRequestHandler):
    code, body = 200, b""

    def do_GET(self) -> None:
        self.send_response(self.code)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_from_an_address(endpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Endpoint, "body", json.dumps({"ranks": [live(0), live(1), 7]}).encode())
    assert len(shown(capsys, f"http://{endpoint}/")) == 4
    assert "entry 2: it is no JSON object" in fetch(endpoint)[1][0]


@pytest.mark.parametrize(
    ("code", "body", "says"),
    [
        (404, b"", "answers with status 404"),
        (200, b"<html>", "does not answer with the status of a job"),
        (200, b'{"ranks": 7}', "does not answer with the status of a job"),
        (200, b"[]", "does not answer with the status of a job"),
        (200, b'{"ranks": []}', "says nothing of any rank"),
    ],
)
def test_an_address_of_something_else(
    endpoint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    body: bytes,
    says: str,
) -> None:
    monkeypatch.setattr(Endpoint, "code", code)
    monkeypatch.setattr(Endpoint, "body", body)
    assert status.main([endpoint]) == 2
    assert says in capsys.readouterr().err


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(["127.0.0.1:1"]) == 2
    assert "http://127.0.0.1:1/status does not answer: " in capsys.readouterr().err


def test_an_answer_that_comes_byte_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and the answer never ends."""
    monkeypatch.setattr(live_reading, "LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def dribble() -> None:
            with server.accept()[0] as caller, contextlib.suppress(OSError):
                caller.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                while not over.wait(0.01):
                    caller.sendall(b" ")

        dribbling = threading.Thread(target=dribble)
        dribbling.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        try:
            with pytest.raises(OSError, match=rf"^http://{address}/status does not answer: not within 0\.2 s$"):
                fetch(address)
        finally:
            over.set()
            dribbling.join()


@pytest.mark.parametrize("port", ["0", "99999", "123456", "65536"])
def test_a_port_that_is_none(capsys: pytest.CaptureFixture[str], port: str) -> None:
    """99999 was taken modulo 65536, and another program asked."""
    assert status.main([f"127.0.0.1:{port}"]) == 2
    assert (
        f"127.0.0.1:{port}: '{port}' is no port: pass HOST:PORT with a port from 1 to 65535" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("source", "address"),
    [
        ("node7:9000", "node7:9000"),
        ("http://node7:9000/", "node7:9000"),
        ("[::1]:9000", "[::1]:9000"),
        ("/scratch/job:9000", ""),
        ("https://node7:9000", ""),
        ("user@node7:9000", ""),
        ("run", ""),
    ],
)
def test_what_is_an_address(source: str, address: str) -> None:
    assert status._address(source) == address


# --- again and again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_screen", [False, True])
def test_watching_until_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_screen: bool
) -> None:
    """It begins before there is a job."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_screen)
    looks: list[float | None] = []

    def wait(_: threading.Event, seconds: float | None = None) -> bool:
        looks.append(seconds)
        if len(looks) == 1:
            write(tmp_path, live(0))
        if len(looks) == 3:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(threading.Event, "wait", wait)
    assert status.main([str(tmp_path), "--watch"]) == 0
    text = capsys.readouterr().out
    assert text.count(status.CLEAR) == (3 if is_screen else 0) and "no folder 'live' in" in text
    assert text.count("1 of 1 ranks running") == 2 and all(0 < (seconds or 0) <= 2 for seconds in looks)


def test_what_a_screen_has_no_room_for() -> None:
    lines = [f"line {number}" for number in range(50)]
    assert status._fitting(lines, 6, 10) == [
        "line 0",
        "line 1",
        *(f"line {n}" for n in range(2, 8)),
        "... and 42 lines more",
    ]
    assert status._fitting(lines[:3], 4, 10) == ["line"] * 3


# --- stacks ------------------------------------------------------------------------------------------------------


def answer(*threads: tuple[str, bool, list[str]], **more: Any) -> dict[str, Any]:
    found = [{"name": name, "main": main, "frames": frames} for name, main, frames in threads]
    return {"why": "", "threads": found, "process": {}, "host": "node7", "pid": 7, "waits": None, **more}


LOOP = f"/x{os.sep}inprocess{os.sep}call{os.sep}loop.py:190 in _step"


def test_ranks_with_the_same_stack_are_together() -> None:
    waits = answer(("MainThread", True, ["torch.py:1 in all_reduce", "train.py:9 in train", LOOP]), waits=True)
    lone = answer(("MainThread", True, ["loader.py:88 in next_batch", "train.py:5 in train", LOOP]), waits=False)
    librarys = ("0x7", False, [f"/x{os.sep}inprocess{os.sep}a.py:1 in f", f"/y{os.sep}threading.py:9 in run"])
    gone = answer(why="no answer within 10 s", process={"state": "T", "wchan": "do_signal_stop", "syscall": "0 0x1"})
    answers = {
        0: waits,
        1: lone,
        2: waits,
        3: gone,
        4: {**lone, "threads": [*lone["threads"], {"name": "w", "main": False, "frames": ["w.py:1 in w"]}]},
    }
    answers[1] = {**lone, "threads": [*lone["threads"], dict(zip(("name", "main", "frames"), librarys, strict=True))]}
    text = "\n".join(dump.lines({**answers, 5: waits}))
    assert text == (
        "rank 3 (node7, process 7): no answer within 10 s; /proc says: T (stopped), wchan do_signal_stop\n\n"
        "ranks 1, 4, innermost line first:\n  loader.py:88 in next_batch\n  train.py:5 in train\n\n"
        "ranks 0, 2, 5, which wait for others, innermost line first:\n"
        "  torch.py:1 in all_reduce\n  train.py:9 in train\n\n"
        "rank 4, thread w, innermost line first:\n  w.py:1 in w"
    )


@pytest.mark.parametrize(
    "broken", [b"", b"{", b"[]", json.dumps({"format": "inprocess-dump", "version": 2}).encode(), b"x" * (2 << 20)]
)
def test_an_answer_that_cannot_be_read(tmp_path: Path, broken: bytes) -> None:
    (tmp_path / "a.json").write_bytes(broken)
    with look(str(tmp_path)) as folder:
        found = dump._read(folder, "a.json")
    assert found["why"].startswith("its answer cannot be read") and found["threads"] == []


# --- the page ----------------------------------------------------------------------------------------------------


def test_the_page_has_all_fields() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert [row for row in rows if row in status_files.FIELDS] == list(status_files.FIELDS)
