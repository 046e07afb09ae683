"""The command as users run it: on a machine where nothing is wrong, and where nothing restarts."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from inprocess.doctor import checks, trial
from inprocess.doctor.findings import Settings
from inprocess.testing.process import inherited_variables

from .machine import ROOT

#: the promise (seconds)
SOON_S = 60.0
NAMES = [f"restart.{each.name}" for each in trial.TRIALS]


def doctor(*arguments: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "inprocess", "doctor", *arguments]
    return subprocess.run(command, check=False, env=env, cwd=ROOT, capture_output=True, text=True, timeout=2 * SOON_S)


@pytest.fixture
def environ() -> dict[str, str]:
    """Without what a launcher around the tests has set."""
    return inherited_variables()


def test_nothing_is_wrong(environ: dict[str, str]) -> None:
    if found := checks.examine(Settings(4, environ), lambda _: None).findings:
        pytest.skip(f"something is wrong on this machine: {', '.join(finding.what for finding in found)}")
    done = doctor(env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    if slow := [line for line in lines if line.startswith("WARNING  restart.") and ": the restart took " in line]:
        assert lines[-1] == f"{len(slow)} warning{'s' * (len(slow) > 1)}"  # other work on the machine slowed it down
    else:
        assert len(lines) <= 24 and lines[-1] == "nothing is wrong here"
    restarts = [line for line in lines if line.endswith(" ms")]
    assert len(restarts) == len(NAMES)
    assert "\r" not in done.stderr  # which is no terminal


def test_one_rank_as_json(environ: dict[str, str]) -> None:
    done = doctor("--nproc", "1", "--json", env={**environ, "INPROCESS_RUNDIR": "x", "MASTER_PORT": "x"})
    told = json.loads(done.stdout)
    assert {"restart.exception", "restart.hang", "names.port"} <= set(told["checks"])
    assert {"restart.kill", "restart.stop"} <= set(told["skipped"])
    assert list(told["restarts"]) == ["exception", "hang"] and all(told["restarts"].values())
    assert {("variables.names", "warning"), ("names.port", "problem")} <= {
        (finding["check"], finding["level"]) for finding in told["findings"]
    }
    assert done.returncode == 1


def test_a_launcher_around_it(environ: dict[str, str]) -> None:
    """Its variables are not those of the doctor's own job."""
    env = {**environ, "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    told = json.loads(doctor("--nproc", "1", "--json", env=env).stdout)
    assert all(told["restarts"].values())


def test_nothing_restarts(environ: dict[str, str]) -> None:
    """Gloo has no interface to work over."""
    done = doctor("--nproc", "2", "--json", env={**environ, "GLOO_SOCKET_IFNAME": "wire7"})
    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert told["restarts"] == dict.fromkeys(("exception", "kill", "hang", "stop"))
    found = {finding["check"]: finding for finding in told["findings"]}
    assert set(found) >= {*NAMES, "names.interface"}
    assert all(found[name]["level"] == "problem" and "wire7" in found[name]["what"] for name in NAMES)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_on_a_terminal_until_a_signal(environ: dict[str, str], tmp_path: Path, signum: signal.Signals) -> None:
    """It shows what it does, and leaves nothing."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "inprocess", "doctor", "--nproc", "2"]
    env = {**environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    try:
        shown = ""
        while "restart: " not in shown:
            shown += os.read(ours, 4096).decode()
        process.send_signal(signum)
        out, _ = process.communicate(timeout=SOON_S)
    finally:
        process.kill()
        process.communicate()
        os.close(ours)
    assert process.returncode == 128 + signum
    assert out == b"" and "\r\x1b[Klimits.shm: " in shown
    assert list(tmp_path.iterdir()) == []


def test_it_needs_torch_and_psutil_only() -> None:
    """Not pytest, which `inprocess.testing` is made for, nor anything of the extras."""
    program = (
        "import sys\n"
        "for name in ('pytest', 'numpy', 'pynvml', 'yaml', 'prometheus_client', 'perfetto'): sys.modules[name] = None\n"
        "import inprocess.doctor.program, inprocess.doctor.training, inprocess.testing.instruments"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
