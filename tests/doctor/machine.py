"""Runs one check in a process of its own, on a machine that lacks something for real."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from inprocess.doctor.findings import Finding

ROOT = Path(__file__).parents[2]
#: a check may wait for a name server until it gives up, twice (seconds)
LIMIT_S = 40.0
_PROGRAM = """
import dataclasses, json, os, sys
from inprocess.doctor import checks
from inprocess.doctor.findings import Settings
(check,) = (each for each in checks.CHECKS if each.id == sys.argv[1])
if len(sys.argv) > 3:  # not before: the interpreter may lie where only root can read
    os.setuid(int(sys.argv[3]))
found = checks.examine(Settings(int(sys.argv[2]), dict(os.environ)), lambda text: None, [check])
print(json.dumps([found.skipped, [dataclasses.asdict(finding) for finding in found.findings]]))
"""


def find(
    check: str,
    nproc: int = 4,
    *,
    env: Mapping[str, str | None] | None = None,
    prepare: Callable[[], object] | None = None,
    mounts: str = "",
    user: int | None = None,
    contained: bool = False,
) -> list[Finding]:
    """The findings of the check with this id; an AssertionError where it was skipped.

    ``mounts`` are shell commands that change what is mounted, for this process alone; the test is skipped where the
    kernel refuses that. ``prepare`` runs in the process before Python does. ``contained``: it is process 1 of a
    namespace, if the kernel makes one.
    """
    environ = {name: text for name, text in {**os.environ, **(env or {})}.items() if text is not None}
    command = [sys.executable, "-c", _PROGRAM, check, str(nproc), *([] if user is None else [str(user)])]
    if mounts:
        need_mounts()
        command = ["unshare", "-m", "sh", "-ec", f"{mounts}\nexec {shlex.join(command)}"]
    if contained:
        need_mounts()
        command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command]
    done = subprocess.run(
        command, check=False, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, preexec_fn=prepare
    )
    assert done.returncode == 0, done.stderr
    skipped, findings = json.loads(done.stdout)
    assert not skipped
    return [Finding(**finding) for finding in findings]


def need_mounts() -> None:
    """Skip the test where this user may not mount anything."""
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False, capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(f"the kernel refuses a mount namespace: {tried.stderr.strip()}")
