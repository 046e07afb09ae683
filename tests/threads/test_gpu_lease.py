"""The lease with rows that stand in for real ones: what hangs is ended whole, and results are there after each row."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import pytest

from tests.gpu import lease
from tests.gpu.lease import FAILED, LEFT_OUT, OVER, PASSED, Row

#: a child that ignores the request to end, and a grandchild in a session without a living parent
HANGS = """
import subprocess, sys, time, pathlib
child = ("import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
         "inner = subprocess.Popen([sys.executable, '-Sc', 'import time; time.sleep(60)'], start_new_session=True);"
         "os.write(1, b'%d %d ' % (os.getpid(), inner.pid)); {then}")
subprocess.Popen([sys.executable, "-Sc", child.format(then="time.sleep(60)")], start_new_session=True)
subprocess.Popen([sys.executable, "-Sc", child.format(then="os._exit(0)")]).wait()
while len(open(sys.argv[1], "rb").read().split()) < 4:
    time.sleep(0.01)
{last}
"""


@pytest.fixture
def short(monkeypatch):
    """As short as it goes: the waits are for processes that are busy."""
    for name in ("BEHIND", "GRACE"):
        monkeypatch.setattr(lease, name, 0.1)
    monkeypatch.setattr(lease, "RESERVE", 0.0)


def row(name: str, code: str, limit: float = 20.0) -> Row:
    return Row(name, f"what {name} does", ("-Sc", code), limit, least=0.0)


def hangs(last: str, limit: float) -> Row:
    """Its processes tell their ids on standard output, which is the file that it waits for."""
    code = HANGS.replace("sys.argv[1]", "'/proc/self/fd/1'").replace("{last}", last)
    return row("hangs", code, limit)


def ids(out: Path) -> list[int]:
    return [int(word) for word in (out / "rows.log").read_text().split() if word.isdigit()]


def run(rows, out, seconds=60.0):
    return lease.lease(rows, seconds, out, "cpu", machine=lambda device: {"torch": "none"})


def test_each_row_is_written(tmp_path, short, capsys):
    looks = f"import json; print(len(json.load(open({str(tmp_path / 'result.json')!r}))['rows']))"
    rows = [
        row("one", "print('LEASE {\"ms\": 2}')"),
        row("two", "import sys; sys.exit('went wrong')"),
        row("three", looks),
        Row("four", "", ("-Sc", ""), 1000.0, least=1000.0),
    ]
    results = run(rows, tmp_path)
    assert [each.outcome for each in results] == [PASSED, FAILED, PASSED, LEFT_OUT]
    assert results[0].figures == [{"ms": 2}]
    assert results[1].tail == "went wrong"
    assert "===== three" in (log := (tmp_path / "rows.log").read_text()) and log.endswith("\n2\n\n")
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["machine"] == {"torch": "none"} and [each["row"] for each in found["rows"]][-1] == "four"
    assert "went wrong" in (tmp_path / "page.md").read_text()
    assert capsys.readouterr().out.splitlines()[-1].startswith("four: left out, 0 s ")
    assert sorted(os.listdir(tmp_path)) == ["page.md", "result.json", "rows.log"]


def test_all_of_a_row_that_hangs_is_ended(tmp_path, short):
    """Its child heeds no request; the child's child is in a session of its own, and so is one without a parent."""
    (result,) = run([hangs("time.sleep(60)", limit=1.0)], tmp_path)
    assert result.outcome == OVER and "could not" not in result.note
    started = ids(tmp_path)  # four, where the machine was quick enough
    assert started and not any(map(psutil.pid_exists, started))


def test_what_a_row_leaves_is_ended(tmp_path, short):
    (result,) = run([hangs("pass", limit=20.0)], tmp_path)
    assert result.outcome == PASSED and result.note == "3 processes were left and ended"
    assert not any(map(psutil.pid_exists, ids(tmp_path)))


def test_python_runs_the_rows(tmp_path, short):
    (result,) = run(
        [row("which", "import sys; print('LEASE', repr(sys.executable).replace(chr(39), chr(34)))")], tmp_path
    )
    assert result.figures == [sys.executable]
