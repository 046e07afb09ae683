"""Whether there is what the workers are to run: looked at before any of them starts. Imports nothing of the user's."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
from importlib.machinery import PathFinder

from inprocess.exception import OptionError
from inprocess.options import did_you_mean

__all__ = ["check"]


def check(given: argparse.Namespace) -> None:
    """Raise OptionError where a script, a module or a program cannot be found.

    Not looked for: a name that differs from worker to worker, what another interpreter (PYTHON_EXEC) is to run, and
    the modules of a package, which would have to be imported.
    """
    name = given.training_script
    python = None if given.run_path or given.no_python else os.environ.get("PYTHON_EXEC")
    if python is not None and shutil.which(python) is None:
        raise OptionError(f"PYTHON_EXEC={python} cannot be executed: check its name, PATH and permissions, or unset it")
    if "${" in name:  # torch puts the local rank in its place
        return
    if given.run_path:
        _check_file(name)
    elif given.no_python:
        if shutil.which(name) is None:
            raise OptionError(f"no program {name!r} can be executed: check its name, PATH and permissions")
    elif python is not None:
        return
    elif given.module:
        _check_module(name)
    elif name != "-":  # Python's name for standard input
        _check_file(name)


def _check_file(name: str) -> None:
    try:
        with open(name, "rb"):
            return
    except IsADirectoryError:
        if os.path.exists(os.path.join(name, "__main__.py")):
            return
        raise OptionError(f"script {name!r} is a folder without a __main__.py: name a file") from None
    except OSError as error:
        where = "" if os.path.isabs(name) else f" in {os.getcwd()}"
        raise OptionError(f"script {name!r}{where}: {error.strerror}{_similar(name)}") from None


def _similar(name: str) -> str:
    folder, base = os.path.split(name)
    with contextlib.suppress(OSError):
        return did_you_mean(base, os.listdir(folder or "."))
    return ""


def _check_module(name: str) -> None:
    package = name.partition(".")[0]
    try:
        found = PathFinder.find_spec(package, [os.getcwd()]) or importlib.util.find_spec(package)
    except ValueError:  # one such as __main__
        return
    if found is None:
        raise OptionError(f"no module named {package!r}: install it, or start in the folder that it is in")
