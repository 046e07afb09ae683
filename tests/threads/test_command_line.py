"""Commands that read a run directory, as programs: whatever goes wrong is one line, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_reports import Written, record, restart

COMMANDS = {"report": ("report",), "timeline": ("timeline", "-o", "/dev/stdout.svg"), "status": ("status",)}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write = Written(tmp_path)
    write(0, 1.0, "raised", **record(0, "exception", "ValueError"))
    restart(write, range(1), 1.0, [record(0, "exception", "ValueError")])
    return tmp_path


def command(*arguments: str, **more: int) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-S", "-m", "inprocess", *arguments]
    return subprocess.run(words, **{"stdout": subprocess.PIPE} | more, stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.parametrize("option", ["--incident=1", "--json"])
def test_who_reads_may_stop(run_dir: Path, option: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        ended = command("report", str(run_dir), option, stdout=writes)
    finally:
        os.close(writes)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_name_with_escape_sequences(tmp_path: Path, name: str) -> None:
    (tmp_path / "run\x1b]0;x\x07").mkdir()
    first, *more = COMMANDS[name]
    ended = command(first, str(tmp_path / "run\x1b]0;x\x07"), *more)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.isprintable() and r"run\x1b]0;x\x07" in line


#: the command is imported before the limit is set
WITHOUT_ANY = """
import resource, sys
from inprocess import __main__ as command
from inprocess.reports import program
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 64))
sys.exit(command.main(["report", sys.argv[1]]))
"""


def test_too_few_descriptors(run_dir: Path) -> None:
    words = [sys.executable, "-S", "-c", WITHOUT_ANY, str(run_dir)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("inprocess report: too many open files: process ") and "ulimit -n 64" in line


def test_a_disk_that_is_full(run_dir: Path) -> None:
    with open("/dev/full", "w") as full:
        ended = command("report", str(run_dir), stdout=full.fileno())
    assert (ended.returncode, ended.stderr) == (2, "inprocess report: [Errno 28] No space left on device\n")


def test_output_that_is_closed(run_dir: Path) -> None:
    line = [sys.executable, "-S", "-m", "inprocess", "report", str(run_dir)]
    ended = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *line], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_output_that_takes_no_more_than_ascii(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Written(tmp_path)
    write(0, 1.0, "raised", **record(0, "exception", "ValueError: é中"))
    restart(write, range(1), 1.0, [record(0, "exception", "ValueError: é中")])
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    ended = command("report", str(tmp_path), "--incident=1")
    assert (ended.returncode, ended.stderr) == (0, "") and r"\xe9\u4e2d" in ended.stdout


#: Ctrl-C while it reads
INTERRUPTED = """
import signal, sys
from inprocess import __main__ as command
from inprocess.reports import program
program.main = lambda _: signal.raise_signal(signal.SIGINT)
sys.exit(command.main(["report", sys.argv[1]]))
"""


def test_ctrl_c(run_dir: Path) -> None:
    words = [sys.executable, "-S", "-c", INTERRUPTED, str(run_dir)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")
