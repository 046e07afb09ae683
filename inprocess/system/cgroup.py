"""What the kernel tells of the memory limit of a process: how often it has ended one there because of it."""

from __future__ import annotations

import contextlib
import os
import re

__all__ = ["oom_kills"]

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
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return []
    found = []
    for line in lines:
        if len(line) != 3:
            continue
        if line[0] == "0" and not line[1]:
            found += [os.path.join(root, each, "memory.events") for each in (line[2].lstrip("/"), "")]
        if "memory" in line[1].split(","):
            below = os.path.join(root, "memory")
            found += [os.path.join(below, each, "memory.oom_control") for each in (line[2].lstrip("/"), "")]
    # version 1 where both are there: with two hierarchies only that one has the memory controller
    return sorted(found, key=lambda path: path.endswith("memory.events"))
