"""The rules of docs/design/architecture.md that a reader of the source can check: layers, store keys, the clock."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "inprocess"
FILES = sorted(PACKAGE.rglob("*.py"))
#: one of the coordinator's keys inside a text: a braced iteration or a fixed word before the slash
KEY = re.compile(
    r"^(\{\}|-?\d+)/(start|end|next|outcome|done|rendezvous|record|abort|wanted)|^(beat|gone)/|^gone#$|^over$|^roster$|^ticket"
)


def layers() -> dict[str, int]:
    """Module -> layer, from the table in the architecture document."""
    text = (ROOT / "docs/design/architecture.md").read_text()
    rows = re.findall(r"^\| (\d) [^|]*\|([^|]*)\|", text, re.MULTILINE)
    assert len(rows) == 6
    return {name.rstrip("/"): int(number) for number, cells in rows for name in re.findall(r"`([\w/]+)`", cells)}


def module(path: Path) -> str:
    """The part of a file's place that the table names: its first directory or its stem."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules of the package that a file imports, also inside functions; not those under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("inprocess"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("inprocess"):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from names if node.module == "inprocess" else [str(node.module)]
        else:
            yield from imports(node)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_to_earlier_layers(path: Path) -> None:
    table = layers()
    assert module(path) in table, f"{path.name} has no layer in docs/design/architecture.md"
    own = table[module(path)]
    for name in imports(parsed(path)):
        target = name.split(".")[1] if "." in name else "__init__"
        where = table.get(target, table["__init__"])  # a name exported by the package itself counts as the package
        assert where <= own, f"{path.name} (layer {own}) imports {name} (layer {where})"


def texts(tree: ast.AST) -> Iterator[str]:
    """String constants, and f-strings with {} for their values; docstrings are not counted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            yield node.value


def test_only_the_coordinator_knows_keys() -> None:
    found = {path.stem: {text for text in texts(parsed(path)) if KEY.match(text)} for path in FILES}
    assert found.pop("coordinator")
    assert not {name: keys for name, keys in found.items() if keys}


def test_only_the_clock_calls_time() -> None:
    for path in FILES:
        names = {alias.name for node in ast.walk(parsed(path)) if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)}
        assert "time" not in names or path.stem == "clock", f"{path.name} imports time; use inprocess.clock"


def test_pure_files_import_no_port() -> None:
    """Layer 0 has no clock, socket, thread or torch."""
    forbidden = {"time", "socket", "threading", "torch", "subprocess", "multiprocessing", "asyncio"}
    for path in FILES:
        if layers().get(module(path)) != 0:
            continue
        for node in ast.walk(parsed(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not forbidden & {name.split(".")[0] for name in names}, f"{path.name} imports {names}"
