"""The pytest plugin as others meet it: in a session of its own, in a folder of its own, beside other plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TRAIN = """
import inprocess

@inprocess.Wrapper()
def train(steps, call: inprocess.CallWrapper = None):
    for _ in range(steps):
        call.ping()
    return after(steps)

def after(steps):
    return steps + 1  # the last line
"""
TESTS = """
from inprocess.testing import At, Raise
import train

def test_values(ranks):
    assert ranks(2).run(train.train, 3).values == [4, 4]

def test_restarts(ranks):
    assert ranks(2).run(train.train, 3, faults={At(1, step=1): Raise()}).world_sizes == [2, 2]
"""


@pytest.fixture
def session(tmp_path):
    """`session("-q")`: pytest in a folder with `TRAIN` and `TESTS`; what it printed."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "test_train.py").write_text(TESTS)

    def run(*arguments: str, code: int = 0, program: str = "-m pytest", **env: str) -> str:
        command = [sys.executable, "-W", "ignore", *program.split(), *arguments]
        variables = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
        variables |= {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))), **env}
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    return run


def test_it_is_there_without_configuration(session):
    assert "2 passed" in session("-q")


def test_a_module_that_only_pytest_can_import(session):
    assert "2 passed" in session("-q", "--import-mode=importlib")


def test_beside_xdist(session):
    assert "2 passed" in session("-q", "-n", "2")


def test_beside_pytest_timeout(session, tmp_path):
    """The deadline of the ranks is earlier, so the story is told; also where it takes long until ranks can start."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(4)\n")
    (tmp_path / "test_train.py").write_text(
        TESTS + "\nfrom inprocess.testing import Hang\ndef test_hangs(ranks):\n"
        "    ranks(1).run(train.train, 3, faults={At(0, step=1): Hang()})\n"
    )
    said = session("-q", "--timeout=25", "-k", "hangs", "-o", "inprocess_preload=slow", code=1)
    assert (
        "Deadline: the deadline has passed; these ranks still ran: 0; the deadline was" in said and "--- stacks" in said
    )


def test_coverage_of_ranks(session, tmp_path):
    """Lines that only ranks run."""
    session("-q", "-k", "values", program="-m coverage run -p --source=. -m pytest")
    session(program="-m coverage combine -q")
    said = session(program="-m coverage report")
    assert "\ntrain.py            8      0   100%" in said and "test_train.py       6      1    83%" in said


def test_a_failing_test_tells_the_story_once(session, tmp_path):
    (tmp_path / "test_train.py").write_text(TESTS.replace("== [2, 2]", "== [2, 1]"))
    said = session("-q", "-k", "restarts", code=1)
    parts = ["At index 1 diff: 2 != 1", "--- faults", "Raise() in iteration 0, step 1 [train.py:7 in train]"]
    parts += ["--- phases", "--- last lines of the logs", "ValueError: injected"]
    places = [said.index(part) for part in parts]
    assert places == sorted(places)
    assert all(said.count(part) == 1 for part in parts if part.startswith("---"))
    assert "job.py" not in said, "the source of the library is not shown"


def test_a_failing_command_shows_what_it_printed(session, tmp_path):
    (tmp_path / "test_train.py").write_text(
        "def test_it(command):\n    assert command('inprocess', 'runn').finish() == 0\n"
    )
    said = session("-q", code=1)
    assert "assert 2 == 0" in said and "did you mean 'run'?" in said


def test_nothing_where_nobody_asks(session, tmp_path):
    (tmp_path / "test_train.py").write_text(
        "import sys\ndef test_nothing():\n"
        "    assert 'torch' not in sys.modules and 'inprocess.testing.run' not in sys.modules\n"
        "    assert 'multiprocessing.forkserver' not in sys.modules\n"
    )
    assert "1 passed" in session("-q")


def test_fixtures_and_parameters_of_these_names(session, tmp_path):
    """The server would import torch for them."""
    (tmp_path / "test_train.py").write_text(
        "import pytest, sys\n"
        "@pytest.fixture\ndef ranks():\n    return 2\n"
        "@pytest.mark.parametrize('command', ['ls'])\n"
        "def test_these(ranks, command):\n"
        "    assert (ranks, command) == (2, 'ls') and 'multiprocessing.forkserver' not in sys.modules\n"
    )
    assert "1 passed" in session("-q")


def test_a_fixture_that_is_made_of_this_one(session, tmp_path):
    """What the configuration has imported is imported for its ranks, too."""
    (tmp_path / "early.py").write_text("")
    (tmp_path / "train.py").write_text("import inprocess, sys\n" + TRAIN.replace("steps + 1", "'early' in sys.modules"))
    (tmp_path / "test_train.py").write_text(
        "import functools, pytest, train\n"
        "@pytest.fixture\ndef ranks(ranks):\n    return functools.partial(ranks, env={'A': 'b'})\n"
        "def test_it(ranks):\n    assert ranks(1).run(train.train, 1).values == [True]\n"
    )
    assert "1 passed" in session("-q", "-o", "inprocess_preload=early")


def test_collecting_needs_no_torch(session, tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('there is none', name='torch')")
    (tmp_path / "train.py").write_text("def train(steps): ...")
    assert "2 tests collected" in session("-q", "--collect-only")


def test_the_import_takes_no_time():
    """The plugin brings a handful of small modules of this library, and none of others: milliseconds."""
    code = "import pytest, sys; old = {*sys.modules}; import inprocess.testing.plugin; print(*sys.modules.keys() - old)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True)
    brought = run.stdout.split()
    assert len(brought) <= 8
    assert {name.partition(".")[0] for name in brought} == {"inprocess"}
