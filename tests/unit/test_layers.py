"""The rules of docs/design/architecture.md that a reader of the source can check: layers, store keys, what each port is
the only one to do."""

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


#: what it does -> (how that looks in a call or an assignment, the files that may), as the architecture document says
ONLY = {
    "connect to a TCPStore": (r"TCPStore\(|super\(\)\.__init__, host, number", {"store.py"}),
    "map memory": (r"mmap\.mmap\(", {"board.py", "watch_board.py"}),
    "install a signal handler": (
        r"signal\.signal\(",
        {
            "interrupt.py",
            "logs.py",
            "monitor_main.py",
            "launcher/signals.py",
            "tools/inject_fault.py",
            "testing/server.py",
        },
    ),
    "change a variable": (
        r"os\.environ\.(update|pop|setdefault|clear)\(|os\.environ\[[^]]+\] = |del os\.environ|putenv\(",
        {"environment.py", "run.py", "launcher/job.py", "launcher/meeting.py"}
        | {f"testing/{name}.py" for name in ("coverage", "process", "server")},
    ),
}


def within(path: Path) -> str:
    """A file's path inside the package."""
    return path.relative_to(PACKAGE).as_posix()


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


@pytest.mark.parametrize("path", FILES, ids=within)
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
    for path in (path for path in FILES if module(path) != "testing"):  # whose processes are never simulated
        names = {alias.name for node in ast.walk(parsed(path)) if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)}
        assert "time" not in names or path.stem == "clock", f"{path.name} imports time; use inprocess.clock"


@pytest.mark.parametrize("what", ONLY)
def test_what_only_some_files_do(what: str) -> None:
    pattern, files = ONLY[what]
    code = {within(path): ast.unparse(_without_docstrings(parsed(path))) for path in FILES}
    assert {file for file, text in code.items() if re.search(pattern, text)} == files


def test_the_document_names_the_files_that_alone_do_something() -> None:
    text = (ROOT / "docs/design/architecture.md").read_text()
    (section,) = re.findall(r"^## What only some files do\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    for what, (_, files) in ONLY.items():
        (row,) = (line for line in section.splitlines() if line.startswith(f"| {what} "))
        assert {f"{name}.py" for name in re.findall(r"`([\w/]+)`", row)} == files


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            node.body[0] = ast.Pass()
    return tree


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
