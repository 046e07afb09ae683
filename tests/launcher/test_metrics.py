"""`inprocess run --metrics`: a program beside the workers, for which the job neither waits nor fails."""

from __future__ import annotations

import re
import signal
import socket
import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest

from inprocess.launcher.metrics import MetricsProgram
from tests.harness.endpoint import get
from tests.launcher.harness import Hub, Launcher

Run = Callable[..., Launcher]
LINE = re.compile(r"inprocess metrics: (http://127\.0\.0\.1:\d+)/metrics")


def test_it_serves_as_long_as_the_job_runs(run: Run, hub: Hub, tmp_path: Path) -> None:
    launcher = run("--nproc-per-node", "2", "--metrics", "0", "--run-dir", str(tmp_path / "new"))
    workers = hub.group(2)
    launcher.expect("/metrics\n")
    found = LINE.search(launcher.err)
    assert found is not None
    assert "inprocess_build_info" in get(f"{found[1]}/metrics")
    for worker in workers:
        worker.tell("exit 0")
    assert launcher.finish() == 0
    with pytest.raises(urllib.error.URLError):
        get(f"{found[1]}/metrics")
    assert launcher.left() == []


def test_a_port_that_is_taken_is_told_and_the_job_goes_on(run: Run, hub: Hub, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        launcher = run("--nproc-per-node", "1", "--metrics", str(number), "--run-dir", str(tmp_path))
        (worker,) = hub.group(1)
        launcher.expect("pass an address of this host")
        worker.tell("exit 0")
        assert launcher.finish() == 0
    assert f"--listen={number}: Address already in use" in launcher.err


@pytest.mark.parametrize(("listen", "node", "code"), [("x", 0, 2), ("0", 1, None), (None, 0, None)])
def test_that_it_has_ended_is_told_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, listen: str | None, node: int, code: int | None
) -> None:
    program = MetricsProgram(listen)
    program.start(node, str(tmp_path))
    assert (program._process is None) == (code is None)
    if program._process is not None:
        assert program._process.wait() == code
    program.close()
    assert [record.message for record in caplog.records] == [
        f"--metrics={listen}: the program had ended during the job, exit code {each}" for each in (code,) if each
    ]


def test_it_ends_with_a_launcher_that_is_killed(run: Run, hub: Hub, tmp_path: Path) -> None:
    launcher = run("--nproc-per-node", "1", "--metrics", "0", "--run-dir", str(tmp_path))
    (worker,) = hub.group(1)
    launcher.expect("/metrics\n")
    found = LINE.search(launcher.err)
    assert found is not None
    launcher.signal(signal.SIGKILL)
    worker.tell("exit 0")
    assert launcher.finish() == -signal.SIGKILL  # nobody has its streams any more
    with pytest.raises(urllib.error.URLError):
        get(f"{found[1]}/metrics")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("--metrics", "9464"),
            "--metrics=9464: it reads a run directory, and there is to be none: pass --run-dir DIR",
        ),
        (("--metrics", "x", "--run-dir", "/tmp/r"), "--metrics=x: 'x' is no port: pass [HOST:]PORT"),
    ],
)
def test_wrong_options(start: Callable[..., Launcher], options: tuple[str, ...], says: str) -> None:
    launcher = start("--standalone", *options, "train.py")
    assert launcher.finish() == 2
    assert says in launcher.err
