"""Starting the monitor's program, with what it has to know."""

from __future__ import annotations

import os
import subprocess
import sys

from inprocess.monitor.pidfile import PROGRAM
from inprocess.system.errors import PACKAGE

__all__ = ["memory_file", "search_path", "spawn"]

#: the program: nothing is imported before the training process's own search path is set
CODE = f"""
import json, sys
numbers = [int(word) for word in sys.argv[1:]]
with open(numbers[0], "rb", closefd=False) as file:
    file.seek(0)
    sys.path[:] = json.load(file)["sys_path"]
from {PROGRAM} import main
main(*numbers)
"""
#: C++ code of torch would log each wait that times out; no thread pools either. It also looks up the name of each peer
#: it connects to: a name server that does not answer would cost 5 s each time
ENVIRONMENT = {"TORCH_CPP_LOG_LEVEL": "FATAL", "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}


def spawn(descriptors: list[int]) -> subprocess.Popen[bytes]:
    """``descriptors``: config, control, board, this process, and perhaps a predecessor; none of them 0, 1 or 2."""
    numbers = [*descriptors, -1][:5]
    return subprocess.Popen(
        # no site module: it would run the user's start-up files
        [sys.executable, "-S", "-W", "ignore", "-c", CODE, *map(str, numbers)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # where it was closed when this program began, its number may be that of any file by now
        stderr=subprocess.DEVNULL if sys.__stderr__ is None else None,
        cwd="/",
        env={**os.environ, **ENVIRONMENT},
        pass_fds=descriptors,
        start_new_session=True,
    )


def memory_file(text: str) -> int:
    fd = os.memfd_create("inprocess-config", os.MFD_CLOEXEC)
    with open(fd, "w", closefd=False) as file:
        file.write(text)
    return fd


def search_path() -> tuple[str, ...]:
    """This process's module search path, usable from another directory, and where this package and torch are."""
    here = os.path.dirname(os.path.dirname(PACKAGE))
    entries = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    last = [here] if torch is None else [here, os.path.dirname(os.path.dirname(os.path.abspath(torch)))]
    return tuple(dict.fromkeys([*entries, *last]))
