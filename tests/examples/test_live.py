"""The examples of `LiveState`: each trains twice, with faults and without, and compares."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., str]


@pytest.mark.parametrize(
    ("script", "faults", "line"),
    [
        # another one may be interrupted before it has committed step 16
        ("live_recovery.py", (), r"rank 0 continues at step 1[56], with the state from rank [12]"),
        (
            "fsdp2_sharded.py",
            ("--faults", "kill:rank=0,step=18 raise:rank=2,step=25"),
            r"with the state from a copy of rank 1; [78] steps are done again",
        ),
    ],
    ids=["live_recovery", "fsdp2_sharded"],
)
@pytest.mark.timeout(310)
def test_the_result_is_the_same(script: str, faults: tuple[str, ...], line: str, run: Run) -> None:
    said = run(script, "--nproc", "3", "--steps", "30", *faults)
    assert re.search(r"with [23] faults \w+: equal", said.splitlines()[-1])
    assert re.search(line, said), said


@pytest.mark.timeout(310)
def test_all_processes_are_lost_and_the_last_checkpoint_is_damaged(run: Run) -> None:
    said = run("elastic_checkpoint.py")
    order = [
        r"2 ranks go on at step 0, .* from nowhere",
        r"--- a node joins",
        r"4 ranks go on at step \d+, .* from (own memory|rank \d)",
        r"--- all training processes are killed",
        r"--- step_\w+ is damaged",
        r"step_\w+ is damaged: __0_0.distcp is not what was written",
        r"4 ranks go on at step \d+, .* from the checkpoint",
        r"--- a node leaves",
        r"2 ranks go on at step \d+, .* from (own memory|rank \d)",
        r"\d+ epochs of 1000 samples: each sample once in every epoch",
        r"--- moved aside: damaged_step_\w+\n",
    ]
    at = 0
    for line in order:
        found = re.compile(line).search(said, at)
        assert found, f"{line} is missing, or too early:\n{said}"
        at = found.start()
    assert "Traceback" not in said


@pytest.mark.timeout(310)
def test_a_replica_group_is_told_at_once(run: Run) -> None:
    rows = run("proactive_recovery.py", "--ways", "collective", "killed").splitlines()[-2:]
    told, on, both = zip(*([float(word) for word in row.split()[-3:]] for row in rows), strict=True)
    assert told[0] > 9.0  # the collective's timeout
    assert told[1] < 6.0
    assert all(alone < again for alone, again in zip(on, both, strict=True))


@pytest.fixture
def run(command):
    """`run("live_recovery.py", "--steps", 30)`: what an example prints, to its end."""

    def to_its_end(script: str, *options: object) -> str:
        example = command(EXAMPLES / script, *options, deadline=300, merged=True)
        assert example.finish() == 0, example.out
        return str(example.out)

    return to_its_end


@pytest.mark.timeout(310)
def test_without_faults_there_is_nothing_to_compare(run: Run) -> None:
    said = run("live_recovery.py", "--nproc", "1", "--steps", "5", "--faults", "none")
    assert said.count("the weights' digest: ") == 1
    assert "with faults" not in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--faults", "kill:rank=0"], "KIND:rank=R,step=S"),
        (["--nproc", "2", "--faults", "kill:rank=2,step=1"], "kill:rank=2,step=1 would never strike with 2 ranks"),
        (["--nproc", "0"], "--nproc=0: must be at least 1"),
    ],
)
def test_wrong_options_are_named(options: list[str], words: str) -> None:
    command = [sys.executable, EXAMPLES / "live_recovery.py", *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert words in done.stderr
