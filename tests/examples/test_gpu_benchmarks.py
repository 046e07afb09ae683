"""The GPU benchmarks without a GPU: one restart of two Gloo ranks through all of it, and a measurement that hangs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.place import Place
from benchmarks.gpu.plan import Request

ROOT = Path(__file__).parents[2]


def test_a_restart_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    options = ["--device", "cpu", "--quick", "--only", "restart", "--case", "poison", "--ranks", "2"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", *options, "--results", str(path)],
        check=False, cwd=ROOT, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(path.read_text())["entries"].values()
    assert entry["notes"] == {}, done.stdout
    assert entry["victim"] == ["HealthCheckError"]
    assert sum(entry["phases"].values()) == pytest.approx(entry["values"]["total"][0], abs=0.1)
    assert "| poisoned context | 2 | **" in done.stdout


def test_a_measurement_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is what it has started; the next request gets a new process."""
    started: list[psutil.Process] = []

    def start(server: command.Server) -> subprocess.Popen[str]:
        hangs = ["sh", "-c", "sleep 60 & wait"]
        process = subprocess.Popen(hangs, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        server._process = process
        started.append(psutil.Process(process.pid))
        return process

    monkeypatch.setattr(command, "MARGIN", 0.2)
    monkeypatch.setattr(command.Server, "_start", start)
    with tempfile.NamedTemporaryFile() as log:
        server = command.Server(Place("cpu"), log)
        for _ in range(2):
            assert "no answer" in server.ask(Request("restart", 2, limit=0.1))["note"]
    assert len(started) == 2
    assert not any(process.is_running() for process in started)
