"""One package under the name of another: a finder that gives out the very modules, never a second copy of one.

A process that multiprocessing starts anew ("spawn", "forkserver") has no such finder, but it gets ``sys.path``. So a
folder stands there, early, with a package that puts the finder in place when somebody there asks for the name. The
finder then gives out the parent package that is installed, or an empty one where none is.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

__all__ = ["install"]

STAND_IN = str(Path(__file__).parent / "stand_in")


class Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the module `name` as `real`, and whatever lies below likewise.

    `theirs`: modules of the installed `name` that stay, since other parts of that library import them. `spare`: modules
    beside `name`, and this library's, which take their place only where none is installed.
    """

    def __init__(self, name: str, real: str, theirs: Collection[str], spare: Mapping[str, str]) -> None:
        self.name, self.real, self._theirs, self._spare = name, real, theirs, spare
        self._parents = {each.rpartition(".")[0] for each in (name, *spare)}

    def covers(self, name: str) -> bool:
        """Whether it is the name, or one below it."""
        return name == self.name or name.startswith(f"{self.name}.")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for all other modules, and for those that neither library has."""
        if fullname in self._parents:
            return _installed(fullname, path) or ModuleSpec(fullname, None, is_package=True)
        if fullname in self._theirs:
            parent, _, below = self.name.rpartition(".")
            folders = [os.path.join(each, below) for each in sys.modules[parent].__path__]
            return _installed(fullname, folders)
        if not self.covers(fullname) and (fullname not in self._spare or _installed(fullname, path)):
            return None
        found = self._spec(fullname)
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
        return self._spare.get(name) or self.real + name.removeprefix(self.name)

    def _spec(self, name: str) -> ModuleSpec | None:
        return importlib.util.find_spec(self._real(name))


def _installed(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Where Python finds it without this library."""
    return PathFinder.find_spec(name, [each for each in (sys.path if path is None else path) if each != STAND_IN])


def install(name: str, real: str, theirs: Collection[str] = (), spare: Mapping[str, str] | None = None) -> None:
    """Let the package `real` be found as `name`, too, from now on. A second time changes nothing.

    Warns (UserWarning) where another package of that name was imported before: what was taken from it stays as it is.
    """
    alias = Alias(name, real, theirs, spare or {})
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
