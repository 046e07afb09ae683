"""The doctor on scripts with defects: each check fails for real, with the line, and a clean script has nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inprocess.doctor import script_copy, script_runs
from inprocess.doctor.script import SCRIPT_CHECKS, SEED, examine
from inprocess.exception import OptionError

from . import scripts

HERE = Path(__file__).parent


@pytest.fixture
def doctor(tmp_path, monkeypatch):
    """`doctor(text)`: the findings, as a set of (check, level, where); the lines of progress in `doctor.said`."""
    monkeypatch.chdir(tmp_path)
    # a random schedule of its own for each run; this one can be repeated
    monkeypatch.setenv(SEED, "7")

    def run(text: str, nproc: int = 2):
        (tmp_path / "train.py").write_text(scripts.HEAD + text)
        run.said = []
        run.findings = list(examine(["train.py"], nproc, run.said.append))
        print(*run.said, *run.findings, sep="\n")
        assert [path.name for path in tmp_path.iterdir() if path.suffix != ".txt"] == ["train.py"]
        if run.findings and len(run.said) > 3:
            note = run.findings.pop()
            assert (note.check, note.level, note.what) == ("script.schedule", "note", f"{SEED}=7, {nproc} ranks")
        return {(each.check.removeprefix("script."), each.level, each.where) for each in run.findings}

    return run


def line(text: str, comment: str) -> list[str]:
    """The lines that end with this comment."""
    lines = (scripts.HEAD + text).splitlines()
    found = [f"train.py:{number}" for number, line in enumerate(lines, 1) if line.endswith(f"  # {comment}")]
    assert found
    return found


def problem(text: str, check: str) -> tuple[str, str, str]:
    return (check, "problem", line(text, check)[0])


@pytest.mark.slow
def test_three_bugs_in_one_run_of_the_command(tmp_path):
    """Each of them hides another one."""
    shutil.copy(HERE / "planted.py", tmp_path)
    lines = (tmp_path / "planted.py").read_text().splitlines()
    assert len(lines) <= 60
    variables = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "RES_OPTIONS": "attempts:0"}
    command = [sys.executable, "-m", "inprocess", "doctor", "--json", "--", "planted.py"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    findings = [each for each in json.loads(done.stdout)["findings"] if each["check"].startswith("script.")]
    found = {each["check"]: lines[int(each["where"].partition(":")[2]) - 1].strip() for each in findings[:-1]}
    assert found == {
        "script.group-outside": 'dist.init_process_group("gloo")',
        "script.containers": "HOOKS.append(hook)",
        "script.checkpoint": 'torch.save(state, "checkpoints/last.pt")',
    }
    assert all(each["level"] == "problem" and each["why"] and each["remedy"] for each in findings[:-1])
    assert findings[-1]["check"] == "script.schedule" and SEED in findings[-1]["what"]
    assert [path.name for path in tmp_path.iterdir()] == ["planted.py"], "what the runs write is not here"


@pytest.mark.slow
def test_a_clean_script(doctor):
    assert doctor(scripts.CLEAN, nproc=4) == set()
    assert f"{SEED}=7" in doctor.said[0] and len(doctor.said) == 6


@pytest.mark.slow
def test_what_grows(doctor):
    found = doctor(scripts.GROWS)
    for check in ("threads", "descriptors", "children", "containers"):
        assert problem(scripts.GROWS, check) in found
    whats = {each.what.removeprefix("more with each restart: "): each.where for each in doctor.findings}
    for kind in (
        "results in the cache of __main__.cached",
        "hooks of __main__.MODEL",
        "hooks of all modules",
        "hooks of all optimizers",
        "functions registered with atexit",
        "handlers of loggers",
        "entries in sys.path",
        "importers in sys.meta_path",
        "functions in gc.callbacks",
        "different handlers of SIGUSR1",
        "different values of sys.excepthook",
    ):
        (where,) = (where for what, where in whats.items() if what.startswith(f"{kind}: "))
        assert where in line(scripts.GROWS, kind), kind


@pytest.mark.slow
def test_defects_behind_others(doctor):
    found = doctor(scripts.HIDES)
    assert {problem(scripts.HIDES, check) for check in ("group-kept", "checkpoint")} == found


@pytest.mark.slow
def test_habits(doctor, tmp_path, monkeypatch):
    monkeypatch.setenv("ELSEWHERE", str(tmp_path / "elsewhere.txt"))
    found = doctor(scripts.HABITS)
    assert {("pings", "warning", ""), ("no-group", "warning", ""), ("state", "warning", "")} <= found
    assert {("timeouts", "warning", ""), ("files", "warning", line(scripts.HABITS, "files")[0])} <= found


@pytest.mark.slow
def test_a_world_size_and_a_result(doctor):
    found = doctor(scripts.FIXED)
    assert found == {problem(scripts.FIXED, "fewer-ranks"), ("result", "warning", "")}


@pytest.mark.slow
def test_a_script_that_waits_for_a_replacement(doctor):
    assert doctor(scripts.WAITS) == set()
    assert any("replaces the dead one" in line for line in doctor.said)


@pytest.mark.slow
def test_a_hang_that_nothing_notices(doctor, monkeypatch):
    monkeypatch.setattr(script_runs, "LIMIT", 10)
    assert doctor(scripts.UNPROTECTED, nproc=1) == {problem(scripts.UNPROTECTED, "hang")}


@pytest.mark.slow
def test_what_only_the_first_run_makes(doctor):
    assert problem(scripts.ONCE, "restart") in doctor(scripts.ONCE)


@pytest.mark.slow
def test_an_error_that_is_caught(doctor):
    assert problem(scripts.CATCHES, "swallows") in doctor(scripts.CATCHES)


@pytest.mark.slow
def test_an_interruption_that_is_swallowed(doctor):
    assert problem(scripts.SWALLOWS, "swallows") in doctor(scripts.SWALLOWS)


@pytest.mark.slow
def test_groups_that_are_made_at_import(doctor):
    assert doctor(scripts.AT_IMPORT) == {
        ("group-outside", "problem", where) for where in line(scripts.AT_IMPORT, "group-outside")
    }


@pytest.mark.parametrize("text", ["UNWRAPPED", "DISABLED", "FAILS", "STANDS"])
def test_nothing_to_restart(doctor, monkeypatch, text):
    monkeypatch.setattr(script_runs, "LIMIT", 8)
    program = getattr(scripts, text)
    check = "ends" if "# ends" in program else "wrapper"
    assert doctor(program) == {(check, "problem", line(program, check)[0] if "# " in program else "")}
    assert len(doctor.said) == 2, "nothing more is tried"


def test_a_rank_that_dies_by_itself(doctor):
    assert doctor(scripts.DIES) == {("ends", "problem", "")}
    assert "exit code -9" in doctor.findings[0].what


def test_the_users_files_stay_as_they_are(doctor, tmp_path, monkeypatch):
    """Large ones are links until the script writes to them."""
    monkeypatch.setattr(script_copy, "FILE", 10)
    (tmp_path / "large.txt").write_text("large " * 10)
    (tmp_path / "small.txt").write_text("small")
    doctor('open("large.txt", "a").write("more"); open("small.txt", "w").close(); os.remove("large.txt")')
    assert (tmp_path / "large.txt").read_text() == "large " * 10
    assert (tmp_path / "small.txt").read_text() == "small"


def test_the_users_files_behind_a_link_stay_as_they_are(doctor, tmp_path, tmp_path_factory):
    """A folder for checkpoints on a larger disk, say."""
    elsewhere = tmp_path_factory.mktemp("scratch")
    (elsewhere / "last.pt").write_text("of a week")
    os.symlink(elsewhere, tmp_path / "checkpoints.txt")
    doctor(scripts.WRITES_BEHIND_A_LINK)
    assert [(path.name, path.read_text()) for path in elsewhere.iterdir()] == [("last.pt", "of a week")]


def test_a_tree_behind_a_link_that_stays_is_not_removed(doctor, tmp_path, tmp_path_factory, monkeypatch):
    """It has too many files to be copied."""
    monkeypatch.setattr(script_copy, "FILES", 3)
    elsewhere = tmp_path_factory.mktemp("scratch")
    (elsewhere / "step_1").mkdir()
    for name in "abcd":
        (elsewhere / "step_1" / name).write_text("of a week")
    os.symlink(elsewhere, tmp_path / "checkpoints.txt")
    doctor('import shutil; shutil.rmtree("checkpoints.txt/step_1", ignore_errors=True)')
    assert len(list((elsewhere / "step_1").iterdir())) == 4


def test_wrong_usage(tmp_path, monkeypatch):
    with pytest.raises(OptionError, match=r"doctor -- none.py: there is no such script"):
        examine(["none.py"], 2, print)
    monkeypatch.setenv(SEED, "x")
    with pytest.raises(OptionError, match=f"{SEED}='x' is not a number"):
        examine([__file__], 2, print)


def test_the_page_lists_the_checks() -> None:
    page = (HERE.parents[1] / "docs/doctor.md").read_text()
    rows = re.findall(r"^\| `(script\.[a-z-]+)` \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert rows == [(check.id, check.about, check.remedy) for check in SCRIPT_CHECKS]
    assert SEED in page


def test_each_check_is_complete() -> None:
    assert len({check.id for check in SCRIPT_CHECKS}) == len(SCRIPT_CHECKS)
    for check in SCRIPT_CHECKS:
        assert check.id.startswith("script.") and check.about and check.why and check.remedy
        assert not any("\n" in text for text in (check.about, check.why, check.remedy))
