"""Coverage of ranks: where the test's process measures it, each rank does, into a file of its own.

pytest-cov combines the files; `coverage combine` does after `coverage run -p -m pytest`. A rank that is killed writes
none.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

#: in the environment of a rank: arguments of `coverage.Coverage`
VARIABLE = "INPROCESS_TESTING_COVERAGE"
#: settings that may come from the command line: argument -> name in the configuration
SETTINGS = {"branch": "run:branch", "source": "run:source", "include": "run:include", "omit": "run:omit"}


def _current() -> Any:
    module = sys.modules.get("coverage")
    return None if module is None else module.Coverage.current()


def variables() -> dict[str, str]:
    """For the environment of ranks, in the test's process; empty where nothing is measured."""
    measured = _current()
    if measured is None:
        return {}
    given = {name: measured.get_option(setting) for name, setting in SETTINGS.items()}
    given["source"] = [_absolute(name) for name in given["source"] or []] or None
    data = os.path.abspath(measured.get_option("run:data_file"))
    return {VARIABLE: json.dumps({"config_file": measured.config.config_file or False, "data_file": data, **given})}


def _absolute(source: str) -> str:
    """Packages keep their name."""
    return os.path.abspath(source) if os.path.isdir(source) else source


def begin() -> None:
    """In a rank."""
    given = os.environ.pop(VARIABLE, None)
    if given is None or _current() is not None:
        return
    import coverage  # noqa: PLC0415  # only where it is used

    coverage.Coverage(data_suffix=True, **json.loads(given)).start()


def finish() -> None:
    """Before the rank ends."""
    measured = _current()
    if measured is not None:
        measured.stop()
        measured.save()
