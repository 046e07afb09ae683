"""What a wheel of nvidia-resiliency-ext has: names, options and settings; its sources are read and not run."""

from __future__ import annotations

import ast
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

#: names the wheel
VARIABLE = "INPROCESS_TESTS_NVRX_WHEEL"
#: how to get one; nothing of it is installed
DOWNLOAD = (
    "pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_39_x86_64 "
    "nvidia-resiliency-ext==0.7.0"
)
PACKAGE = "nvidia_resiliency_ext"


class Wheel:
    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            self._texts = {
                name: archive.read(name).decode()
                for name in archive.namelist()
                if name.startswith(f"{PACKAGE}/") and name.endswith(".py")
            }

    def names(self, package: str) -> set[str]:
        """The public classes and functions of a package, and the public members of its classes, dotted, below it."""
        found: set[str] = set()
        for file, text in self._texts.items():
            if file.startswith(f"{PACKAGE}/{package}/"):
                module = file.removeprefix(f"{PACKAGE}/{package}/").removesuffix(".py").removesuffix("/__init__")
                found |= {f"{module.replace('/', '.')}.{name}" for name in _defined(ast.parse(text).body)}
        return found

    def arguments(self, module: str, name: str) -> set[str]:
        """The keyword arguments of a class's constructor."""
        (constructor,) = [
            each
            for each in self._class(module, name).body
            if isinstance(each, ast.FunctionDef) and each.name == "__init__"
        ]
        return {each.arg for each in (*constructor.args.args, *constructor.args.kwonlyargs)} - {"self"}

    def fields(self, module: str, name: str) -> set[str]:
        """Those of a dataclass."""
        return {each.target.id for each in self._class(module, name).body if isinstance(each, ast.AnnAssign)}  # type: ignore[union-attr]

    def options(self, *modules: str) -> set[str]:
        """What begins with a dash in the calls of ``add_argument`` of these modules."""
        calls = [
            node
            for module in modules
            for node in ast.walk(ast.parse(self._text(module)))
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument")
        ]
        words = [each.value for call in calls for each in call.args if isinstance(each, ast.Constant)]
        return {word for word in words if isinstance(word, str) and word.startswith("-")}

    def _text(self, module: str) -> str:
        return self._texts[f"{PACKAGE}/{module.replace('.', '/')}.py"]

    def _class(self, module: str, name: str) -> ast.ClassDef:
        (found,) = [
            node for node in ast.parse(self._text(module)).body if isinstance(node, ast.ClassDef) and node.name == name
        ]
        return found


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name
            if isinstance(node, ast.ClassDef):
                yield from (f"{node.name}.{member}" for member in _members(node))


def _members(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        names = [each.name] if isinstance(each, ast.FunctionDef) else []
        targets = (
            each.targets if isinstance(each, ast.Assign) else [each.target] if isinstance(each, ast.AnnAssign) else []
        )
        names += [target.id for target in targets if isinstance(target, ast.Name)]
        yield from (name for name in names if not name.startswith("_"))


def wheel() -> Wheel:
    """That of the variable; the test is skipped where there is none."""
    path = os.environ.get(VARIABLE, "")
    if not path:
        pytest.skip(f"{VARIABLE} names no wheel of nvidia-resiliency-ext 0.7; one can be got with `{DOWNLOAD}`")
    return Wheel(Path(path))
