"""What ranks and programs have in common: their variables, what they do first in their process, and what they leave."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import resource
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from signal import SIGKILL
from typing import Any

from inprocess.exception import OptionError
from inprocess.system import procfs
from inprocess.system.descriptors import await_readable

from . import leaks

__all__ = [
    "NO_NAME_SERVER",
    "become",
    "check_variables",
    "inherited_variables",
    "left_by",
    "mark",
    "new_mark",
    "own_variables",
    "reap",
    "run_script",
]

#: a resolver option of glibc: look into /etc/hosts only
NO_NAME_SERVER = "attempts:0"
#: what a launcher sets for its workers, pytest for its test, and what says where events are written: those around the
#: tests are not to get in
SET_AROUND = leaks.IGNORED_VARIABLES | {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
    *("INPROCESS_JOB", "INPROCESS_LAUNCH", "INPROCESS_LAUNCHER", "INPROCESS_LAUNCHER_KEY", "INPROCESS_LAUNCHER_LEARNS"),
    *("INPROCESS_LOCAL_RANK", "INPROCESS_LOCAL_WORLD_SIZE", "INPROCESS_RESTART", "INPROCESS_GROW", "INPROCESS_RUN_DIR"),
}
#: RLIMIT_LOCKS, a limit that nothing has had a use for since Linux 2.4.25. Whatever a process starts inherits it, also
#: by fork, by exec and in a session of its own: so it tells whose it is when its parent has ended
_LIMIT, _IN_WORDS = 10, "Max file locks"


def inherited_variables() -> dict[str, str]:
    """This process's, without what was set for it alone."""
    return {name: text for name, text in os.environ.items() if name not in SET_AROUND}


def check_variables(who: str, variables: Mapping[Any, Any]) -> None:
    """Raises OptionError where one cannot be set."""
    for name, text in variables.items():
        if not isinstance(name, str) or not isinstance(text, str | None):
            raise OptionError(
                f"{who}: env={{{name!r}: {text!r}}}: variables are text, as in env={{'N': '4'}}; None removes one"
            )


def own_variables(folder: str) -> dict[str, str]:
    """For processes of a test, whose temporary files go to ``tmp`` in its folder."""
    return {
        # a launcher makes no directory for events where the test did not ask for one
        "INPROCESS_RUN_DIR": "none",
        "TMPDIR": os.path.join(folder, "tmp"),
        # torch makes this folder as soon as it compiles, or might
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.path.join(folder, "compiled")),
        # torch looks up the name of each peer it connects to; a name server that does not answer costs 5 s
        "RES_OPTIONS": NO_NAME_SERVER,
    }


def become(variables: Mapping[str, str]) -> None:
    """In the new process: these variables, and the default way to start processes, in place of the server's."""
    os.environ.clear()
    os.environ.update(variables)
    multiprocessing.set_start_method(None, force=True)
    tempfile.tempdir = None  # TMPDIR is looked up anew


# --- whose a process is -------------------------------------------------------------------------------------------


def new_mark() -> int:
    """Which no other run has."""
    return (1 << 47) + random.SystemRandom().getrandbits(47)


def mark(number: int) -> None:
    """This process, and whatever it starts from now on."""
    with contextlib.suppress(OSError, ValueError):  # a kernel that does without: who loses its parent is not found
        resource.setrlimit(_LIMIT, (number, resource.getrlimit(_LIMIT)[1]))


def _has_mark(pid: int, number: int) -> bool:
    try:
        lines = procfs.read(f"/proc/{pid}/limits").splitlines()
    except OSError:
        return False
    return any(line.startswith(_IN_WORDS) and line[len(_IN_WORDS) :].split()[0] == str(number) for line in lines)


def left_by(pids: Iterable[int], number: int) -> list[int]:
    """What these processes have started: what is below them, and what has this mark and has come to this process since
    its parent has ended. Not the dead that are another one's to reap."""
    orphans = [pid for pid in leaks.children_of(os.getpid()) if _has_mark(pid, number)]
    found = [*orphans, *(below for pid in (*pids, *orphans) for below in leaks.descendants_of(pid))]
    mine = leaks.children_of(os.getpid())  # afterwards: one whose parent has just ended has come to this process
    return [pid for pid in dict.fromkeys(found) if pid in mine or procfs.state_of(pid)["state"] != "Z"]


def reap(find: Callable[[], Iterable[int]], end: float) -> list[str]:
    """Wait until `end` (monotonic) for the processes that there are; kill those that stay, and name them."""
    late: list[str] = []
    while pids := list(find()):
        for pid in pids:
            left = end - time.monotonic()
            if not _ended(pid, max(left, 0.0)):
                late.append(f"pid {pid}: {leaks.command_of(pid)}")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, SIGKILL)
                _ended(pid, 5.0)
    return late


def _ended(pid: int, seconds: float) -> bool:
    """Wait for the end of a process through its pidfd, then reap it if it is ours."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        done = await_readable(pidfd, seconds)
    finally:
        os.close(pidfd)
    if done:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return done


# --- the program --------------------------------------------------------------------------------------------------


def run_script(path: str, arguments: Sequence[str]) -> None:
    """As ``python path arguments`` does."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    runpy.run_path(path, run_name="__main__")
