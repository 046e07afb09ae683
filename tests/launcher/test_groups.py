"""any-failed: all workers are restarted, and each time they find an empty store."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.harness import WORKER, Hub, Launcher, free_port

Run = Callable[..., Launcher]
GLOO = str(Path(__file__).with_name("gloo_script.py"))


def test_any_failed_restarts_all(run: Run, hub: Hub) -> None:
    launcher = run("--nproc-per-node", "2", "--restart-policy", "any-failed", "--max-restarts", "1")
    first = hub.group(2)
    first[1].tell("exit 6")
    second = hub.group(2)
    first[0].gone()
    assert [(worker.rank, worker.restart, worker.env["TORCHELASTIC_RESTART_COUNT"]) for worker in second] == [
        (0, 0, "1"),
        (1, 0, "1"),
    ]
    assert first[0].env["MASTER_PORT"] != second[0].env["MASTER_PORT"]
    second[0].tell("exit 8")
    assert launcher.finish() == 1
    second[1].gone()
    assert "exit code 6; all workers are restarted, 1 of 1" in launcher.err
    assert "exitcode  : 8" in launcher.err


def test_workers_that_are_not_wrapped_are_restarted_together(run: Run, hub: Hub) -> None:
    """They could not join the others alone, whatever the policy."""
    launcher = run("--nproc-per-node", "2", "--max-restarts", "1", wrapped=False)
    first = hub.group(2)
    first[0].tell("kill 9")
    second = hub.group(2)
    first[1].gone()
    for worker in second:
        worker.tell("exit 0")
    assert launcher.finish() == 0
    assert "started again alone: none; restarts of all workers: 1" in launcher.err


def test_without_a_number_a_script_that_is_not_wrapped_fails_at_once(run: Run, hub: Hub) -> None:
    """As under torchrun, whose --max-restarts is 0."""
    launcher = run("--nproc-per-node", "1", wrapped=False)
    hub.next().tell("exit 5")
    assert launcher.finish() == 1
    assert "all workers would have to be restarted, and that is not allowed: pass --max-restarts=N" in launcher.err


@pytest.mark.parametrize("rendezvous", ["standalone", "c10d", "static"])
def test_an_unwrapped_gloo_job_restarts(start: Run, rendezvous: str) -> None:
    """Under torchrun the keys of the first attempt are still in the store, and the second hangs or is refused."""
    with free_port() as port:
        where = {
            "standalone": ["--standalone"],
            "c10d": ["--rdzv-backend", "c10d", "--rdzv-id", "j", "--rdzv-endpoint", f"127.0.0.1:{port}"],
            "static": ["--master-addr", "127.0.0.1", "--master-port", str(port)],
        }[rendezvous]
        launcher = start(*where, "--nproc-per-node", "2", "--max-restarts", "1", GLOO)
        assert launcher.finish() == 0, launcher.err
    assert sorted(re.findall("<.*?>", launcher.out)) == ["<0 of 2, attempt 1: 2>", "<1 of 2, attempt 1: 2>"]


def test_a_wrapped_job(start: Run) -> None:
    """One call without faults and one with a restart; the fixture sees that the monitors have ended as well."""
    launcher = start("--standalone", "--nproc-per-node", "2", "-m", "tests.ranks.torchrun_script")
    assert launcher.finish() == 0, launcher.err
    assert sorted(re.findall("<[^<>]*>", launcher.out)) == [
        "<(0, 0, 2, 2) (1, 0, 2, 2)>",
        "<(0, 1, 2, 2) (1, 1, 2, 2)>",
    ]
    assert launcher.left() == []


def test_two_nodes_restart_together(start: Run, hub: Hub) -> None:
    with free_port() as port:
        options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "j", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        options += ["--local-addr", "127.0.0.1", "--max-restarts", "1", WORKER, hub.path]
        launchers = [start(*options), start(*options)]
        first = hub.group(2)
        first[1].tell("exit 9")
        second = hub.group(2)
        first[0].gone()
    assert [worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second] == ["1", "1"]
    for worker in second:
        worker.tell("exit 0")
    assert [launcher.finish() for launcher in launchers] == [0, 0]


def test_a_job_that_failed_on_one_node_ends_on_all(start: Run, hub: Hub) -> None:
    with free_port() as port:
        options = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--max-restarts", "0"]
        launchers = [start(*options, "--node-rank", str(rank), WORKER, hub.path) for rank in (0, 1)]
        workers = hub.group(2)
        workers[1].tell("exit 9")
        assert [launcher.finish() for launcher in launchers] == [1, 1]
    assert "the job has ended: rank 1 (local rank 0" in launchers[0].err
    assert "exitcode  : 9" in launchers[1].err
