"""Import torch's stores without the rest of torch: about 0.25 s of CPU instead of more than a second, once per rank.

``torch._C`` holds the stores and needs nothing of torch's Python code, but ``import torch._C`` runs
``torch/__init__.py`` first. A stub package in its place avoids that. Only the monitor program does this: nothing else
of torch works there.

What can go wrong differs by torch version, so every step may fail. Until the stores have been registered the stub is
taken away again and torch is imported in full. From then on that would end the process (pybind11 refuses to register
a type twice), so the program has to be started anew: :class:`HalfLoaded`.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types

__all__ = ["HalfLoaded", "load"]

#: the documentation of what is there in place of torch
STUB = "A stub: only the stores of torch are loaded in this process."
#: what `inprocess.store` and a user's ``module:name`` of one of these classes need
_CLASSES = ("Store", "TCPStore", "PrefixStore", "FileStore", "HashStore")


class HalfLoaded(RuntimeError):
    """The light import failed too late to import torch in full in this process."""


def load(full: bool = False) -> str:
    """Make ``torch._C._distributed_c10d`` importable; returns ``"light"`` or ``"full"``, whichever it was.

    Args:
        full: import torch in full; so it is where torch has been imported already.

    Raises:
        HalfLoaded: start the program anew with ``full=True``.
        ImportError: torch cannot be imported at all.
    """
    if not full and (_is_light() or ("torch" not in sys.modules and _load_light())):
        return "light"
    importlib.import_module("torch.distributed")
    return "full"


def _is_light() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.__doc__ == STUB


def _load_light() -> bool:
    try:
        torch, distributed = _install_stubs()
        core = importlib.import_module("torch._C")
        register = core._c10d_init
    except Exception:
        _remove_stubs()
        return False
    torch._C = core  # type: ignore[attr-defined]
    try:
        register()
        stores = importlib.import_module("torch._C._distributed_c10d")
        for name in _CLASSES:
            setattr(distributed, name, getattr(stores, name))
    except Exception as error:
        raise HalfLoaded(f"torch's stores alone cannot be imported: {type(error).__name__}: {error}") from error
    return True


def _install_stubs() -> tuple[types.ModuleType, types.ModuleType]:
    spec = importlib.machinery.PathFinder.find_spec("torch")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("no package torch on sys.path")
    torch = types.ModuleType("torch", STUB)
    torch.__spec__, torch.__file__, torch.__path__ = spec, spec.origin, list(spec.submodule_search_locations)
    distributed = types.ModuleType("torch.distributed", torch.__doc__)
    torch.distributed = distributed  # type: ignore[attr-defined]
    sys.modules["torch"], sys.modules["torch.distributed"] = torch, distributed
    return torch, distributed


def _remove_stubs() -> None:
    # torch._C stays once it is loaded: an extension module cannot be initialized twice
    for name in [name for name in sys.modules if name == "torch" or name.startswith("torch.")]:
        if not name.startswith("torch._C"):
            del sys.modules[name]
