"""What the launcher inherits from whoever starts it, and signals that it passes on instead of dying of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.harness import BLOCKED, CLOSED, IGNORED, Hub, Launcher

Run = Callable[..., Launcher]
HERE = Path(__file__).parent


def test_children_that_nobody_is_to_wait_for(run: Run, hub: Hub) -> None:
    """SIGCHLD ignored: the kernel would throw exit codes away. A worker that dies is replaced, and the job succeeds."""
    launcher = run("--nproc-per-node", "2", **{IGNORED: "SIGCHLD"})
    first = hub.group(2)
    assert first[0].ask("see")["handlers"]["SIGCHLD"] == str(signal.SIG_DFL)
    first[1].tell("kill 9")
    second = hub.next()
    assert (second.rank, second.restart) == (1, 1)
    assert first[0].ask("show still here") == {"shown": True}
    for worker in (first[0], second):
        worker.tell("exit 0")
    assert launcher.finish() == 0
    assert "signal SIGKILL; it is started again at once, 1 of 3" in launcher.err


def test_a_signal_that_is_ignored_stays_ignored(run: Run, hub: Hub) -> None:
    """As nohup wants it; another signal still ends the launcher."""
    launcher = run("--nproc-per-node", "2", **{IGNORED: "SIGHUP,SIGINT,SIGUSR1"})
    workers = hub.group(2)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
        launcher.signal(number)
    workers[1].tell("kill 9")
    hub.next()  # so it has looked for signals since
    assert workers[0].ask("show still here") == {"shown": True}
    launcher.signal(signal.SIGTERM)
    assert launcher.finish() == 128 + signal.SIGTERM
    assert "SIGUSR1" not in launcher.err


def test_signals_that_are_blocked(run: Run, hub: Hub) -> None:
    """Left over from a parent that waits for them in a thread: they reach the launcher and its workers."""
    launcher = run("--nproc-per-node", "1", **{BLOCKED: "SIGTERM,SIGUSR2"})
    worker = hub.next()
    assert worker.ask("see")["blocked"] == 0
    assert worker.ask("obey") == {"obeying": True}
    launcher.signal(signal.SIGTERM)
    assert worker.hear() == {"got": "SIGTERM"}
    assert launcher.finish() == 128 + signal.SIGTERM


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)], ids=str)
def test_streams_that_are_closed(run: Run, hub: Hub, closed: tuple[int, ...]) -> None:
    launcher = run("--nproc-per-node", "1", **{CLOSED: ",".join(map(str, closed))})
    hub.next().tell("exit 0")
    assert launcher.finish() == 0


# --- SIGUSR1, SIGUSR2 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_it_is_for_the_workers_that_handle_it(run: Run, hub: Hub, number: signal.Signals) -> None:
    """Neither the launcher dies of it nor a worker, nor what a worker has started."""
    launcher = run("--nproc-per-node", "2")
    workers = hub.group(2)
    child = workers[0].ask("child")["child"]  # without a handler
    assert workers[0].ask(f"note {number}") == {"noting": True}
    launcher.signal(number)
    assert workers[0].hear() == {"got": number.name}
    launcher.expect(f"{number.name} is passed on to the workers of ranks 0, which handle it")
    for worker in workers:
        assert worker.ask("show still here") == {"shown": True}
    os.kill(child, signal.SIGKILL)  # it would not have been there
    for worker in workers:
        worker.tell("exit 0")
    assert launcher.finish() == 0


def test_nobody_handles_it(run: Run, hub: Hub) -> None:
    launcher = run("--nproc-per-node", "1")
    worker = hub.next()
    launcher.signal(signal.SIGUSR1)
    launcher.expect("SIGUSR1 is passed on to the workers of none: none handles it")
    assert worker.ask("show still here") == {"shown": True}
    worker.tell("exit 0")
    assert launcher.finish() == 0


def test_who_leaves_of_it_is_not_started_again(run: Run, hub: Hub) -> None:
    """With the status of who left as asked. Who fails for another reason is."""
    launcher = run("--nproc-per-node", "2")
    first = hub.group(2)
    first[1].tell(f"exit {128 + signal.SIGUSR1}")  # before anybody was asked
    second = hub.next()
    launcher.expect("failed: exit code 138; it is started again at once, 1 of 3")
    for worker in (first[0], second):
        assert worker.ask(f"note {int(signal.SIGUSR1)}") == {"noting": True}
    launcher.signal(signal.SIGUSR1)
    for worker in (first[0], second):
        assert worker.hear() == {"got": "SIGUSR1"}
        worker.tell(f"exit {128 + signal.SIGUSR1}")
    assert launcher.finish() == 128 + signal.SIGUSR1
    assert launcher.err.count("has left as asked: SIGUSR1") == 2
    assert "inprocess run: ended by SIGUSR1, with its workers\n" in launcher.err
    assert launcher.left() == []


def test_who_is_left_completes_the_job(run: Run, hub: Hub) -> None:
    launcher = run("--nproc-per-node", "2")
    workers = hub.group(2)
    assert workers[0].ask(f"note {int(signal.SIGUSR2)}") == {"noting": True}
    launcher.signal(signal.SIGUSR2)
    assert workers[0].hear() == {"got": "SIGUSR2"}
    workers[0].tell(f"exit {128 + signal.SIGUSR2}")
    launcher.expect("has left as asked: SIGUSR2")
    workers[1].tell("exit 0")
    assert launcher.finish() == 0


def test_wrapped_workers_leave_in_time(start: Run) -> None:
    """Where it is among leave_signals."""
    script = str(HERE / "wrapped_script.py")
    launcher = start("--standalone", "--nproc-per-node", "2", script, "SIGUSR1")
    for _ in range(2):
        launcher.expect("<running>\n", stream="out")
    launcher.signal(signal.SIGUSR1)
    assert launcher.finish() == 128 + signal.SIGUSR1
    assert launcher.err.count("SIGUSR1 asks this rank to leave the job") == 2
    assert launcher.err.count("has left as asked: SIGUSR1") == 2
    assert "it is started again" not in launcher.err
    assert launcher.left() == []
