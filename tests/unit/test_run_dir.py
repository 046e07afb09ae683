"""The launcher's directory for events: what the user said, its name, which are removed, what is counted in it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from inprocess.call import launch_variables
from inprocess.events.files import EventFile
from inprocess.events.record import Event, Header
from inprocess.launcher import run_dir
from inprocess.launcher.run_dir import PARENT, RunDirectory, chosen, count_restarts, new_name, tidy


@pytest.mark.parametrize(
    ("option", "variable", "path"),
    [
        (None, None, None),
        (None, "", ""),
        (None, "none", ""),
        (None, "/a", "/a"),
        ("", "/a", ""),
        ("none", "/a", ""),
        ("/b", "/a", "/b"),
        ("/b", "none", "/b"),
    ],
)
def test_what_the_user_said(option: str | None, variable: str | None, path: str | None) -> None:
    assert chosen(option, {} if variable is None else {"INPROCESS_RUN_DIR": variable}) == path


def test_a_rank_that_is_told_none_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INPROCESS_RUN_DIR", "none")
    assert launch_variables.run_dir(None) is None
    assert launch_variables.run_dir("/none") == "/none"
    monkeypatch.setenv("INPROCESS_RUN_DIR", "nonesuch")
    assert launch_variables.run_dir(None) == os.path.abspath("nonesuch")


@pytest.mark.parametrize(
    ("given", "end"),
    [("job 7/../x", "-job-7-..-x"), ("../" * 50, "."), ("é", "")],
)
def test_a_name_is_one_part_of_a_path(given: str, end: str) -> None:
    name = new_name(given)
    assert run_dir._NAME.fullmatch(name)
    assert end in name
    assert "/" not in name


def _same(_: str, proposal: str) -> str:
    return proposal


def test_one_that_is_made_is_used_and_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = RunDirectory(None, "seven")
    one.open(_same)
    assert one.path is not None
    path = Path(one.path)
    assert path.parent == tmp_path / PARENT
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / ".gitignore").read_text() == "*\n"
    assert one.environment() == {"INPROCESS_RUN_DIR": str(path)}
    tidy(str(path.parent), kept=0)
    assert path.exists()  # in use
    one.close()  # nobody wrote anything
    assert not path.parent.exists()


def test_all_nodes_take_what_was_agreed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = [RunDirectory(None, "") for _ in range(2)]
    for node in nodes:
        node.open(lambda key, proposal: f"20260102-030405-{key}")
    assert nodes[0].path == nodes[1].path == str(tmp_path / PARENT / "20260102-030405-run_dir")
    nodes[0].close()
    assert os.path.exists(nodes[1].path or "")  # the other one still has it
    nodes[1].close()
    assert not (tmp_path / PARENT).exists()


@pytest.mark.parametrize("name", ["../../etc", "", "20260102-030405-a/b", "x"])
def test_a_name_of_somebody_else_is_not_used(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = RunDirectory(None, "")
    one.open(lambda *_: name)
    assert one.path is None
    assert list(tmp_path.iterdir()) == []


def test_where_none_can_be_made_the_job_runs_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / PARENT).write_text("a file")
    one = RunDirectory(None, "")
    one.open(_same)
    assert one.environment() == {"INPROCESS_RUN_DIR": "none"}
    one.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "is no folder" in line
    assert "--run-dir DIR, or none with --run-dir none" in line


def test_old_ones_go_but_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"20260102-0304{second:02}-x" for second in range(5)]
    for name in names:
        (tmp_path / name / "events").mkdir(parents=True)
        (tmp_path / name / ".gitignore").write_text("*\n")
    (tmp_path / names[0] / ".gitignore").unlink()  # not made by a launcher
    (tmp_path / "mine").mkdir()
    (tmp_path / "20250101-000000-link").symlink_to(tmp_path / "mine")
    tidy(str(tmp_path), kept=2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["20250101-000000-link", names[0], *names[3:], "mine"]


def _write(path: Path, rank: int, pid: int, kinds: list[str], host: str = "") -> None:
    header = Header("j", "rank", rank, pid, host=host or socket.gethostname())
    file = EventFile(str(path), header)
    for kind in kinds:
        file.write(Event(1.0, 1.0, 0, 0, 0, rank, "run", kind, {"message": '"kind":"restart"'}))
    file.close()


def test_restarts_are_counted_by_who_saw_most(tmp_path: Path) -> None:
    assert count_restarts(str(tmp_path)) == (0, False)
    _write(tmp_path, 0, 10, ["restart", "run", "restart", "restart"])
    _write(tmp_path, 1, 11, ["restart", "died"])
    _write(tmp_path, 1, 12, ["restart"])
    _write(tmp_path, 2, 13, ["restart"] * 9, host="elsewhere")
    assert count_restarts(str(tmp_path)) == (3, False)
    _write(tmp_path, 1, 12, ["abort"])
    assert count_restarts(str(tmp_path)) == (3, True)
    earlier = [path.name for path in (tmp_path / "events").iterdir()]
    _write(tmp_path, 0, 14, ["restart"])
    assert count_restarts(str(tmp_path), earlier) == (1, False)


def test_restarts_are_counted_of_which_the_events_are_gone(tmp_path: Path) -> None:
    """Two calls, with 31 and 7 restarts; of the first ones the lines have made room for newer ones."""
    file = EventFile(str(tmp_path), Header("j", "rank", 0, 10, host=socket.gethostname()))
    for call, number in ((0, 30), (0, 31), (1, 6), (1, 7)):
        file.write(Event(1.0, 1.0, call, number, 0, 0, "end round", "restart", {"restart": number, "why": "x"}))
    file.close()
    assert count_restarts(str(tmp_path)) == (38, False)
