"""What the kernel tells of a process: kills for want of memory, by cgroup, and the state of its main thread."""

from __future__ import annotations

import builtins
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inprocess.system import cgroup, procfs

EVENTS = "low 0\nhigh 7\nmax 4711\noom 5\noom_kill {}\noom_group_kill 9\n"
CONTROL = "oom_kill_disable 0\nunder_oom 1\noom_kill {}\n"
V2, V1 = "0::/user.slice/job\n", "12:cpuset:/\n9:memory:/slurm/job_1\n1:name=systemd:/x\n"
Says = Callable[[str | bytes | None], None]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Says:
    """Make up ``/proc/<pid>/cgroup``; None: there is none."""
    real = builtins.open

    def say(text: str | bytes | None) -> None:
        def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not str(path).endswith("/cgroup"):
                return real(path, *args, **kwargs)
            if text is None:
                raise FileNotFoundError(path)
            raw = text.encode() if isinstance(text, str) else text
            return io.TextIOWrapper(io.BytesIO(raw), encoding=kwargs["encoding"], errors=kwargs["errors"])

        monkeypatch.setattr(cgroup, "open", opened, raising=False)

    return say


def put(root: Path, files: dict[str, str | bytes]) -> str:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return str(root)


@pytest.mark.parametrize(
    ("text", "files", "kills"),
    [
        # version 2
        (V2, {"user.slice/job/memory.events": EVENTS.format(3), "memory.events": EVENTS.format(8)}, 3),
        ("0::/\n", {"memory.events": EVENTS.format(2)}, 2),
        # in a container the path is often that of the host, and the root is the container's own
        (V2, {"memory.events": EVENTS.format(4)}, 4),
        ("0::/../../pod/x\n", {"memory.events": EVENTS.format(5)}, 5),
        # version 1
        (V1, {"memory/slurm/job_1/memory.oom_control": CONTROL.format(6)}, 6),
        (V1, {"memory/memory.oom_control": CONTROL.format(7)}, 7),
        ("4:cpu,memory:/a\n", {"memory/a/memory.oom_control": CONTROL.format(1)}, 1),
        ("4:mymemory:/a\n", {"memory/a/memory.oom_control": CONTROL.format(1)}, 0),
        # both: the one of version 1 has the controller, whatever comes first
        (
            V2 + V1,
            {
                "user.slice/job/memory.events": EVENTS.format(9),
                "memory/slurm/job_1/memory.oom_control": CONTROL.format(6),
            },
            6,
        ),
        (V1 + "0::/\n", {"memory.events": EVENTS.format(9)}, 9),
        # a colon in a name
        ("0::/a:b\n", {"a:b/memory.events": EVENTS.format(3)}, 3),
        (b"0::/a\xffb\n", {"memory.events": EVENTS.format(3)}, 3),
        # before Linux 4.13 version 1 does not count
        (V1, {"memory/slurm/job_1/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}, 0),
        # garbage
        (V2, {"user.slice/job/memory.events": "oom_kill many\n", "memory.events": b"\xff\x00oom_kill 3"}, 0),
        (V2, {"memory.events": "oom_kill 1 2\nxoom_kill 4\noom_kill -1\noom_kill 7\n"}, 7),
        ("\n::\nmemory\n0:\n\x00\n", {"memory.events": EVENTS.format(3)}, 0),
        ("", {"memory.events": EVENTS.format(3)}, 0),
        # nothing
        (V2 + V1, {}, 0),
        (None, {"memory.events": EVENTS.format(3)}, 0),
    ],
)
def test_kills(says: Says, tmp_path: Path, text: str | bytes | None, files: dict[str, Any], kills: int) -> None:
    says(text)
    assert cgroup.oom_kills(root=put(tmp_path, files)) == kills


def test_a_folder_in_place_of_the_file(says: Says, tmp_path: Path) -> None:
    says("0::/a\n")
    (tmp_path / "a/memory.events").mkdir(parents=True)
    assert cgroup.oom_kills(root=str(tmp_path)) == 0


def test_this_process_really() -> None:
    assert cgroup.oom_kills() == cgroup.oom_kills(os.getpid()) >= 0
    assert cgroup.oom_kills(root="/nowhere") == 0


def gone() -> int:
    """The id of a process that is no more."""
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


def test_a_process_that_is_gone() -> None:
    pid = gone()
    assert cgroup.oom_kills(pid) == 0
    assert procfs.state_of(pid) == {"state": "", "wchan": "", "syscall": ""}


def test_this_process_runs() -> None:
    assert procfs.state_of(os.getpid())["state"] == "R"


def test_a_stopped_process() -> None:
    child = subprocess.Popen(["sleep", "100"])
    try:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        found = procfs.state_of(child.pid)
        assert found.keys() == {"state", "wchan", "syscall"} and found["state"] == "T"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert procfs.state_of(child.pid)["state"] == "Z"
    finally:
        child.kill()
        child.wait()


def test_a_name_that_looks_like_a_state(tmp_path: Path) -> None:
    """A process may call itself ``) Z (``."""
    (tmp_path / ") Z (").symlink_to("/bin/sleep")
    child = subprocess.Popen([tmp_path / ") Z (", "100"])
    try:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert procfs.state_of(child.pid)["state"] == "T"
    finally:
        child.kill()
        child.wait()
