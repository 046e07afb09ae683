"""torchrun's options mean the same: its documented examples, under this launcher."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.harness import WORKER, Hub, Launcher, free_port

Run = Callable[..., Launcher]


def finish(launcher: Launcher, hub: Hub, size: int, tell: str = "show hello") -> dict[int, dict[str, str]]:
    """Let all workers say something and exit with 0; their environments by rank."""
    workers = hub.group(size)
    for worker in workers:
        assert worker.ask(tell) == {"shown": True}
        worker.tell("exit 0")
    assert launcher.finish() == 0, launcher.err
    return {worker.rank: worker.env for worker in workers}


def test_standalone(run: Run, hub: Hub) -> None:
    launcher = run("--nproc-per-node=2")
    envs = finish(launcher, hub, 2)
    for rank, env in envs.items():
        assert env["LOCAL_RANK"] == str(rank)
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["GROUP_RANK"]) == ("2", "2", "0")
        assert (env["MASTER_ADDR"], env["TORCHELASTIC_USE_AGENT_STORE"]) == ("127.0.0.1", "True")
        assert (env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "0")
    assert launcher.out.count("hello\n") == 2
    assert launcher.left() == []


def test_one_node_without_an_address(start: Run, hub: Hub) -> None:
    """`torchrun --nproc-per-node N script`: a free port is found."""
    finish(start("--nproc-per-node", "1", WORKER, hub.path), hub, 1)


def test_variables_stand_in_for_options(start: Run, hub: Hub) -> None:
    finish(start("--standalone", WORKER, hub.path, PET_NPROC_PER_NODE="2"), hub, 2)


def test_no_python(start: Run, hub: Hub) -> None:
    command = ["--standalone", "--no-python", "/bin/sh", "-c", 'exec python "$0" "$@"', WORKER, hub.path, "--its=1"]
    launcher = start(*command)
    worker = hub.next()
    assert worker.argv == ["--its=1"]
    worker.tell("exit 0")
    assert launcher.finish() == 0


def test_module(start: Run, hub: Hub) -> None:
    finish(start("--standalone", "-m", "tests.launcher.worker", hub.path), hub, 1)


def test_run_path(start: Run, hub: Hub) -> None:
    launcher = start("--standalone", "--run-path", "--start-method", "fork", WORKER, hub.path, "wrapped")
    hub.next().tell("kill 9")
    assert launcher.finish() == 1
    assert "signal SIGKILL" in launcher.err


@pytest.mark.parametrize("option", ["--redirects", "--tee"])
def test_log_files(run: Run, hub: Hub, tmp_path: Path, option: str) -> None:
    """A worker that is started again writes beside its predecessor, whose last words stay."""
    launcher = run("--nproc-per-node", "2", "--log-dir", str(tmp_path), option, "3")
    first = hub.group(2)
    for worker in first:
        assert worker.ask(f"show from {worker.rank}") == {"shown": True}
    first[1].tell("exit 1")
    again = hub.next()
    assert again.ask("show another")["shown"]
    for worker in (first[0], again):
        worker.tell("exit 0")
    assert launcher.finish() == 0
    files = {str(path.relative_to(tmp_path)).partition("/")[2]: path.read_text() for path in tmp_path.rglob("*.log")}
    assert files == {
        "attempt_0/0/stdout.log": "from 0\n",
        "attempt_0/0/stderr.log": "error: from 0\n",
        "attempt_0/1/stdout.log": "from 1\n",
        "attempt_0/1/stderr.log": "error: from 1\n",
        "attempt_0/1/restart_1/stdout.log": "another\n",
        "attempt_0/1/restart_1/stderr.log": "error: another\n",
    }
    assert launcher.left() == []
    shown = [f"[default{rank}]:{text}" for rank, text in ((0, "from 0"), (1, "from 1"), (1, "another"))]
    assert sorted(launcher.out.splitlines()) == (sorted(shown) if option == "--tee" else [])


def test_local_ranks_filter(run: Run, hub: Hub) -> None:
    launcher = run("--nproc-per-node", "2", "--local-ranks-filter", "1")
    workers = hub.group(2)
    for worker in workers:
        assert worker.ask(f"show from {worker.rank}") == {"shown": True}
        worker.tell("exit 0")
    assert launcher.finish() == 0
    assert launcher.out == "from 1\n"


def test_lines_of_all_workers_in_one_file(run: Run, hub: Hub, tmp_path: Path) -> None:
    options = ["--log-dir", str(tmp_path), "--tee", "3", "--duplicate-stdout-filters", "apple,plum"]
    launcher = run("--nproc-per-node", "2", *options)
    workers = hub.group(2)
    for worker in workers:
        for text in ("an apple", "a pear"):
            assert worker.ask(f"show {text}") == {"shown": True}
        worker.tell("exit 0")
    assert launcher.finish() == 0
    (path,) = tmp_path.rglob("filtered_stdout.log")
    assert sorted(path.read_text().splitlines()) == ["[default0]:an apple", "[default1]:an apple"]


def test_prefix_of_lines(run: Run, hub: Hub) -> None:
    launcher = run("--tee", "1", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="<${role_name} ${rank}>")
    finish(launcher, hub, 1)
    assert "<default 0>hello" in launcher.out


def test_limit_of_descriptors(run: Run, hub: Hub) -> None:
    """Raised in the launcher, where all workers' connections end; a worker has what it would have anyway."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    launcher = run()
    worker = hub.next()
    assert resource.prlimit(launcher.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    assert worker.ask("limits") == {"limits": [soft, hard]}
    worker.tell("exit 0")
    assert launcher.finish() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--restart-policy", "some"], "invalid choice: 'some'"),
        (["--restart-backoff", "-1"], "--restart-backoff=-1: pass a number of seconds, 0 or more"),
        (["--max-restarts", "-1"], "--max-restarts=-1: must be 0 or more"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:1", "--node-rank", "2"], "the node rank is 2"),
        (["--nproc-per-node", "many"], "Unsupported nproc_per_node value: many"),
        (["--tee", "7"], "7 does not match"),
    ],
)
def test_wrong_options(start: Run, options: list[str], message: str) -> None:
    launcher = start(*options, "script.py")
    assert launcher.finish() in (1, 2)
    assert message in launcher.err
    assert "Traceback" not in launcher.err


def test_the_node_rank_comes_from_slurm(start: Run, hub: Hub) -> None:
    with free_port() as port:
        common = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), WORKER, hub.path]
        launchers = [start(*common, SLURM_PROCID=str(rank)) for rank in (1, 0)]
        workers = hub.group(2)
    assert [(worker.rank, worker.env["GROUP_RANK"]) for worker in workers] == [(0, "0"), (1, "1")]
    for worker in workers:
        worker.tell("exit 0")
    assert [launcher.finish() for launcher in launchers] == [0, 0]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from inprocess.launcher import command

    assert command.main(["--help"]) == 0
    assert "  run " in capsys.readouterr().out
    assert command.main(["walk"]) == 2
    assert "unknown command 'walk'" in capsys.readouterr().err
    assert os.environ.get("INPROCESS_RESTART") is None
