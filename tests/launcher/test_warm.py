"""Warm workers: a spare interpreter takes the place of a worker that failed, and nobody can tell it from a cold one."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launcher.harness import PAUSE, WORKER, Hub, Launcher, Worker, await_readable

Run = Callable[..., Launcher]
#: what differs between any two processes of a worker
OWN = ("TORCHELASTIC_ERROR_FILE", "INPROCESS_LAUNCHER_KEY", "INPROCESS_LAUNCHER_LEARNS", "INPROCESS_RESTART")


@pytest.fixture
def deadline() -> float:
    """Warm workers import slowly on purpose."""
    return time.monotonic() + 100


@pytest.fixture
def begin(start: Run, hub: Hub) -> Run:
    """`begin("--nproc-per-node", "2")`: workers that tell their modules, and a warm one at once."""

    def begin(*options: str, command: tuple[str, ...] = (WORKER,), **env: str) -> Launcher:
        given = ["--standalone", "--warm-workers", "1", *options, *command, hub.path, "wrapped", "tells"]
        return start(*given, **{PAUSE: "0"}, **env)

    return begin


def end(launcher: Launcher, *workers: Worker) -> None:
    for worker in workers:
        worker.tell("exit 0")
    assert launcher.finish() == 0
    assert launcher.left() == []


def scores(pid: int) -> list[str]:
    """Of a worker and its monitor's program."""
    pids = [pid, *(child.pid for child in psutil.Process(pid).children())]
    return [Path(f"/proc/{each}/oom_score_adj").read_text() for each in pids]


def seen(worker: Worker) -> dict[str, Any]:
    found = worker.ask("see")
    for name in OWN:
        found["environ"][1].pop(name, None)
    return found


@pytest.mark.parametrize("command", [(WORKER,), ("-m", "tests.launcher.worker")])
def test_nobody_can_tell_it_from_a_cold_one(begin: Run, hub: Hub, command: tuple[str, ...]) -> None:
    launcher = begin("--nproc-per-node", "2", command=command)
    first = hub.group(2)
    before, pid = seen(first[1]), launcher.warm()
    first[1].tell("kill 9")
    again = hub.next()
    assert (again.pid, again.rank, again.restart) == (pid, 1, 1)
    assert seen(again) == before
    assert again.ask("limits") == first[0].ask("limits")
    assert launcher.warm(2) != pid  # the next one, for the next failure
    end(launcher, first[0], again)


def test_a_training(start: Run, deadline: float) -> None:
    """With no option. What one has imported ahead works: a group of processes, and the restarts of the others. While it
    waits the kernel takes it first, where memory runs out; later it is like the others."""
    script = str(Path(__file__).with_name("training_script.py"))
    variables = {PAUSE: "0", "LOGLEVEL": "DEBUG", "PET_WARM_WORKERS": None}
    launcher = start("--standalone", "--nproc-per-node", "2", script, **variables)
    for rank in range(2):
        launcher.expect(f"<rank {rank} of 2, ", stream="out")
    pid = launcher.warm()
    ours = Path("/proc/self/oom_score_adj").read_text()
    assert scores(pid) == ["1000\n", ours]
    victim = re.findall(r"<rank 1 of 2, pid (\d+)>", launcher.out)[-1]
    os.kill(int(victim), signal.SIGKILL)
    launcher.expect(f"<rank 1 of 2, pid {pid}>", stream="out")
    assert scores(pid) == [ours, ours]
    launcher.signal(signal.SIGTERM)
    assert launcher.finish() == 128 + signal.SIGTERM
    assert "left out" not in launcher.err
    assert launcher.left() == []


#: a user's: it makes a model and compiles it; and the script that trains it
MODEL = """
import os, pathlib, torch
compiled = torch.compile(torch.nn.Linear(1, 1), backend="eager")
compiled(torch.ones(1, 1)).sum().backward()
pathlib.Path(__file__).with_name(f"made by {os.getpid()}").touch()
"""
TRAINS = """
import os, threading
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import inprocess
from model_of_mine import compiled

inprocess.keep_compiled_code()

@inprocess.Wrapper()
def run(call: inprocess.CallWrapper = None):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(compiled)
    model(torch.ones(1, 1)).sum().backward()
    rank, size, graphs = dist.get_rank(), dist.get_world_size(), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    os.write(1, f"<rank {rank} of {size}, pid {os.getpid()}, {graphs} compiled>\\n".encode())
    while not threading.Event().wait(0.05):
        call.ping()
        dist.all_reduce(torch.ones(1))

run()
"""


def test_what_it_has_compiled_while_it_waited(start: Run, tmp_path: Path) -> None:
    """The program's own module, which it is told to import, makes the model: nobody waits for the compiler later."""
    for name, text in {"model_of_mine": MODEL, "train": TRAINS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    options = ("--standalone", "--nproc-per-node", "2", "--preload", "model_of_mine")
    # torch makes the compiler's folder whatever the backend
    variables = {PAUSE: "0", "PET_WARM_WORKERS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    launcher = start(*options, str(tmp_path / "train.py"), **variables)
    for rank in range(2):
        launcher.expect(f"<rank {rank} of 2, ", stream="out")
    pid = launcher.warm()
    assert (tmp_path / f"made by {pid}").exists()
    victim = re.findall(r"<rank 1 of 2, pid (\d+), 1 compiled>", launcher.out)[-1]
    os.kill(int(victim), signal.SIGKILL)
    launcher.expect(f"<rank 1 of 2, pid {pid}, 1 compiled>", stream="out")
    launcher.signal(signal.SIGTERM)
    assert launcher.finish() == 128 + signal.SIGTERM
    assert launcher.left() == []


def test_its_files_and_its_end(begin: Run, hub: Hub, tmp_path: Path) -> None:
    launcher = begin("--nproc-per-node", "2", "--log-dir", str(tmp_path), "--redirects", "3")
    first = hub.group(2)
    pid = launcher.warm()
    first[1].tell("fail a story")
    again = hub.next()
    assert again.pid == pid
    assert again.ask("show from 1") == {"shown": True}
    assert again.ask("child")["child"] > 0  # ends with it: otherwise the fixture that looks for processes finds it
    again.tell("fail a story")
    last = hub.next()
    files = {str(path.relative_to(tmp_path)).partition("/1/")[2]: path.read_text() for path in tmp_path.rglob("*.log")}
    assert files["restart_1/stdout.log"] == "from 1\n"
    assert files["restart_1/stderr.log"] == "error: from 1\n" + files["stderr.log"]
    assert files["stderr.log"].startswith("Traceback") and files["stderr.log"].endswith("ValueError: a story\n")
    end(launcher, first[0], last)


def test_one_fails_again_and_again(begin: Run, hub: Hub) -> None:
    launcher = begin("--nproc-per-node", "2", "--max-restarts", "2", "--restart-backoff", "0")
    first = hub.group(2)
    launcher.warm()
    first[1].tell("exit 4")
    for _ in range(2):
        hub.next().tell("exit 5")
    assert launcher.finish() == 1
    assert "exit code 5. The job has failed: it has used up its restarts" in launcher.err
    assert launcher.left() == []


@pytest.mark.parametrize("number", [1, 2])
def test_two_fail_at_once(begin: Run, hub: Hub, number: int) -> None:
    """With one warm worker the other one is started cold."""
    launcher = begin("--nproc-per-node", "3", "--warm-workers", str(number))
    first = hub.group(3)
    warm = [launcher.warm(each + 1) for each in range(number)]
    for worker in first[:2]:
        os.kill(worker.pid, signal.SIGKILL)
    again = hub.group(2)
    assert [worker.rank for worker in again] == [0, 1]
    assert len({worker.pid for worker in again}.intersection(warm)) == number
    end(launcher, first[2], *again)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_does_not_answer_is_not_waited_for(begin: Run, hub: Hub, number: signal.Signals) -> None:
    launcher = begin("--nproc-per-node", "2")
    first = hub.group(2)
    pid = launcher.warm()
    os.kill(pid, number)
    first[1].tell("kill 9")
    again = hub.next()
    assert (again.rank, again.restart) == (1, 1) and again.pid != pid
    assert not os.path.exists(f"/proc/{pid}")
    assert launcher.warm(2) != pid
    end(launcher, first[0], again)


def test_it_ends_with_a_launcher_that_is_killed(begin: Run, hub: Hub, deadline: float) -> None:
    launcher = begin()
    worker = hub.next()
    pidfd = os.pidfd_open(launcher.warm())
    launcher.signal(signal.SIGKILL)
    await_readable(pidfd, deadline, "the end of the warm worker")
    os.close(pidfd)
    assert worker.ask("show still here") == {"shown": True}
    worker.tell("exit 0")
    assert launcher.finish() == -signal.SIGKILL


def test_all_are_restarted(begin: Run, hub: Hub) -> None:
    """Their store is another one, and so the warm worker is of no use any more."""
    launcher = begin("--nproc-per-node", "2", "--restart-policy", "any-failed", "--max-restarts", "1")
    pid = launcher.warm()
    hub.group(2)[0].tell("exit 1")
    again = hub.group(2)
    assert pid not in [worker.pid for worker in again]
    assert launcher.warm(2) != pid
    assert not os.path.exists(f"/proc/{pid}")
    end(launcher, *again)


def test_a_module_that_must_not_be_imported_ahead(begin: Run, hub: Hub, tmp_path: Path) -> None:
    """It reads the rank as it is imported, so a worker that has taken it from another one imports it itself."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "reads.py").write_text("import os\nRANK = os.environ.get('RANK')\n")
    script = "import reads, runpy\nprint('rank', reads.RANK)\nrunpy.run_path({WORKER!r}, None, '__main__')\n"
    (tmp_path / "main.py").write_text(script.format(WORKER=WORKER))
    path = os.pathsep.join([str(tmp_path / "site-packages"), os.environ.get("PYTHONPATH", "")])
    launcher = begin("--nproc-per-node", "2", command=(str(tmp_path / "main.py"),), PYTHONPATH=path, LOGLEVEL="DEBUG")
    first = hub.group(2)
    pid = launcher.warm()
    assert "left out from now on: reads\n" in launcher.err
    first[1].tell("kill 9")
    again = hub.next()
    assert again.pid == pid
    end(launcher, first[0], again)
    assert sorted(launcher.out.splitlines()) == ["rank 0", "rank 1", "rank 1"]


def test_nobody_is_asked_where_there_are_none(run: Run, hub: Hub) -> None:
    launcher = run()
    worker = hub.next()
    assert "INPROCESS_LAUNCHER_LEARNS" not in worker.ask("see")["environ"][1]
    end(launcher, worker)
