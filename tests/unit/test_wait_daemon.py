"""wait_daemon: returns when the named process ends, at once where there is none, and never waits for a stranger."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from inprocess.wait_daemon import main, wait_daemon


@contextmanager
def process(name):
    """A process with `name` in its command line that ends when its stdin does."""
    code = f"import sys; print({name!r}, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        started.stdout.readline()
        yield started


@pytest.fixture
def pidfile(tmp_path):
    def write(text):
        path = tmp_path / "monitor.pid"
        path.write_text(str(text))
        return str(path)

    return write


def test_waits_until_the_monitor_has_ended(pidfile):
    with process("inprocess.monitor.program") as monitor:
        command = [sys.executable, "-m", "inprocess.wait_daemon", pidfile(f"{monitor.pid}\n")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(0.5)
            monitor.stdin.close()
            assert f"process {monitor.pid} has ended" in waiting.stdout.read()
    assert waiting.returncode == 0


def test_does_not_wait_for_a_stranger(pidfile):
    with process("something else") as other:
        assert "belongs to another process" in wait_daemon(pidfile(other.pid))


def test_process_that_is_gone(pidfile):
    with process("inprocess.monitor.program") as monitor:
        monitor.stdin.close()
    assert "has ended already" in wait_daemon(pidfile(monitor.pid))


def test_missing_file_is_no_error(tmp_path, capsys):
    assert main([str(tmp_path / "none.pid")]) == 0
    assert "does not exist" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "abc", "-1", "12x"])
def test_file_without_a_process_id(pidfile, capsys, text):
    assert main([pidfile(text)]) == 1
    assert "no process id" in capsys.readouterr().err


def test_file_that_cannot_be_read(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err


def test_several_files(pidfile, tmp_path, capsys):
    assert main([str(tmp_path / "a"), pidfile(os.getpid()), str(tmp_path / "b")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
