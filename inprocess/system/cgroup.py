"""What the kernel tells of the control groups of a process: their limits, and how often it ended one for its memory."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

__all__ = ["available_memory", "folders", "free_memory", "number", "oom_kills"]

_ROOT = "/sys/fs/cgroup"


def oom_kills(pid: int | str = "self", root: str = _ROOT) -> int:
    """How many processes it has ended in the memory cgroup of this one; 0 where it does not tell.

    From ``memory.events`` (cgroups, version 2) or ``memory.oom_control`` (version 1, since Linux 4.13).
    """
    for path in _files(pid, root):
        with contextlib.suppress(OSError), open(path, encoding="ascii", errors="replace") as file:
            if found := re.search(r"^oom_kill (\d+)$", file.read(), re.MULTILINE):
                return int(found[1])
    return 0


def _files(pid: int | str, root: str) -> list[str]:
    """Where it may be told, the most likely first: in a container the path may be seen from outside."""
    found = []
    for is_second, controllers, path in _groups(f"/proc/{pid}/cgroup"):
        if is_second:
            found += [os.path.join(root, each, "memory.events") for each in (path.lstrip("/"), "")]
        if "memory" in controllers:
            below = os.path.join(root, "memory")
            found += [os.path.join(below, each, "memory.oom_control") for each in (path.lstrip("/"), "")]
    # version 1 where both are there: with two hierarchies only that one has the memory controller
    return sorted(found, key=lambda path: path.endswith("memory.events"))


def _groups(file: str) -> list[tuple[bool, list[str], str]]:
    """Of a process: whether the group is of version 2, its controllers, its path; nothing where that is not told."""
    try:
        with open(file, encoding="utf-8", errors="surrogateescape") as opened:
            lines = [line.rstrip("\n").split(":", 2) for line in opened]
    except OSError:
        return []
    return [(line[0] == "0" and not line[1], line[1].split(","), line[2]) for line in lines if len(line) == 3]


def folders(controller: str, root: str = "/") -> Iterator[str]:
    """The folders of this process's group for "memory" or "pids", and of those above it, whose limits hold as well."""
    for is_second, controllers, path in _groups(os.path.join(root, "proc/self/cgroup")):
        if is_second or controller in controllers:
            base = os.path.join(root, _ROOT[1:], "" if is_second else controller)
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for end in range(len(parts), -1, -1):
                yield os.path.join(base, *parts[:end])


def number(folder: str, name: str) -> int | None:
    """What a file of a group says; None where there is none, or it says ``max``."""
    try:
        with open(os.path.join(folder, name), encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def available_memory(root: str = "/") -> tuple[int, str]:
    """How much more memory this process may take (bytes), and in words what limits it."""
    import psutil  # noqa: PLC0415  (a monitor, which asks for other things here, does without)

    left, limit = psutil.virtual_memory().available, "this host"
    for folder in folders("memory", root):
        free = free_memory(folder)
        if free is not None and free < left:
            left, limit = free, "the control group (container)"
    return left, limit


def free_memory(folder: str) -> int | None:
    """How much more the group may take (bytes), with what the kernel can drop; None where it has no limit."""
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, now = number(folder, limit), number(folder, used)
        if most is not None and now is not None:
            return most - now + _statistic(folder, cached)
    return None


def _statistic(folder: str, name: str) -> int:
    with contextlib.suppress(OSError), open(os.path.join(folder, "memory.stat"), encoding="ascii") as file:
        if found := re.search(rf"^{name} (\d+)$", file.read(), re.MULTILINE):
            return int(found[1])
    return 0
