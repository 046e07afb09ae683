"""What a worker tells its launcher of its modules, so that a warm worker can import them before it is needed.

Only what is installed is named: code that the user works on is imported afresh by each worker, and so it is not in the
list, but its top-level names are, for nobody may take others of the same name for them.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from inprocess.system import strict_json

__all__ = ["Modules"]

#: longest text of them (bytes), and most names
MAX_BYTES, MAX_NAMES = 4 << 20, 50_000
#: an installed module has one of these in its path; the standard library is below its own folder
INSTALLED = ("/site-packages/", "/dist-packages/")


@dataclass(frozen=True)
class Modules:
    """Of one worker, at the first call of a wrapped function."""

    #: installed modules, in the order in which they were imported
    names: tuple[str, ...]
    #: top-level names of all others
    own: tuple[str, ...]
    #: variables as they are then. The launcher knows what it gave, the process may not: whoever sets the title of a
    #: process writes it over the variables that /proc shows
    environ: Mapping[str, str]

    @classmethod
    def here(cls) -> Modules:
        """Those of this process."""
        names, own = _sorted(dict(sys.modules))
        return cls(tuple(names), tuple(own), dict(os.environ))

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, fd: int) -> Modules:
        """Out of memory that another process has handed over. Raises ValueError."""
        try:
            fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # it is memory: reading waits for nobody
            data = os.pread(fd, MAX_BYTES + 1, 0)
        except OSError as error:
            raise ValueError(f"it hands over no memory: {error}") from None
        found = strict_json.parse(data, MAX_BYTES, keep_halves=True)
        if not isinstance(found, dict) or set(found) != {"names", "own", "environ"}:
            raise ValueError("it tells of no modules")
        environ = found["environ"]
        texts = list(environ.values()) if isinstance(environ, dict) else None
        if not all(map(_is_texts, (found["names"], found["own"], texts))):
            raise ValueError("its modules and variables are no texts")
        return cls(tuple(found["names"]), tuple(found["own"]), environ)


def _sorted(modules: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Names of installed modules that an import of this name finds, and top-level names of others."""
    names: list[str] = []
    own: dict[str, None] = {}
    standard = f"{sysconfig.get_path('stdlib')}/"
    for name, module in modules.items():
        spec = _spec(module)
        origin = getattr(spec, "origin", None)
        if not isinstance(origin, str) or not getattr(spec, "has_location", False):
            continue  # built in, or made by another module
        top = name.partition(".")[0]
        if top == "inprocess" or origin.startswith(standard) or any(part in origin for part in INSTALLED):
            if spec.name == name:
                names.append(name)
        elif top not in ("__main__", "__mp_main__"):
            own[top] = None
    return [name for name in names if name.partition(".")[0] not in own], list(own)


def _spec(module: Any) -> Any:
    try:
        return getattr(module, "__spec__", None)
    except Exception:  # an object that another module has put there
        return None


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_NAMES and all(isinstance(each, str) for each in value)
