"""`inprocess run --wrap`: a training at the level of the module restarts, and is not changed for it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from inprocess.exception import OptionError
from inprocess.launcher import arguments, wrapped
from inprocess.options import Options
from inprocess.system import program
from tests.launcher.harness import ROOT, Launcher

SCRIPT = str(Path(__file__).with_name("unwrapped_script.py"))
NESTED = str(Path(__file__).with_name("restarting_script.py"))
Start = Callable[..., Launcher]


def lines(launcher: Launcher) -> list[str]:
    return sorted(re.findall("<(.*)>", launcher.out))


@pytest.mark.parametrize("fault", ["", "raise", "kill"])
def test_a_script(start: Start, tmp_path: Path, fault: str) -> None:
    """Argument, folder, name and names of the module are as in the first run; the model of that is gone."""
    cache = str(tmp_path)  # or torch makes one for its compiler, and leaves it
    arguments = ["--nproc-per-node", "2", "--wrap", SCRIPT, f"--fault={fault}"]
    launcher = start("--standalone", *arguments, TORCHINDUCTOR_CACHE_DIR=cache)
    assert launcher.finish() == 0, launcher.err
    iterations = 1 if fault else 0
    found = lines(launcher)
    if fault == "kill":  # it may be let in at once, or when the others have gone on without it
        found = [re.sub("iteration [12]", "iteration 1", line) for line in found]
    expected = [f"{rank} of 2, iteration {iterations}, 1 model alive, {ROOT} __main__" for rank in range(2)]
    assert found == expected, launcher.err
    assert launcher.left() == []


def test_a_module(start: Start) -> None:
    path = str(Path(SCRIPT).parent)
    launcher = start(
        "--standalone", "--nproc-per-node", "2", "--wrap", "-m", "tests.launcher.unwrapped_script", PYTHONPATH=path
    )
    assert launcher.finish() == 0, launcher.err
    assert len(lines(launcher)) == 2


def test_its_exit_code_is_that_of_the_job(start: Start) -> None:
    launcher = start("--standalone", "--wrap", "--max-restarts", "0", SCRIPT, "--fault=exit")
    assert launcher.finish() == 1
    assert "exitcode  : 3" in launcher.err


def test_one_that_is_wrapped_already(start: Start) -> None:
    launcher = start("--standalone", "--wrap", "--max-restarts", "0", "--option", "max_repeats=5", NESTED)
    assert launcher.finish() == 1
    assert "wrap only the outermost function" in launcher.err
    assert len(re.findall(r"^restart \d+: ", launcher.err, re.M)) == 2, launcher.err  # a mistake is tried three times


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--wrap", "--option", "soft_timeut=20"], "unknown option soft_timeut=20: did you mean 'soft_timeout'?"),
        (
            ["--wrap", "--option", "soft_timeout"],
            "--option soft_timeout: write NAME=VALUE, such as --option",
        ),
        (["--wrap", "--option", "soft_timeout=x"], "soft_timeout='x'"),
        (["--option", "soft_timeout=20"], "--option soft_timeout=20: it is for --wrap"),
        (["--wrap", "--no-python"], "--wrap runs a Python script or, with -m, a module: leave --no-python out"),
        (["--wrap", "--run-path"], "--wrap runs a Python script or, with -m, a module: leave --run-path out"),
    ],
)
def test_wrong_options(start: Start, options: list[str], message: str) -> None:
    launcher = start(*options, SCRIPT)
    assert launcher.finish() == 2
    assert message in launcher.err.splitlines()[0]


def test_the_examples_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the page, of --help, and of the error."""
    page = (ROOT / "docs/launcher.md").read_text().replace("\\\n", "")
    commands = re.findall(r"^inprocess run (.*--wrap.*)$", page, re.M)
    assert len(commands) >= 2
    for command in commands:
        assert arguments.parse(shlex.split(command)).wrap
    with pytest.raises(SystemExit):
        wrapped.main(["--help"])
    (shown,) = re.findall(r"such as (\S+) \(seconds\)", " ".join(capsys.readouterr().out.split()))
    with pytest.raises(OptionError, match=f"such as --option {shown}$"):
        wrapped.options(["soft_timeout"])
    assert Options.build(**wrapped.options([shown]))


def test_the_script_is_looked_for_before_workers_start(start: Start) -> None:
    launcher = start("--wrap", "tests/launcher/unwraped_script.py")
    assert launcher.finish() == 2
    assert "did you mean 'unwrapped_script.py'?" in launcher.err


def test_a_module_in_the_working_directory(tmp_path: Path) -> None:
    """Also for the command ``inprocess wrap -m``: the first place on its path is the folder of the command."""
    (tmp_path / "mine_alone.py").write_text("import sys\nprint(sys.argv[1:], sys.path[0])\n")
    code = "import sys; from inprocess.system import program\nsys.path[0] = '/usr/bin'\n"
    code += "program.run(program.module(['mine_alone', '--an', 'option']))\n"
    command, path = [sys.executable, "-c", code], os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.stdout == f"['--an', 'option'] {tmp_path}\n", done.stderr


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "the environment variables RANK and WORLD_SIZE are not set. Start the script with a launcher"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "the environment variable MASTER_ADDR is not set. "),
    ],
)
def test_without_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: dict[str, str], message: str
) -> None:
    """One line, not ten frames in front of it."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "INPROCESS_LAUNCH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert wrapped.main([SCRIPT]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"inprocess wrap: {message}")


def test_an_option_error_of_the_program_s_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has its traceback."""
    script = tmp_path / "script.py"
    script.write_text("import inprocess\ninprocess.Wrapper(soft_timeout=0)\n")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with pytest.raises(OptionError, match="soft_timeout=0"):
        wrapped.main(["--option", "enabled=false", str(script)])


@pytest.mark.parametrize("is_begun", [False, True])
def test_only_the_names_of_the_script_are_cleared(monkeypatch: pytest.MonkeyPatch, is_begun: bool) -> None:
    """An interruption may come before the script has a `__main__` of its own."""
    ours, its = types.ModuleType("__main__"), types.ModuleType("__main__")
    ours.kept, its.model = True, object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", ours)

    def interrupted(_: object) -> None:
        if is_begun:
            sys.modules["__main__"] = its
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "anew", interrupted)
    with pytest.raises(KeyboardInterrupt):
        wrapped._function(lambda: None, "train.py")()
    assert ours.kept and hasattr(its, "model") is not is_begun
