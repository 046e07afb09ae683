"""The directory for events that a launcher makes: named at the beginning and at the end, one for all nodes of a job."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inprocess.reports.reading import read
from inprocess.testing import Command
from tests.launcher.harness import CEILING, free_port

SCRIPT = str(Path(__file__).with_name("restarting_script.py"))
Run = Callable[..., Command]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    commands: list[Command] = []

    def begin(*arguments: str, variable: str | None = None) -> Command:
        environ = {"INPROCESS_RUN_DIR": variable}
        deadline = time.monotonic() + CEILING
        commands.append(Command(["inprocess", "run", *arguments], deadline, env=environ, folder=tmp_path))
        return commands[-1]

    yield begin
    for command in commands:
        command.close()


def _made(tmp_path: Path) -> Path:
    (made,) = (tmp_path / "inprocess-runs").iterdir()
    return made


def test_it_is_named_first_and_after_a_restart(run: Run, tmp_path: Path) -> None:
    command = run("--nproc-per-node", "2", SCRIPT)
    assert command.finish() == 0, command.err
    made = _made(tmp_path)
    lines = [line for line in command.err.splitlines() if line.startswith("[inprocess run")]
    assert lines[0].endswith(f"] events and reports of this job: {made} (inprocess report {made})")
    assert lines[-1].endswith(f"] 1 restart; inprocess report {made}")
    (trail,), _ = read(str(made))
    assert len(trail.of("restart")) == 2


def test_nodes_have_one(run: Run, tmp_path: Path) -> None:
    with free_port() as port:
        where = ["--rdzv-backend", "c10d", "--rdzv-id", "job 9", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        nodes = [run("--nnodes", "2", "--local-addr", "127.0.0.1", *where, SCRIPT) for _ in range(2)]
        assert [node.finish() for node in nodes] == [0, 0], [node.err for node in nodes]
    made = _made(tmp_path)
    assert re.fullmatch(r"\d{8}-\d{6}-job-9", made.name)
    (trail,), _ = read(str(made))
    assert {source.header.initial_rank for source in trail.sources if not source.is_monitor} == {0, 1}


@pytest.mark.parametrize(("option", "variable"), [(["--run-dir", "none"], None), ([], "none"), ([], "")])
def test_none_is_none(run: Run, tmp_path: Path, option: list[str], variable: str | None) -> None:
    command = run("--nproc-per-node", "2", *option, SCRIPT, variable=variable)
    assert command.finish() == 0, command.err
    assert list(tmp_path.iterdir()) == []
    assert "inprocess report" not in command.err


def test_a_script_without_a_wrapped_function_leaves_nothing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("")
    command = run("plain.py")
    assert command.finish() == 0, command.err
    assert [path.name for path in tmp_path.iterdir()] == ["plain.py"]
