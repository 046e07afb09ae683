"""Every reader of a run directory answers whatever is in it: in full, or in one line of a problem, without a traceback.

``nox -s fuzz`` does this with thousands of directories.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inprocess import __main__ as command
from inprocess.events import digest
from inprocess.reports import endpoint, live_reading, writer

from .hostile import NASTY, fuzz
from .test_reports import Written, record, restart, stacks
from .test_status import live

#: in place of any value of a file
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1 << 62, -(1 << 62), 10**400, -(10**400), 1e308, -1e308, 1e-320),
    *("", "x" * 5000, "\ud800", "\x1b[31m", "\x00", "a\nb", "\u202e", "1" * 400, "../../x", "<script>"),
    *([], {}, [[[]]], {"x": {"x": {}}}, ["\ud800"] * 600, [10**400], {"\ud800": 10**400}, list(range(600))),
)
#: in place of the name of a file
NAMES = ("\x1b[31m.json", "rank-\x1b]0;x\x07-1.jsonl", "a\nb.json", "monitor-\udc80.json", "0001", ".json", "x" * 200)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with all files that a job leaves, nothing wrong with them."""
    root = tmp_path_factory.mktemp("whole")
    write = Written(root)
    for rank in range(2):
        write(rank, 0.1, "call", function="train", world_size=2, pid=100)
        write(rank, 0.2, "run", world_size=2, before=0)
        write(rank, 0.3, "first_step")
        write(rank, 0.1, "watching", role="monitor", training_pid=100)
    failed = record(1, "exception", "ValueError: loss is nan", "/home/me/train.py:41 in step")
    write(1, 1.0, "raised", **failed, lines=["/home/me/train.py:41 in step"])
    write(0, 1.0, "interrupted", cause=failed)
    write(0, 1.0, "stacks", **stacks("/home/me/train.py:40 in step", where="x", waits=True, pings=4))
    restart(write, range(2), 1.0, [failed], why="rank 1 raised", stuck=[], roster=[0, 1], kept=2)
    write(1, 5.0, "no_progress", iteration=1, role="monitor", record=record(1, "soft_timeout"), silent_for=2.0)
    write(1, 5.0, "process", iteration=1, role="monitor", state="D", wchan="x", syscall="1")
    write(1, 6.0, "died", iteration=1, role="monitor", how="signal 9", exit_code=None, signal=9, oom_kills=1)
    write(0, 7.0, "left", iteration=1, how="failed", why="RestartAbort", pings=3)
    (root / "live").mkdir()
    for rank in range(2):
        (root / "live" / f"monitor-{rank}.json").write_text(json.dumps(live(rank, interval=2.0)))
    writer.write(str(root))
    return root


@partial(fuzz, daily=20, most=6000)
@given(seed=st.integers(0, 1 << 40))
@example(seed=1673)  # of a rank -1 is said how it died
def test_any_directory(whole: Path, tmp_path: Path, seed: int) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    try:
        done = damage(run_dir, random.Random(seed))
        for name, reader in READERS.items():
            try:
                reader(str(run_dir))
            except Exception as error:
                raise AssertionError(f"{name}: {done}") from error
    finally:
        shutil.rmtree(run_dir)


# --- what is wrong with a directory -----------------------------------------------------------------------------


def damage(run_dir: Path, random: random.Random) -> list[str]:
    """Does it; says what."""
    done = []
    for _ in range(random.randint(1, 4)):
        files = sorted(path for path in run_dir.rglob("*") if path.is_file() and not path.is_symlink())
        if not files:
            break
        path = random.choice(files)
        how = random.choice([_value, _value, _value, _value, _bytes, _lines, _name, _kind, _nasty])
        how(path, random)
        done.append(f"{how.__name__} {path.relative_to(run_dir)}")
    return done


def _value(path: Path, random: random.Random) -> None:
    """One value somewhere in one line, or a field that is one too many, or missing."""
    lines = path.read_bytes().splitlines()
    where = random.randrange(len(lines)) if lines else 0
    try:
        data = json.loads(lines[where]) if lines else {}
    except (ValueError, RecursionError):  # it was damaged before
        return
    inner = data
    while isinstance(inner, dict | list) and inner:
        key = random.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        if isinstance(inner[key], dict | list) and inner[key] and random.random() < 0.8:
            inner = inner[key]
            continue
        inner[key] = random.choice(VALUES)
        if isinstance(inner, dict) and random.random() < 0.1:
            del inner[key]
            inner[random.choice(["more", "\ud800", "\x1b[31m"])] = random.choice(VALUES)
        break
    path.write_bytes(b"\n".join([*lines[:where], json.dumps(data).encode(), *lines[where + 1 :], b""]))


def _bytes(path: Path, random: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(random.randint(1, 20)):
        if data:
            data[random.randrange(len(data))] = random.randrange(256)
    path.write_bytes(data[: random.choice([len(data), random.randint(0, len(data))])])


def _lines(path: Path, random: random.Random) -> None:
    """Shuffled, doubled or left out."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(random.choices(lines, k=random.randint(0, 2 * len(lines))) if lines else b""))


def _name(path: Path, random: random.Random) -> None:
    with contextlib.suppress(IsADirectoryError):
        path.rename(path.with_name(random.choice(NAMES)))


def _kind(path: Path, random: random.Random) -> None:
    """No regular file any more."""
    path.unlink()
    make = random.choice([os.mkdir, os.mkfifo, lambda name: os.symlink("/dev/zero", name), lambda name: None])
    make(path)


def _nasty(path: Path, random: random.Random) -> None:
    path.write_bytes(random.choice(NASTY))


# --- readers ----------------------------------------------------------------------------------------------------


def _command(*arguments: str) -> tuple[str, str]:
    """What it writes to both streams, as a terminal gets it."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        assert command.main(arguments) in (0, 2)
    out, err = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
    assert all(line.isprintable() for line in [*out.splitlines(), *err.splitlines()])
    return out, err


def _text(name: str, *options: str) -> None:
    _command(name, *options)


def _json(name: str, *options: str) -> None:
    out, _ = _command(name, *options, "--json")
    if out:
        json.loads(out, parse_constant=_no_number)


def _no_number(text: str) -> NoReturn:
    raise AssertionError(f"{text} is no number of JSON")


def _picture(run_dir: str) -> None:
    _text("timeline", run_dir, "-o", os.path.join(run_dir, "x.svg"))


def _trace(run_dir: str) -> None:
    pytest.importorskip("perfetto")
    _text("timeline", run_dir, "-o", os.path.join(run_dir, "x.trace"))


def _metrics(run_dir: str) -> None:
    """As a scrape gets them."""
    pytest.importorskip("prometheus_client")
    snapshot = endpoint.Snapshot(run_dir)
    snapshot.read = snapshot._sources.read()
    for path in ("/metrics", "/status"):
        answer = endpoint._answers(snapshot)(f"GET {path} HTTP/1.0\r\n\r\n".encode()).wfile.getvalue()
        assert " 200 OK" in answer.decode()


def _write(run_dir: str) -> None:
    with contextlib.suppress(OSError):
        writer.write(run_dir)


def _digests(run_dir: str) -> None:
    for path in _files(run_dir):
        with contextlib.suppress(ValueError, OSError):
            digest.lines_of(path.read_bytes()[: digest.MAX_BYTES], "job")


def _files(run_dir: str) -> Iterator[Path]:
    for path in Path(run_dir, "events").iterdir():
        if path.is_file() and not path.is_symlink():
            yield path


def _watch(run_dir: str) -> None:
    with contextlib.suppress(OSError):
        found, _ = live_reading.read(run_dir)
        json.dumps([rank.to_json() for rank in found], allow_nan=False)


READERS = {
    "report": lambda run_dir: _text("report", run_dir),
    "report --json": lambda run_dir: _json("report", run_dir),
    "report --incident": lambda run_dir: _text("report", run_dir, "--incident", "1"),
    "status": lambda run_dir: _text("status", run_dir),
    "status --json": lambda run_dir: _json("status", run_dir),
    "timeline picture": _picture,
    "timeline trace": _trace,
    "metrics": _metrics,
    "incidents": _write,
    "digests": _digests,
    "live": _watch,
}
