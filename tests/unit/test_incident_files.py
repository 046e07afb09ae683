"""Incidents as files, from made-up events: pages that hold anything, what is kept, who writes and when."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from inprocess.events import incidents
from inprocess.events.incidents import FIRST_S, NEXT_S, IncidentReports
from inprocess.reports import writer
from inprocess.reports.history import histories
from inprocess.reports.incident import all_incidents
from inprocess.reports.reading import read

from .test_reports import Written, record, restart, stacks

HOSTILE = "</pre><script>alert(1)</script>\x1b[31m\u202e\x00\"'&<img src=x onerror=y>\ud800"


class Tags(HTMLParser):
    """What is in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]
        assert not [name for name, _ in attrs if name.startswith("on")]


@pytest.fixture
def write(tmp_path: Path) -> Written:
    return Written(tmp_path)


def raises(write: Written, number: int, rank: int = 1, message: str = "ValueError: x", pings: int = 3) -> None:
    """An incident in three ranks."""
    at, found = float(10 * number), record(rank, "exception", message, "/a/train.py:7 in train") | {"pings": pings}
    for each in range(3):
        write(each, at - 1, "run", iteration=number - 1, world_size=3)
    more = {name: found[name] for name in ("rank", "interruption", "initial_rank", "message", "where")}
    lines = ["/a/train.py:7 in train"]
    write(rank, at, "raised", iteration=number - 1, pings=pings, lines=lines, **more)
    for each in {0, 1, 2} - {rank}:
        write(each, at + 1e-3, "interrupted", iteration=number - 1)
        write(each, at + 1e-3, "stacks", iteration=number - 1, **stacks("/x/site-packages/torch/y.py:1 in all_reduce"))
    restart(write, range(3), at, [found], number)


def page_of(run_dir: Path, number: int) -> str:
    return (run_dir / "incidents" / f"{number:04d}" / "incident.html").read_text()


def told(run_dir: Path, number: int) -> Any:
    return json.loads((run_dir / "incidents" / f"{number:04d}" / "incident.json").read_text())


def test_files_of_two_incidents(write: Written, tmp_path: Path) -> None:
    raises(write, 1)
    raises(write, 2, rank=2)
    assert writer.write(str(tmp_path))
    assert [told(tmp_path, number)["verdict"]["initial_rank"] for number in (1, 2)] == [1, 2]
    assert [each["initial_rank"] for each in told(tmp_path, 1)["ranks"]] == [0, 1, 2]
    assert told(tmp_path, 1)["ranks"][0]["stack"] == ["/x/site-packages/torch/y.py:1 in all_reduce"]
    page = page_of(tmp_path, 2)
    assert "Rank 2: exception at train.py:7 train" in page and "ranks 0-1" in page
    index = (tmp_path / "index.html").read_text()
    assert Tags(index).links == [f"incidents/000{n}/incident.html" for n in (2, 1)]
    assert index.count("<svg") == 1 and "3 ranks, 2 restarts" in index and "restart 2: rank 2: exception" in index
    assert json.loads((tmp_path / "incidents/latest.json").read_text()) == {"job": [0, 1]}
    modes = {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "incidents").rglob("*") if path.is_file()}
    assert modes == {"0o600"}


def test_nobody_has_begun_again_yet(write: Written, tmp_path: Path) -> None:
    """While the others are waited for, the number of ranks is not known, and not 0."""
    write(0, 0.0, "run", world_size=2, before=0)
    write(1, 0.0, "run", world_size=2, before=0)
    write(1, 1.0, "raised", **record(1, "exception", "ValueError: x"))
    write(0, 1.1, "interrupted")
    assert not writer.write(str(tmp_path))
    assert told(tmp_path, 1)["world_size"] == {"before": 2, "after": None}
    assert "2 &rarr; ?" in page_of(tmp_path, 1) and "2 &rarr; ?" in (tmp_path / "index.html").read_text()


def test_texts_in_a_page_may_hold_anything(write: Written, tmp_path: Path) -> None:
    raises(write, 1, message=f"ValueError: {HOSTILE}")
    writer.write(str(tmp_path))
    for page in (page_of(tmp_path, 1), (tmp_path / "index.html").read_text()):
        tags = Tags(page)
        assert not {"script", "img", "link", "iframe"} & set(tags.found)
        assert all(link.startswith("incidents/") for link in tags.links)
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", page)
        assert "default-src 'none'" in page


def test_a_file_that_says_the_same_is_left_alone(write: Written, tmp_path: Path) -> None:
    raises(write, 1)
    writer.write(str(tmp_path))
    before = {path: path.stat().st_ino for path in (tmp_path / "incidents").rglob("*")}
    writer.write(str(tmp_path))
    assert {path: path.stat().st_ino for path in (tmp_path / "incidents").rglob("*")} == before
    raises(write, 2)  # the first one's page does not change
    writer.write(str(tmp_path))
    after = {path: path.stat().st_ino for path in (tmp_path / "incidents" / "0001").iterdir()}
    assert after == {path: before[path] for path in after}


def command(run_dir: Path, **more: Any) -> dict[str, Any]:
    """What a monitor tells the program."""
    told = {"run_dir": str(run_dir), "unless": None, "after": 0.0, "before": None, "last": False, "writes": True}
    return told | more


@pytest.mark.parametrize(
    ("last", "asked", "again"),
    [(False, False, True), (False, True, False), (True, False, False)],
    ids=["the job goes on", "its monitor ends", "the job ends"],
)
def test_what_was_incomplete_is_written_again(
    write: Written, tmp_path: Path, monkeypatch: Any, last: bool, asked: bool, again: bool
) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        for rank in range(3):
            write(rank, 10.1, "first_step", iteration=1)
        return asked

    raises(write, 1)
    for path in (tmp_path / "events").iterdir():
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(line for line in lines if b"first_step" not in line))
    monkeypatch.setattr(writer, "_is_to_end", wait)
    writer.work(command(tmp_path, last=last))
    assert waits == [] if last else [writer.AGAIN_S]
    assert (told(tmp_path, 1)["phases"]["first_step"] is not None) is again


@pytest.mark.parametrize(("iteration", "writes"), [(0, False), (1, True)])
def test_another_one_looks_whether_it_was_written(
    write: Written, tmp_path: Path, monkeypatch: Any, iteration: int, writes: bool
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(writer, "_is_to_end", waits.append)
    raises(write, 1)
    writer.write(str(tmp_path))
    (tmp_path / "index.html").unlink()
    writer.work(command(tmp_path, unless=["job", 0, iteration], after=3.0))
    assert sum(waits) == (3.0 if writes else 0.0)
    assert (tmp_path / "index.html").exists() == writes


@pytest.mark.parametrize("writes", [False, True])
def test_the_last_one_waits_for_the_one_before(tmp_path: Path, monkeypatch: Any, writes: bool) -> None:
    """Also where the monitor has nothing to add."""
    codes: list[int | None] = []
    monkeypatch.setattr(writer, "write", lambda _: not codes.append(before.poll()))  # type: ignore[func-returns-value]
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as before:
        assert before.stdin is not None
        before.stdin.close()
        writer.work(command(tmp_path, before=before.pid, last=True, writes=writes))
        assert before.poll() == 0
    assert codes == [0] * writes


def test_none_is_written_beside_one_that_waits_for_a_disk(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(writer, "BEFORE_S", 0.0)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as before:
        writer.work(command(tmp_path, before=before.pid, last=True))
    assert not (tmp_path / "index.html").exists()


@pytest.mark.parametrize("mark", [b"", b"[]", b'{"job": 3}', b'{"job": ["x"]}', b"\xff"])
def test_a_mark_that_is_none(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / writer.FOLDER).mkdir(0o700)
    (tmp_path / writer.FOLDER / writer.MARK).write_bytes(mark)
    assert not writer._is_written(str(tmp_path), "job", 0, 0)


def test_only_the_latest_are_kept(write: Written, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(writer, "MAX_INCIDENTS", 2)
    for number in (1, 2):
        raises(write, number)
    writer.write(str(tmp_path))
    stale = tmp_path / "incidents" / "0002" / "incident.json.77"
    stale.touch()
    os.utime(stale, (1.0, 1.0))
    for number in (3, 4):
        raises(write, number)
        writer.write(str(tmp_path))
        assert not stale.exists()
    assert sorted(os.listdir(tmp_path / "incidents")) == ["0003", "0004", "latest.json", "summary.json"]


def test_a_pipe_in_place_of_a_file_is_replaced(write: Written, tmp_path: Path) -> None:
    raises(write, 1)
    (tmp_path / "incidents" / "0001").mkdir(parents=True)
    os.mkfifo(tmp_path / "incidents" / "0001" / "incident.json")
    writer.write(str(tmp_path))
    assert told(tmp_path, 1)["number"] == 1


def test_the_host_of_the_store_is_lost(write: Written, tmp_path: Path) -> None:
    """Nobody is left to say that its ranks are gone; rank 1 sees its connection to it close."""
    for rank in range(3):
        write(rank, 9.0, "run", world_size=3)
    for rank in (1, 2):
        write(rank, 10.0, "store_lost", role="monitor", text="the store failed")
    echo = record(1, "exception", "RuntimeError: Connection closed by peer", "/a/train.py:7 in train")
    write(1, 10.001, "raised", **(echo | {"lines": ["/a/train.py:7 in train"], "pings": 2}))
    restart(write, range(1, 3), 10.01, [])
    trails, _ = read(str(tmp_path))
    ((_, (incident,)),) = all_incidents(trails)
    assert (incident.verdict.initial_rank, incident.verdict.kind) == (0, "host_lost")


# --- what happened before -----------------------------------------------------------------------------------------


def history(run_dir: Path) -> Any:
    trails, _ = read(str(run_dir))
    return histories([incident for _, found in all_incidents(trails) for incident in found])


def test_an_error_that_repeats_itself_is_told_from_one_at_changing_moments(write: Written, tmp_path: Path) -> None:
    for number, pings in enumerate((3, 3, 5, 5, 5), 1):
        raises(write, number, message=f"ValueError: at 0x{number}f", pings=pings)
    found = history(tmp_path)
    assert [each.in_a_row for each in found] == [1, 2, 1, 2, 3]
    assert [each.is_deterministic for each in found] == [False, False, False, False, True]
    assert found[4].same_error == (1, 2, 3, 4)
    assert "3 times in a row" in found[4].lines()[0] and "not always at the same step" in found[3].lines()[0]
    assert found[0].lines() == ["nothing like it before"]


def test_another_error_between_them_ends_a_row(write: Written, tmp_path: Path) -> None:
    for number, message in enumerate(("ValueError: a", "ValueError: a", "OSError: b", "ValueError: a"), 1):
        raises(write, number, message=message)
    found = history(tmp_path)
    assert [each.in_a_row for each in found] == [1, 2, 1, 1]
    assert found[3].same_error == (1, 2) and found[3].same_place == (1, 2, 3)
    assert found[2].lines() == ["the same place before: incidents 1-2"]


def test_a_request_is_no_fault_that_repeats_itself(write: Written, tmp_path: Path) -> None:
    for number in range(1, 5):
        asked = record(1, "requested", "please")
        restart(write, range(3), 10.0 * number, [asked], number)
    assert [each.in_a_row for each in history(tmp_path)] == [1, 1, 1, 1]


# --- who writes ---------------------------------------------------------------------------------------------------


class Started(list[Any]):
    """Stands for the programs that are started."""

    ends = True

    def __init__(self) -> None:
        super().__init__()
        self.signals: list[int] = []

    def __call__(self, command: list[str], **_: Any) -> Any:
        self.append(json.loads(command[-1]))
        outer = self

        class Process:
            pid = 4711

            def poll(self) -> int | None:
                return 0 if outer.ends else None

            def send_signal(self, signum: int) -> None:
                outer.signals.append(signum)

        return Process()


@pytest.fixture
def started(monkeypatch: Any) -> Started:
    found = Started()
    monkeypatch.setattr(incidents.subprocess, "Popen", found)
    monkeypatch.setattr(incidents.os, "setpriority", lambda *_: None)
    return found


@pytest.mark.parametrize(
    ("turn", "seconds"), [(0, FIRST_S), (1, FIRST_S + NEXT_S), (2, FIRST_S + 2 * NEXT_S), (3, None)]
)
def test_the_first_member_writes_and_two_more_look(started: Started, turn: int, seconds: float | None) -> None:
    reports = IncidentReports("/run", "job", 0)
    assert reports.happened(4, turn) == seconds
    if seconds is not None:
        assert seconds < 8.0, "10 s are promised"
        assert reports.write() is None
        assert started[0]["unless"] == (None if turn == 0 else ["job", 0, 4])


def test_no_second_program_beside_one_that_does_not_end(started: Started) -> None:
    reports = IncidentReports("/run", "job", 0)
    started.ends = False
    reports.happened(0, 0)
    assert reports.write() is None
    assert reports.write() == incidents.RETRY_S
    reports.start(["no", "{}"])
    assert len(started) == 1


def test_many_incidents_while_a_program_writes_set_one_timer(started: Started) -> None:
    """And one more program begins after the last of them, which the one that runs may have missed."""
    reports = IncidentReports("/run", "job", 0)
    assert reports.happened(0, 0) == FIRST_S
    assert [reports.happened(iteration, 0) for iteration in range(1, 60)] == [None] * 59
    assert reports.write() == FIRST_S, "what happened since is not complete yet"
    started.ends = False
    assert reports.write() == incidents.RETRY_S
    assert reports.happened(60, 0) is None
    started.ends = True
    assert reports.write() == FIRST_S
    assert reports.write() is None
    assert len(started) == 3 and reports.happened(61, 0) == FIRST_S


@pytest.mark.parametrize(
    ("turn", "completed", "writes"), [(0, True, True), (1, True, False), (1, False, True), (3, False, False)]
)
@pytest.mark.parametrize("runs", [False, True])
def test_at_the_end_what_came_last_is_added(
    started: Started, turn: int, completed: bool, writes: bool, runs: bool
) -> None:
    """By the monitor's own process, once the program that runs has ended, which it waits for in any case."""
    reports = IncidentReports("/run", "job", 0)
    assert reports.last(completed) is None  # nothing has happened
    reports.happened(0, turn)
    reports.write()
    started.ends = not runs
    command = reports.last(completed)
    assert (command is not None) is (writes or runs)
    assert len(started) == 1
    assert started.signals == [signal.SIGTERM] * runs
    if command is not None:
        told = json.loads(command[-1])
        assert (told["after"], told["before"]) == (turn * NEXT_S, 4711 if runs else None)
        assert (told["writes"], told["last"]) == (writes, True)


def test_without_a_run_directory_nothing_is_started(started: Started) -> None:
    reports = IncidentReports(None, "job", 0)
    assert reports.happened(0, 0) is None
    assert reports.last(False) is None
    assert not started


def test_a_program_that_cannot_be_started_is_told(monkeypatch: Any, caplog: Any) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(11, "no processes left")

    monkeypatch.setattr(incidents.subprocess, "Popen", fails)
    reports = IncidentReports("/run", "job", 0)
    reports.happened(0, 0)
    assert reports.write() is None
    command = reports.last(False)
    assert command is not None
    reports.start(command)
