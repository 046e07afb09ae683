"""min-healthy: a worker that failed is replaced alone, and the others do not notice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.launcher.harness import HOLD, WORKER, Hub, Launcher

Run = Callable[..., Launcher]
#: what differs between two processes of one worker
OWN = {"TORCHELASTIC_ERROR_FILE"}


def same(env: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in env.items() if name not in OWN}


def test_one_worker_is_replaced_and_the_others_go_on(run: Run, hub: Hub) -> None:
    launcher = run("--nproc-per-node", "3")
    first = hub.group(3)
    first[1].tell("kill 9")
    again = hub.next()
    assert (again.rank, again.restart, same(again.env)) == (1, 1, same(first[1].env))
    assert again.pid != first[1].pid
    assert again.env["TORCHELASTIC_RESTART_COUNT"] == "0"
    assert again.env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    for worker in (first[0], first[2], again):
        assert worker.ask("show still here") == {"shown": True}  # the survivors are the same processes
        worker.tell("exit 0")
    assert launcher.finish() == 0
    why = f"rank 1 (local rank 1, pid {first[1].pid}) failed: signal SIGKILL; it is started again at once, 1 of 3"
    assert why in launcher.err
    assert "3 of 3 workers of this node finished; started again alone: rank 1: 1" in launcher.err
    assert launcher.left() == []


def test_a_worker_that_cannot_be_started_again_at_first(run: Run, hub: Hub, tmp_path: Path) -> None:
    """The disk is full, say: the others go on, and it is started as soon as that is possible."""
    launcher = run("--nproc-per-node", "2", "--log-dir", str(tmp_path), "--redirects", "3")
    first = hub.group(2)
    (folder,) = tmp_path.rglob("attempt_0/1")
    (folder / "restart_1").write_text("in the way")
    first[1].tell("kill 9")
    launcher.expect("could not be started again: [Errno 20] Not a directory")
    (folder / "restart_1").unlink()
    again = hub.next()
    for worker in (first[0], again):
        assert worker.ask("show still here") == {"shown": True}
        worker.tell("exit 0")
    assert launcher.finish() == 0 and launcher.left() == []


def test_a_worker_fails_the_job_when_it_has_used_up_its_restarts(run: Run, hub: Hub) -> None:
    launcher = run("--nproc-per-node", "2", "--max-restarts", "2", "--restart-backoff", "0.05")
    first = hub.group(2)
    first[0].tell("exit 3")
    for restart, code in ((1, 4), (2, 5)):
        again = hub.next()
        assert (again.rank, again.restart) == (0, restart)
        again.tell(f"exit {code}")
    assert launcher.finish() == 1
    assert "exit code 3; it is started again at once, 1 of 2" in launcher.err
    assert "exit code 4; it is started again in 0.05 s, 2 of 2" in launcher.err
    assert "exit code 5. The job has failed: it has used up its restarts" in launcher.err
    assert "exitcode  : 5" in launcher.err and "Traceback" not in launcher.err
    assert "exitcode  : 5" in launcher.err
    first[1].gone()


def test_restarts_are_counted_for_each_worker(run: Run, hub: Hub) -> None:
    launcher = run("--nproc-per-node", "2", "--max-restarts", "1")
    first = hub.group(2)
    first[0].tell("exit 1")
    zero = hub.next()
    first[1].tell("exit 1")
    one = hub.next()
    assert (zero.rank, zero.restart, one.rank, one.restart) == (0, 1, 1, 1)
    zero.tell("exit 0")
    one.tell("exit 0")
    assert launcher.finish() == 0
    assert "started again alone: rank 0: 1, rank 1: 1" in launcher.err


def test_a_worker_that_is_done_is_done(run: Run, hub: Hub) -> None:
    """Exit code 0 is no failure, and a failure after it is still replaced alone."""
    launcher = run("--nproc-per-node", "2")
    first = hub.group(2)
    first[0].tell("exit 0")
    first[0].gone()
    first[1].tell("exit 7")
    again = hub.next()
    assert (again.rank, again.restart) == (1, 1)
    again.tell("exit 0")
    assert launcher.finish() == 0


def test_the_children_of_a_failed_worker_go_with_it(run: Run, hub: Hub) -> None:
    """They would hold its devices and ports. Otherwise the fixture that looks for processes finds them."""
    launcher = run("--nproc-per-node", "2")
    first = hub.group(2)
    assert first[0].ask("child")["child"] > 0
    first[0].tell("kill 9")
    again = hub.next()
    for worker in (again, first[1]):
        worker.tell("exit 0")
    assert launcher.finish() == 0


def test_nobody_left_to_join(run: Run, hub: Hub) -> None:
    """The last member that fails takes the job with it: all are restarted, once."""
    launcher = run("--nproc-per-node", "1", "--max-restarts", "1")
    hub.next().tell(f"kill {signal.SIGTERM:d}")
    again = hub.next()
    assert (again.restart, again.env["TORCHELASTIC_RESTART_COUNT"]) == (0, "1")
    again.tell("exit 0")
    assert launcher.finish() == 0
    assert "failed: signal SIGTERM; all workers are restarted, 1 of 1" in launcher.err


def test_nothing_grows_with_restarts(run: Run, hub: Hub, tmp_path: Path) -> None:
    """Descriptors and threads of the launcher, which copies the output as well."""
    options = ["--restart-backoff", "0", "--max-restarts", "20", "--tee", "3", "--log-dir", str(tmp_path)]
    launcher = run("--nproc-per-node", "2", *options)
    first = hub.group(2)
    held = []
    failing = first[0]
    for _ in range(8):
        failing.tell("exit 1")
        failing = hub.next()
        assert failing.ask("show hello") == {"shown": True}
        held.append(len(os.listdir(f"/proc/{launcher.pid}/fd")))
    assert min(held[4:]) <= min(held[:4]), held
    for worker in (failing, first[1]):
        worker.tell("exit 0")
    assert launcher.finish() == 0
    assert launcher.out.count("hello") == 8


def test_workers_are_replaced_though_nobody_reads_the_launcher_s_standard_error(run: Run, hub: Hub) -> None:
    launcher = run("--nproc-per-node", "2")
    first = hub.group(2)
    with launcher.unread():
        first[1].tell("kill 9")
        again = hub.next()
        assert again.rank == 1
    for worker in (first[0], again):
        worker.tell("exit 0")
    assert launcher.finish() == 0
    assert "failed: signal SIGKILL; it is started again at once" in launcher.err


def test_who_fails_right_before_the_job_has_failed_is_not_said_to_be_started_again(start: Run, hub: Hub) -> None:
    """It was started again, but nobody is left whom it could join."""
    launcher = start("--standalone", "--nproc-per-node", "2", WORKER, hub.path, "wrapped-first", **{HOLD: "1000"})
    first = hub.group(2)
    first[0].tell("exit 1")
    again = hub.next()
    assert (again.rank, again.restart) == (0, 1)
    first[1].tell("exit 2")
    assert launcher.finish() == 1
    both = [f"rank {rank} (local rank {rank}, pid {first[rank].pid}) failed: exit code {rank + 1}" for rank in (0, 1)]
    assert f"{'; '.join(both)}. The job has failed: all workers would have to be restarted" in launcher.err
    assert "it is started again" not in launcher.err and "started again alone: none" in launcher.err


def test_a_failure_is_told_though_the_job_ends_otherwise(run: Run, hub: Hub) -> None:
    launcher = run("--nproc-per-node", "2", **{HOLD: "1000"})
    first = hub.group(2)
    first[1].tell("exit 3")
    hub.next()
    launcher.signal(signal.SIGTERM)
    assert launcher.finish() == 128 + signal.SIGTERM
    why = f"rank 1 (local rank 1, pid {first[1].pid}) failed: exit code 3"
    assert [line.partition("] ")[2] for line in launcher.err.splitlines() if "failed" in line] == [why]


def test_a_call_that_ended_with_an_error_on_all_ranks(run: Run, hub: Hub) -> None:
    """Nobody is replaced, and each comes to its own end first."""
    launcher = run("--nproc-per-node", "3")
    workers = hub.group(3)
    for worker in workers:
        assert worker.ask("over") == {"over": True}
    for worker in workers[:2]:
        worker.tell("exit 1")
        worker.gone()
    assert workers[2].ask("show something saved") == {"shown": True}
    workers[2].tell("exit 1")
    assert launcher.finish() == 1
    assert launcher.out == "something saved\n"
    assert (
        "failed: exit code 1, after its call had ended with an error on all ranks. The job has failed" in launcher.err
    )
    assert "it is started again" not in launcher.err
    assert "started again alone: none" in launcher.err
    print(launcher.err)
    assert launcher.err.count("exitcode  : 1") == 3


def test_the_others_called_again_after_such_an_end(run: Run, hub: Hub) -> None:
    """There is a job that a replacement can join."""
    launcher = run("--nproc-per-node", "2")
    first = hub.group(2)
    for worker in first:
        assert worker.ask("over") == {"over": True}
    assert first[0].ask("again") == {"again": True}
    first[1].tell("exit 1")
    again = hub.next()
    assert (again.rank, again.restart) == (1, 1)
    for worker in (first[0], again):
        worker.tell("exit 0")
    assert launcher.finish() == 0
