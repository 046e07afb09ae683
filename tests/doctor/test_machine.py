"""Each check of the machine finds what it is for on a machine, or in a process, that lacks it for real."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inprocess.doctor import names
from inprocess.testing.ports import ReservedPort

from .machine import ROOT, find

#: of the name server that stays silent; loopback, where nobody else serves names
SILENT = "127.83.0.1"


# --- name servers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A name server that never answers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        try:
            server.bind((SILENT, 53))
        except PermissionError:
            pytest.skip("port 53 needs root")
        yield server


def resolver(folder: Path, options: str) -> str:
    """Mounts: names are asked of the silent server alone."""
    (folder / "resolv.conf").write_text(f"nameserver {SILENT}\noptions {options}\n")
    (folder / "hosts").write_text("")
    pairs = ((folder / name, f"/etc/{name}") for name in ("resolv.conf", "hosts"))
    return "\n".join(f"mount --bind {shlex.quote(str(path))} {target}" for path, target in pairs)


def was_asked(server: socket.socket) -> bool:
    server.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        return bool(server.recv(512))
    return False


@pytest.mark.parametrize("check", ["names.host", "names.reverse", "names.master"])
def test_a_name_server_that_is_silent(silent: socket.socket, tmp_path: Path, check: str) -> None:
    env = {"RES_OPTIONS": None, "MASTER_ADDR": "node0.example"}
    (finding,) = find(check, env=env, mounts=resolver(tmp_path, "timeout:2 attempts:1"))
    assert was_asked(silent)
    assert (finding.check, finding.level) == (check, "problem")
    assert "the answer took " in finding.what and "RES_OPTIONS" in finding.remedy


def test_a_look_up_is_given_up(silent: socket.socket, tmp_path: Path) -> None:
    (finding,) = find("names.host", env={"RES_OPTIONS": None}, mounts=resolver(tmp_path, "timeout:20 attempts:1"))
    assert was_asked(silent)
    assert f"no answer within {names.LIMIT_S:.1f} s" in finding.what


def test_a_host_without_an_address(tmp_path: Path) -> None:
    (finding,) = find("names.host", mounts=resolver(tmp_path, "attempts:0"))
    assert finding.level == "warning" and "has no address" in finding.what


def test_a_host_whose_name_is_loopback(tmp_path: Path) -> None:
    """Fine on one host, not where ranks of others connect to it."""
    mounts = resolver(tmp_path, "attempts:0")
    (tmp_path / "hosts").write_text(f"127.0.1.1 {socket.gethostname()}\n")
    assert find("names.host", mounts=mounts) == []
    (finding,) = find("names.host", env={"WORLD_SIZE": "8"}, mounts=mounts)
    assert finding.level == "problem" and "127.0.1.1" in finding.what


def test_master_has_no_address(tmp_path: Path) -> None:
    (finding,) = find("names.master", env={"MASTER_ADDR": "a..b"})
    assert finding.level == "problem" and "MASTER_ADDR=a..b has no address" in finding.what


def test_master_is_loopback_on_the_second_host() -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "8", "GROUP_RANK": "1"}
    (finding,) = find("names.master", env=env)
    assert finding.level == "problem" and "is this host itself" in finding.what
    assert find("names.master", env={**env, "GROUP_RANK": "0"}) == []


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_is_not_there(variable: str) -> None:
    (finding,) = find("names.interface", env={variable: "wire7"})
    assert finding.level == "problem" and f"{variable}=wire7" in finding.what and "lo" in finding.what
    assert find("names.interface", env={variable: "lo"}) == []


# --- ports ----------------------------------------------------------------------------------------------------------


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        (finding,) = find("names.port", env={"MASTER_PORT": str(server.getsockname()[1])})
    assert finding.level == "problem" and "in use" in finding.what


def test_a_port_of_the_kernel() -> None:
    """One that was given to a socket is in its range."""
    with ReservedPort() as port:
        (finding,) = find("names.port", env={"MASTER_PORT": str(port.number)})
    assert finding.level == "warning" and "ip_local_port_range" in finding.remedy


@pytest.mark.parametrize("text", ["0", "x", "65536", "-1"])
def test_no_port(text: str) -> None:
    (finding,) = find("names.port", env={"MASTER_PORT": text})
    assert finding.level == "problem" and "is no port" in finding.what


# --- limits ---------------------------------------------------------------------------------------------------------


def test_few_descriptors() -> None:
    (finding,) = find("limits.descriptors", prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 4096)))
    assert finding.level == "warning" and "the soft limit of open files is 100" in finding.what
    assert finding.remedy == "ulimit -n 4096"


def test_too_few_descriptors_whatever_one_does() -> None:
    (finding,) = find("limits.descriptors", prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (70, 70)))
    assert finding.level == "problem" and "the hard limit of open files is 70" in finding.what


def test_a_large_job_needs_more_descriptors() -> None:
    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))

    assert find("limits.descriptors", prepare=prepare) == []
    (finding,) = find("limits.descriptors", env={"WORLD_SIZE": "2000"}, prepare=prepare)
    assert "2000 ranks needs 8064" in finding.what


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_few_processes() -> None:
    """Of another user than root, whom nothing limits."""
    (finding,) = find(
        "limits.processes", user=65534, prepare=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (20, 20))
    )
    assert finding.level == "problem" and "ulimit -u 20 leaves" in finding.what


def test_no_free_signal() -> None:
    def prepare() -> None:
        for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
            signal.signal(number, signal.SIG_IGN)

    (finding,) = find("limits.signals", prepare=prepare)
    assert finding.level == "problem" and "real-time signals are ignored" in finding.what


def test_few_signals_may_wait() -> None:
    (finding,) = find("limits.signals", prepare=lambda: resource.setrlimit(resource.RLIMIT_SIGPENDING, (2, 2)))
    assert finding.level == "warning" and "2 signals of this user may wait" in finding.what


@pytest.mark.parametrize(
    ("mounts", "level", "what"),
    [
        ("mount -t tmpfs tmpfs /dev", "problem", "there is no /dev/shm"),
        ("mount -t tmpfs -o ro tmpfs /dev/shm", "problem", "cannot be written"),
        ("mount -t tmpfs -o size=32m tmpfs /dev/shm", "warning", "32 MiB free of 32 MiB"),
    ],
)
def test_shared_memory(mounts: str, level: str, what: str) -> None:
    (finding,) = find("limits.shm", mounts=mounts)
    assert finding.level == level and what in finding.what


def test_process_one() -> None:
    (finding,) = find("limits.init", contained=True)
    assert finding.level == "warning" and "process 1 of this container is a Python program" in finding.what


def test_no_memory_for_so_many_ranks() -> None:
    (finding,) = find("limits.memory", nproc=1_000_000)
    assert finding.level == "problem" and "1000000 ranks need" in finding.what


# --- versions -------------------------------------------------------------------------------------------------------


def test_without_torch() -> None:
    """A Python that sees this package and no other."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from inprocess.doctor import versions\n"
        "print(*(f.check + ' ' + f.level for run in (versions.torch, versions.backends) for f in run(None)))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(ROOT)], check=False, capture_output=True, text=True
    )
    assert done.stdout.split() == ["versions.torch", "problem", "versions.backends", "problem"], done.stderr
