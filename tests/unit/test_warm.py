"""What a warm worker imports ahead, and when it is no worker: modules that do things while they are imported."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.distributed.launcher.api import LaunchConfig

from inprocess.heartbeats import modules
from inprocess.launcher import warm, warm_worker
from inprocess.launcher.arguments import parse
from inprocess.launcher.decisions import Rules
from inprocess.launcher.job import _warm_workers
from inprocess.launcher.warm_worker import Spoiled, Unfit, load

#: module -> what it does; all names begin so
SOURCES = {
    "warm_plain": "",
    "warm_asks": "import os; os.environ.get('RANK')",
    "warm_looks": "import os; 'TEST_HOME' in os.environ",
    "warm_sets": "import os; os.environ.setdefault('TEST_HOME', '/data')",
    "warm_fails": "import warm_plain; raise KeyError('RANK')",
    "warm_leaves": "import sys; sys.exit()",
    "warm_needs": "import warm_absent",
    "warm_takes": "import warm_own",
    "warm_own": "",
    "warm_cascade": "import warm_asks",
}


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in SOURCES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TEST_HOME", "")
    monkeypatch.delenv("TEST_HOME")
    yield
    for name in SOURCES:
        sys.modules.pop(name, None)


def plan(*names: str, changed: Any = (), preload: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "names": names,
        "own": ["warm_own"],
        "changed": dict(changed),
        "preload": preload,
        "specific": ["RANK"],
    }


@pytest.mark.parametrize("name", ["warm_asks", "warm_fails", "warm_leaves", "warm_needs", "warm_takes"])
def test_a_module_that_is_left_out(name: str) -> None:
    """The others are imported, so that all of these are found at once."""
    with pytest.raises(Spoiled) as error:
        load(plan(name, "warm_plain"))
    assert error.value.modules == [name]
    assert "warm_plain" in sys.modules
    assert type(os.environ) is os._Environ


def test_whoever_imports_it_first_is_left_out() -> None:
    with pytest.raises(Spoiled) as error:
        load(plan("warm_cascade", "warm_asks"))
    assert error.value.modules == ["warm_cascade"]


def test_what_is_not_there_is_passed_over() -> None:
    load(plan("warm_absent", "warm_absent.below", "warm_plain"))
    assert "warm_plain" in sys.modules


def test_the_user_s_own_modules_only_where_they_are_named() -> None:
    failed = load(plan(preload=("warm_takes", "warm_fails", "warm_absent")))
    assert "warm_own" in sys.modules
    absent = "ModuleNotFoundError: No module named 'warm_absent'"
    assert failed == {"warm_fails": "KeyError: 'RANK'", "warm_absent": absent}


@pytest.mark.parametrize(
    ("changed", "names", "spoiled"),
    [
        ({}, ["warm_looks", "warm_sets"], []),
        ({"TEST_HOME": "/other"}, ["warm_plain"], []),
        ({"TEST_HOME": ""}, ["warm_looks"], ["warm_looks"]),
        ({"TEST_HOME": "/other"}, ["warm_looks"], ["warm_looks"]),
        ({"TEST_HOME": "/other"}, ["warm_sets"], ["warm_sets"]),
        ({"TEST_HOME": "/data"}, ["warm_sets"], []),
        ({"TEST_HOME": None}, ["warm_sets"], ["warm_sets"]),
    ],
)
def test_a_variable_that_the_program_sets(changed: Any, names: list[str], spoiled: list[str]) -> None:
    """Whoever asks for it would have seen the program's value; where a module has set it itself, it is not that."""
    try:
        load(plan(*names, changed=changed))
    except Spoiled as error:
        assert error.modules == spoiled
    else:
        assert not spoiled


def test_a_variable_that_compiled_libraries_read() -> None:
    with pytest.raises(Unfit, match="the program sets OMP_NUM_THREADS, which libraries read as they are loaded"):
        load(plan("warm_plain", changed={"OMP_NUM_THREADS": "4"}))


@pytest.mark.parametrize("answer", [None, 3, 0, 100])
def test_a_variable_that_the_driver_reads(monkeypatch: pytest.MonkeyPatch, answer: int | None) -> None:
    """It counts only once the driver is initialized: it answers anything but 3 then. Without one nothing is loaded."""

    class Driver:
        def __init__(self, *_: object, **__: object) -> None:
            if answer is None:
                raise OSError

        def cuDeviceGetCount(self, _: object) -> int | None:
            return answer

    monkeypatch.setattr(warm_worker.ctypes, "CDLL", Driver)
    given = plan("warm_plain", changed={"CUDA_VISIBLE_DEVICES": "1"})
    if answer in (None, 3):
        load(given)
        return
    with pytest.raises(Unfit, match="the program sets CUDA_VISIBLE_DEVICES"):
        load(given)


def test_no_context_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ModuleType("torch")
    torch.cuda = ModuleType("torch.cuda")  # type: ignore[attr-defined]
    torch.cuda.is_initialized = lambda: True
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(Unfit, match="initializes CUDA"):
        load(plan("warm_plain"))


def module(name: str, origin: str | None, spec: str | None = None) -> tuple[str, ModuleType]:
    made = ModuleType(name)
    if origin is not None:
        made.__spec__ = importlib.util.spec_from_file_location(spec or name, origin)
    return name, made


def test_which_modules_a_worker_tells() -> None:
    site, standard = "/x/lib/python3/site-packages", sysconfig.get_path("stdlib")
    found = dict(
        [
            module("__main__", "/home/me/train.py"),
            module("sys", None),
            module("json", f"{standard}/json/__init__.py"),
            module("torch", f"{site}/torch/__init__.py"),
            module("torch.nn", f"{site}/torch/nn/__init__.py"),
            module("alias", f"{site}/torch/nn/__init__.py", "torch.nn"),
            module("mine.part", "/home/me/mine/part.py"),
            module("both.part", f"{site}/both/part.py"),
            module("both.mine", "/home/me/both/mine.py"),
            module("inprocess.wrap", "/home/me/inprocess/inprocess/wrap.py"),
            module("debian", "/usr/lib/python3/dist-packages/debian.py"),
        ]
    )
    assert modules._sorted(found) == (
        ["json", "torch", "torch.nn", "inprocess.wrap", "debian"],
        ["mine", "both"],
    )


@pytest.mark.parametrize(
    ("command", "runs"),
    [
        ((sys.executable, "-u", "train.py", "--lr", "1"), True),
        ((sys.executable, "-u", "-m", "train"), True),
        ((sys.executable, "-u", "-m"), False),
        ((sys.executable, "-u", "-"), False),
        ((sys.executable, "-u", "train.pyc"), False),
        ((sys.executable, "train.py"), False),
        (("/usr/bin/python0", "-u", "train.py"), False),
        (("numactl", "--physcpubind=0", sys.executable, "-u", "train.py"), False),
        ((sys.executable,), False),
    ],
)
def test_whom_a_warm_worker_can_replace(command: tuple[str, ...], runs: bool) -> None:
    assert warm._runs_program(command) is runs


def test_what_is_left_out_goes_with_all_below_it() -> None:
    workers = warm.WarmWorkers(1, (), (0, 0))
    workers._start = ((), {})
    workers._learn({"spoiled": ["torch.odd"]})
    told = modules.Modules(("torch", "torch.odd", "torch.odd.part", "torch.oddly", "odd"), (), {})
    assert workers._plan(told)["names"] == ["torch", "torch.oddly", "odd"]


def test_variables_that_the_program_has_changed() -> None:
    """By what the launcher gave. Where /proc had a title of the process in place of them, all had changed."""
    workers = warm.WarmWorkers(1, (), (0, 0))
    given = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "HF_HOME": "/given", "MKL_DEBUG": "1"}
    workers._start = ((), given)
    del (found := {**given, "HF_HOME": "/other", "NEW": "", "RANK": "3"})["MKL_DEBUG"]
    told = modules.Modules((), (), found)
    for _ in range(2):
        assert workers._plan(told)["changed"] == {"HF_HOME": "/other", "NEW": "", "MKL_DEBUG": None}
        workers._start = ((), {**given, "MASTER_PORT": "2"})  # all have been restarted since it told


def test_warm_workers_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    workers = warm.WarmWorkers(1, (), (0, 0))
    for _ in range(warm.ATTEMPTS):
        assert not caplog.records
        workers._learn({})
    assert "there are no warm workers from now on: 8 in a row ended before they were used" in caplog.text
    workers._learn({"unfit": "the program sets this"})
    assert "from now on: the program sets this" in caplog.text


@pytest.mark.parametrize("given", [["--warm-workers=-1"], ["--preload=a-b"], ["--preload=a,b."]])
def test_wrong_options(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([*given, "train.py"])
    assert "must be 0 or more" in (said := capsys.readouterr().err) or "is no name of a module" in said


def test_options() -> None:
    parsed = parse(["--warm-workers", "2", "--preload", "a, b.c", "train.py"])
    assert (parsed.warm_workers, parsed.preload) == (2, ("a", "b.c"))


@pytest.mark.parametrize(
    ("given", "rules", "workers", "number"),
    [
        (None, Rules(), 2, None),
        (None, Rules(), 1, 0),
        (None, Rules(respawns=0), 2, 0),
        (None, Rules(policy="any-failed"), 2, 0),
        (0, Rules(), 2, 0),
        (3, Rules(policy="any-failed"), 1, 3),
    ],
)
def test_how_many(given: int | None, rules: Rules, workers: int, number: int | None) -> None:
    """By default one, as memory allows, where a worker may be replaced alone and others are left that it can join."""
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=workers)
    assert _warm_workers(given, rules, config) == number


@pytest.mark.parametrize(
    ("before", "writable", "returned", "after"),
    [
        ("-17\n", True, "-17", "1000"),
        ("1000\n", True, None, "1000\n"),
        ("0\n", False, None, "0\n"),
        ("", True, None, ""),
    ],
)
def test_the_first_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, writable: bool, returned: str | None, after: str
) -> None:
    file = tmp_path / "oom_score_adj"
    file.write_text(before)
    monkeypatch.setattr(warm_worker, "OOM_SCORE", str(file))
    if not writable:
        monkeypatch.setattr(warm_worker, "scored", lambda value: False)
    assert warm_worker.first_to_go() == returned
    assert file.read_text() == after


def test_one_that_would_stay_the_first_to_go_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox may let a process raise its score and not lower it again: the launcher then starts a cold worker."""
    monkeypatch.setattr(warm_worker, "OOM_SCORE", str(tmp_path))
    monkeypatch.setattr(warm_worker.socket, "recv_fds", lambda *_: (b'{"env": {}}', [1, 2], 0, None))
    monkeypatch.setattr(warm_worker.os, "_exit", sys.exit)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(SystemExit):
        warm_worker.become_worker(theirs, "0")


def test_a_path_that_is_not_utf_8_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an error file, say: the report did not find it."""
    env, found = {"TORCHELASTIC_ERROR_FILE": os.fsdecode(b"/log/\xff/error.json")}, []
    monkeypatch.setattr(warm_worker.environment, "put_back", found.append)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [json.dumps({"env": env}).encode()], [1, 2])
        monkeypatch.setattr(warm_worker, "MAX_BYTES", len(json.dumps({"env": env})))
        ours.send(warm_worker.GO)
        warm_worker.become_worker(theirs, None)
    assert found == [env]
