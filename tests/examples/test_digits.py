"""The example as users start it: it reaches its accuracy through faults, and says what it did."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "digits_ddp.py"


@pytest.fixture
def run(command):
    """Run the example to its end."""

    def to_its_end(*arguments, launcher=(), code=0):
        example = command(*launcher, SCRIPT, *arguments, deadline=100)
        assert example.finish() == code, example.out + example.err
        return example

    return to_its_end


def shapes(output):
    """The lines without their numbers."""
    return [re.sub(r" *\d+(\.\d+)?", " #", line) for line in output.splitlines()]


def accuracy(output):
    return float(re.search(r"accuracy on held-out images: (\S+)", output)[1])


def test_without_faults(run, tmp_path):
    result = run("--nproc", 2, "--checkpoint-dir", tmp_path)
    assert accuracy(result.out) >= 0.95
    assert "restart" not in result.out + result.err
    assert "2 of 2 processes finished" in result.out
    assert "time lost" not in result.out
    assert "faults survived" not in result.out
    assert (tmp_path / "digits.pt").exists() and not (tmp_path / "digits.tmp").exists()


def test_a_batch_of_more_images_than_there_are(run):
    """Is one of all of them."""
    said = run("--nproc", 1, "--steps", 2, "--batch", 2000, code=1).out
    assert "accuracy on held-out images" in said, "two steps do not reach the goal"


def test_five_faults_with_the_death_of_rank_0(run):
    faults = "kill:rank=2,step=60 raise:rank=1,step=120 hang:rank=3,step=180 kill:rank=0,step=240 raise:rank=3,step=280"
    result = run("--nproc", 4, "--log-every", 60, "--faults", faults)
    report = result.out + result.err
    assert accuracy(result.out) >= 0.95
    sample = shapes((ROOT / "docs/pictures/terminal.txt").read_text())  # the README shows it as a picture
    # a step may be interrupted between its checkpoint and its line
    assert [line for line in shapes(result.out) if line not in sample] == []
    assert shapes(result.out)[-4:] == sample[-4:]
    count, lost, total = re.search(
        r"^restarts: (\d+); time lost: (\S+) s of (\S+) s ", result.out, re.MULTILINE
    ).groups()
    assert int(count) >= 5
    assert 3.0 < float(lost) < float(total)  # one hangs for the soft timeout
    restarts = re.findall(
        r"^restart \d+: (.*); continuing with (\d) of (\d) ranks"
        r"(?:; noticed after 3\.\d s, restarted in| after) \d+ ms$",
        result.err,
        re.MULTILINE,
    )
    assert len(restarts) >= 5, report
    assert [int(after) for _, after, _ in restarts][-1] == 2, report
    assert "rank 2 process died: killed by SIGKILL" in restarts[0][0]
    # the others waited for it in a backward pass
    (hang,) = (told for told, _, _ in restarts if "(soft_timeout)" in told)
    assert re.search(r"rank 2 \(initial rank 3\) was at fault_schedule\.py:\d+ in _hang; 2 waited for others$", hang), (
        report
    )
    codes = "-9, 0, -9, 0 (0: finished; -9: killed by SIGKILL)"
    assert f"2 of 4 processes finished; exit codes by rank: {codes}" in result.out
    assert "faults survived: 5" in result.out


def test_the_world_is_whole_again_after_each_death(run):
    """Under the launcher: those that die are replaced, the others stay, and nothing has to be set up."""
    faults = "kill:rank=0,step=50 kill:rank=2,step=100"
    result = run("--faults", faults, launcher=("inprocess", "run", "--nproc-per-node", 4))
    report = result.out + result.err
    assert accuracy(result.out) >= 0.95
    assert set(re.findall(r"(\d) ranks +\d+ steps/s", result.out)) == {"4"}, report
    assert "rank 0 process died" in report
    assert "4 of 4 workers of this node finished; started again alone: rank 0: 1, rank 2: 1" in report
    assert "restarts of all workers: 0" in report
    # torch makes a folder of its own there now and then
    assert not [name for name in result.left() if not name.startswith("torchinductor")]


def test_deaths_of_other_kinds(run):
    faults = "exit:rank=1,step=50 sysexit:rank=2,step=100 gil:rank=3,step=150"
    result = run("--nproc", 4, "--steps", 200, "--faults", faults, "--soft-timeout", 3, "--hard-timeout", 8)
    codes = "0, 5, 6, -9 (6: ended with an error; 5: ended with an error; 0: finished; -9: killed by SIGKILL)"
    assert f"1 of 4 processes finished; exit codes by rank: {codes}" in result.out


def test_who_ends_unasked_is_named(run):
    """Here all of them: the learning rate is too low for the goal in so few steps."""
    result = run("--nproc", 2, "--steps", 1, code=1)
    assert "exit codes by rank: 1, 1 (1: ended with an error)" in result.out
    assert "FAILED: no fault was to end ranks 0, 1" in result.out


CHECK_ARGUMENTS = """
import os, sys, digits_ddp
for words in [case.split(";") for case in sys.argv[1:]]:
    sys.argv[1:] = words
    if words == ["worker"]:
        sys.argv[1:] = []
        os.environ.update(RANK="0", WORLD_SIZE="1")
    try:
        digits_ddp.arguments()
    except SystemExit as error:
        print("exit code", error.code, file=sys.stderr)
"""


def test_wrong_arguments_are_named():
    """One process for all cases, since importing takes longer than checking."""
    cases = {
        "--faults;kill:rank=1": "'kill:rank=1' is no fault",
        "--faults;kill:rank=2,step=1": "kill:rank=2,step=1 would never strike",
        "--faults;kill:rank=0,step=300": "kill:rank=0,step=300 would never strike",
        "--nproc;0": "--nproc=0: must be at least 1",
        "worker": "--checkpoint-dir is missing",  # it was started by a launcher, so the others must find it too
    }
    command = [sys.executable, "-c", CHECK_ARGUMENTS, *cases]
    path = f"{ROOT}:{SCRIPT.parent}"
    result = subprocess.run(
        command, check=False, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert "Traceback" not in result.stderr
    assert result.stderr.count("exit code 2") == len(cases)
    for words in cases.values():
        assert words in result.stderr
