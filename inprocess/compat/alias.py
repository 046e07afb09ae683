"""One package under the name of another: a finder that gives out the very modules, never a second copy of one.

A process that multiprocessing starts anew ("spawn", "forkserver") has no such finder, but it gets ``sys.path``. So a
folder stands there, too, with a package that imports this when somebody there asks for the name; it also is what there
is of the parent package where that is not installed. The parent is a namespace package in it, and it comes early, so it
does not hide a parent that is installed, and goes before a namespace package that is.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

__all__ = ["install"]

STAND_IN = str(Path(__file__).parent / "stand_in")


class Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the module `name` as `real`, and whatever lies below likewise."""

    def __init__(self, name: str, real: str) -> None:
        self.name, self.real = name, real

    def covers(self, name: str) -> bool:
        """Whether it is the name, or one below it."""
        return name == self.name or name.startswith(f"{self.name}.")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for all other modules, and for those that this library does not have."""
        found = self._spec(fullname) if self.covers(fullname) else None
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=found.origin, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Put the real module into the place of `module`, which Python made: it takes what is in ``sys.modules``."""
        sys.modules[module.__name__] = importlib.import_module(self._real(module.__name__))

    def get_code(self, fullname: str) -> CodeType | None:
        """For ``python -m``."""
        loader: Any = getattr(self._spec(fullname), "loader", None)
        code: CodeType | None = loader.get_code(self._real(fullname)) if hasattr(loader, "get_code") else None
        return code

    def _real(self, name: str) -> str:
        return self.real + name.removeprefix(self.name)

    def _spec(self, name: str) -> ModuleSpec | None:
        return importlib.util.find_spec(self._real(name))


def install(name: str, real: str) -> None:
    """Let the package `real` be found as `name`, too, from now on. A second time changes nothing.

    Warns (UserWarning) where another package of that name was imported before: what was taken from it stays as it is.
    """
    alias = Alias(name, real)
    installed = [finder for finder in sys.meta_path if isinstance(finder, Alias) and finder.name == name]
    sys.meta_path[:] = [alias, *(finder for finder in sys.meta_path if finder not in installed)]
    if STAND_IN not in sys.path:
        sys.path.insert(1, STAND_IN)  # the first one is the script's own folder
        importlib.invalidate_caches()
    before = sys.modules.get(name)
    if before is importlib.import_module(real):
        return
    if before is not None:
        warnings.warn(
            f"{name} was imported before it was made another name of {real}: what was imported from it so far is still "
            f"the other library's. Write `import {real}.compat.nvrx` above all other imports"
        )
    for each in [each for each in sys.modules if alias.covers(each)]:
        del sys.modules[each]
    if name.rpartition(".")[0] in sys.modules:
        importlib.import_module(name)  # its parent may be asked for it as an attribute
