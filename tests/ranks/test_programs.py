"""Programs written for nvidia-resiliency-ext, from what its documentation says, run here: with the import replaced, and
as they are under `python -m inprocess.compat`. Together they use each name that docs/migration.md calls the same."""

from __future__ import annotations

import ast
import fnmatch
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ReservedPort
from tests.unit import established
from tests.unit.test_migration import ROWS

FOLDER = Path(__file__).parent / "programs"
PACKAGE = "nvidia_resiliency_ext.inprocess"
#: what stands beside it since 0.6
MOVED = "nvidia_resiliency_ext.shared_utils.inject_fault"
Start = Callable[[str, str, dict[str, str]], "subprocess.Popen[str]"]
WAYS = {"import replaced": ["train.py"], "as it is": ["-m", "inprocess.compat", "train.py"]}


@pytest.fixture
def address() -> Iterator[dict[str, str]]:
    with ReservedPort() as port:
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number)}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("older_parts", "as it is", environ)`; what still runs where a test fails is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(program: str, way: str, environ: dict[str, str]) -> subprocess.Popen[str]:
        if not started:  # once: a rank that is just beginning would find it empty
            text = (FOLDER / f"{program}.py").read_text()
            replaced = text.replace(MOVED, "inprocess.tools.inject_fault").replace(PACKAGE, "inprocess")
            (tmp_path / "train.py").write_text(text if way == "as it is" else replaced)
        env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | environ
        command, out = [sys.executable, *WAYS[way]], subprocess.PIPE
        started.append(
            subprocess.Popen(command, cwd=tmp_path, env=env, stdout=out, stderr=subprocess.STDOUT, text=True)
        )
        return started[-1]

    yield begin
    for process in started:
        with process:  # which closes its pipe and waits
            process.kill()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", ["older_parts", "newer_parts"])
def test_parts(program: str, way: str, start: Start, address: dict[str, str]) -> None:
    process = start(program, way, address)
    said = process.communicate()[0]
    assert process.returncode == 0, said


RUNS = [f"initialize {iteration} 4 ACTIVE" for iteration in range(2)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("generation", ["older", "newer"])
def test_training(generation: str, way: str, start: Start, tmp_path: Path, address: dict[str, str]) -> None:
    ranks = [start(f"{generation}_train", way, {**address, "RANK": str(rank), "WORLD_SIZE": "4"}) for rank in range(4)]
    said = [process.communicate()[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0, -9], "\n".join(said)
    results, told = zip(*map(read, sorted(tmp_path.glob("result_*.json"))), strict=True)
    # three are left; the newer program reverses their order in each run
    assert list(results) == (
        [[2, 0, 2, 8.0], [2, 1, 2, 8.0], None] if generation == "older" else [None, [2, 1, 2, 8.0], [2, 0, 2, 8.0]]
    )
    for rank, lines in enumerate(told):
        mode = "INACTIVE" if results[rank] is None else "ACTIVE"
        runs = [line for line in lines if line.startswith("initialize")]
        assert runs == [*RUNS, f"initialize 2 3 {mode}"]
        assert [lines.count(line) for line in ("abort", "flush files now", "filter 4", "filter 2")] == [2, 2, 2, 1]
        assert lines.count("completion") == (generation == "newer")
        assert ("check a bad batch" in lines, "finalize ValueError" in lines) == (rank == 1, rank == 1)
    assert (tmp_path / "monitor_0.log").exists()


def given(program: str) -> set[str]:
    """The options that a program gives to its Wrapper."""
    calls = [node for node in ast.walk(ast.parse((FOLDER / program).read_text())) if isinstance(node, ast.Call)]
    (wrapper,) = [call for call in calls if ast.unparse(call.func) == "inprocess.Wrapper"]
    return {keyword.arg or "" for keyword in wrapper.keywords}


def test_each_option_is_given() -> None:
    options = {*established.OPTIONS.split()}
    assert given("older_train.py") == options - established.NOT_IN_0_2
    assert given("newer_train.py") == options - established.NOT_IN_0_7


def read(file: Path) -> tuple[Any, list[str]]:
    data = json.loads(file.read_text())
    return data["result"], data["told"]


def used(text: str) -> Iterator[str]:
    """The names below the package that a program imports or uses, dotted."""
    for node in ast.walk(ast.parse(text)):
        name = (getattr(node, "module", "") or "").replace(MOVED, f"{PACKAGE}.tools.inject_fault")
        if isinstance(node, ast.ImportFrom) and name.startswith(PACKAGE):
            module = name.removeprefix(PACKAGE).removeprefix(".")
            yield from (f"{module}.{alias.name}".removeprefix(".") for alias in node.names)
        elif isinstance(node, ast.Attribute) and (name := ast.unparse(node)).startswith((PACKAGE, "inprocess.")):
            yield name.removeprefix(PACKAGE).removeprefix("inprocess").removeprefix(".")


def test_each_name_that_is_the_same_is_used() -> None:
    names = {name for file in FOLDER.glob("*.py") for name in used(file.read_text())}
    last = {name.rpartition(".")[2] for name in names}
    same = [row for row, here in ROWS.items() if here == "same"]
    missing = [row for row in same if row.rpartition(".")[2] not in last and not fnmatch.filter(names, row)]
    assert len(same) > 50
    assert not missing
