"""What a run needs of the machine, made for it and taken away after it: a cgroup with a limit, a disk that is full."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .training import MEMORY, InCgroup

__all__ = ["Unavailable", "full_disk", "limit_of_version_1", "limit_of_version_2"]

_ROOT = Path("/sys/fs/cgroup")
#: how long the kernel may take to see that a cgroup is empty (seconds)
_EMPTY_S = 10.0
Place = Callable[[int], None]


class Unavailable(Exception):
    """This machine cannot do it; the message says why."""


@contextmanager
def limit_of_version_1(run_dir: Path, rank: int) -> Iterator[Place]:
    """A memory limit for one rank and its monitor."""
    below = _own("memory", _ROOT / "memory")
    if below is None:
        raise Unavailable("there is no memory controller of cgroup version 1")
    with _limited(below, run_dir.name, "memory.limit_in_bytes") as path:
        yield InCgroup(str(path), rank)


@contextmanager
def limit_of_version_2(run_dir: Path, rank: int) -> Iterator[Place]:
    """Likewise, of version 2."""
    for root in (_ROOT, _ROOT / "unified"):
        controllers = root / "cgroup.controllers"
        if controllers.exists() and "memory" in controllers.read_text(encoding="ascii").split():
            with _limited(root, run_dir.name, "memory.max") as path:
                yield InCgroup(str(path), rank)
            return
    raise Unavailable("there is no memory controller of cgroup version 2")


def _own(controller: str, root: Path) -> Path | None:
    """The cgroup of this process."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()]
    found = next((line[2] for line in lines if controller in line[1].split(",")), None)
    if found is None:
        return None
    inside = root / found.lstrip("/")
    return inside if inside.is_dir() else root


@contextmanager
def _limited(below: Path, name: str, limit: str) -> Iterator[Path]:
    path = below / f"inprocess-{os.getpid()}-{name}"
    try:
        path.mkdir()
        (path / limit).write_text(str(MEMORY), encoding="ascii")
    except OSError as error:
        if path.exists():
            path.rmdir()
        raise Unavailable(f"a memory cgroup cannot be made: {error.strerror}") from error
    try:
        yield path
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    end = time.monotonic() + _EMPTY_S
    while True:
        try:
            return path.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > end:
                raise
        time.sleep(0.05)  # its processes have ended, and the kernel has yet to notice


@contextmanager
def full_disk(run_dir: Path, rank: int) -> Iterator[None]:
    """A file system of 16 kB in the run directory."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(run_dir)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise Unavailable(f"no file system can be mounted: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(run_dir)], check=True)
