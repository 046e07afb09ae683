"""What ranks and programs have in common: the variables that they get, and what they do first in their process."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence

__all__ = ["NO_NAME_SERVER", "become", "own_variables", "run_script"]

#: a resolver option of glibc: look into /etc/hosts only
NO_NAME_SERVER = "attempts:0"


def own_variables(folder: str) -> dict[str, str]:
    """For processes of a test, whose temporary files go to ``tmp`` in its folder."""
    return {
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


def run_script(path: str, arguments: Sequence[str]) -> None:
    """As ``python path arguments`` does."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    runpy.run_path(path, run_name="__main__")
