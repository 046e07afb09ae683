"""What users run on their own training functions; nothing else in the library depends on it."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "inject_fault":  # the module: `inprocess.tools.inject_fault.inject_fault` works after `import inprocess`
        return importlib.import_module("inprocess.tools.inject_fault")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["inject_fault"]
