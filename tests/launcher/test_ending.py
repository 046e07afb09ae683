"""Ends: signals with their grace, error files, exit codes, what workers ask for. Nothing is left behind each time."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.harness import WORKER, Hub, Launcher, free_port

Run = Callable[..., Launcher]
HERE = Path(__file__).parent


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on(run: Run, hub: Hub, number: signal.Signals) -> None:
    launcher = run("--nproc-per-node", "2")
    workers = hub.group(2)
    if number == signal.SIGTERM:
        for worker in workers:
            assert worker.ask("obey") == {"obeying": True}
    launcher.signal(number)
    for worker in workers:
        assert worker.hear() == ({"got": "SIGTERM"} if number == signal.SIGTERM else {})
    assert launcher.finish() == 128 + number
    assert f"inprocess run: ended by {number.name}, with its workers\n" in launcher.err
    assert "SignalException" not in launcher.err
    assert ("KeyboardInterrupt" in launcher.err) == (number == signal.SIGINT)
    assert launcher.left() == []


def test_who_takes_too_long_is_killed(run: Run, hub: Hub) -> None:
    launcher = run("--nproc-per-node", "2", "--shutdown-timeout", "3")
    stubborn, other = hub.group(2)
    assert stubborn.ask("ignore") == {"ignoring": True}
    assert stubborn.ask("child")["child"] > 0
    launcher.signal(signal.SIGTERM)
    assert stubborn.hear() == {"got": "SIGTERM"}
    other.gone()
    assert launcher.finish() == 128 + signal.SIGTERM
    assert f"the worker with local rank 0 (pid {stubborn.pid}) is killed" in launcher.err
    assert launcher.left() == []


def test_a_second_signal_ends_the_grace(run: Run, hub: Hub) -> None:
    launcher = run("--nproc-per-node", "1", "--shutdown-timeout", "1000")
    worker = hub.next()
    assert worker.ask("ignore") == {"ignoring": True}
    launcher.signal(signal.SIGTERM)
    assert worker.hear() == {"got": "SIGTERM"}
    launcher.signal(signal.SIGTERM)
    assert launcher.finish() == 128 + signal.SIGTERM
    worker.gone()


def test_a_signal_while_it_waits_for_other_nodes(start: Run) -> None:
    """Inside torch's rendezvous, and with a static one inside C++."""
    with free_port() as port:
        static = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        launcher = start(*static, WORKER)
        launcher.expect("this node waits for the others")
        launcher.signal(signal.SIGTERM)
        assert launcher.finish() == 128 + signal.SIGTERM
    assert "inprocess run: ended by SIGTERM" in launcher.err


def test_a_worker_that_waits_to_be_started_again(run: Run, hub: Hub) -> None:
    """A signal during the pause before a restart."""
    launcher = run("--nproc-per-node", "2", "--restart-backoff", "1000", "--restart-backoff-limit", "1000")
    first = hub.group(2)
    first[1].tell("exit 1")
    hub.next().tell("exit 2")
    launcher.expect("it is started again in 1000 s, 2 of 3")
    launcher.signal(signal.SIGTERM)
    assert launcher.finish() == 128 + signal.SIGTERM
    first[0].gone()


def test_wrapped_workers_end_with_their_monitors(start: Run) -> None:
    """Those are sessions of their own, which no signal of the launcher reaches; the fixture looks for them."""
    launcher = start("--standalone", "--nproc-per-node", "2", str(HERE / "wrapped_script.py"))
    launcher.expect("<running>", stream="out")
    launcher.signal(signal.SIGTERM)
    assert launcher.finish() == 128 + signal.SIGTERM
    assert "inprocess run: ended by SIGTERM" in launcher.err
    assert launcher.left() == []


def test_a_bug_ends_the_job_without_replacements(start: Run) -> None:
    """The wrapped function tells the launcher that its call ends on all ranks."""
    launcher = start("--standalone", "--nproc-per-node", "2", str(HERE / "failing_script.py"))
    assert launcher.finish() == 1
    # the error's message is written at once, its line is not: two ranks write at the same time
    assert launcher.err.count("the same error 2 times in a row, and no iteration of this call") == 2
    assert launcher.err.count("exitcode  : 1") == 2
    assert "after its call had ended with an error on all ranks. The job has failed" in launcher.err
    assert "it is started again" not in launcher.err and "started again alone: none" in launcher.err
    assert launcher.left() == []


def test_error_file(start: Run, tmp_path: Path) -> None:
    """What a worker recorded is in the report, and in the launcher's own error file."""
    reply = tmp_path / "reply.json"
    launcher = start("--standalone", str(HERE / "recording_script.py"), TORCHELASTIC_ERROR_FILE=str(reply))
    assert launcher.finish() == 1
    assert "ValueError: what the worker says" in launcher.err
    assert "recording_script.py FAILED" in launcher.err
    message = json.loads(reply.read_text())["message"]
    assert message["message"] == "ValueError: what the worker says"
    (kept,) = [name for name in launcher.left() if name.endswith("error.json")]
    assert kept in launcher.err  # the report names the file, so it stays


def test_an_error_file_that_is_cut_short(start: Run, tmp_path: Path) -> None:
    launcher = start("--standalone", "--no-python", "/bin/sh", "-c", 'echo "{" > $TORCHELASTIC_ERROR_FILE; exit 3')
    assert launcher.finish() == 1
    assert "cannot be read" in launcher.err
    assert "exitcode  : 3" in launcher.err


def test_a_program_that_cannot_be_started(start: Run, tmp_path: Path) -> None:
    """Found only when the first worker starts: its interpreter is not there."""
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o700)
    launcher = start("--standalone", "--no-python", str(program))
    assert launcher.finish() == 1
    assert f"No such file or directory: '{program}'" in launcher.err
    assert launcher.left() == []


def test_a_worker_shuts_the_job_down(run: Run, hub: Hub) -> None:
    launcher = run("--nproc-per-node", "2")
    workers = hub.group(2)
    for worker in workers:
        assert worker.ask("obey") == {"obeying": True}
    workers[1].tell("ask continue all is well")
    workers[1].tell("ask shutdown_workload the loss is not a number")
    assert launcher.finish() == 1
    assert "the job has ended: rank 1 asked for shutdown_workload: the loss is not a number" in launcher.err
    assert "Traceback" not in launcher.err
    for worker in workers:
        worker.gone()
    assert launcher.left() == []


def test_a_node_leaves_and_the_others_go_on(start: Run, hub: Hub) -> None:
    with free_port() as port:
        options = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        options += ["--rdzv-id", "j", "--rdzv-conf", "last_call_timeout=30", "--local-addr", "127.0.0.1"]
        first = start(*options, WORKER, hub.path, "wrapped")
        second = start(*options, WORKER, hub.path, "wrapped")
        workers = hub.group(2)
        workers[1].tell("ask exclude_this_node a sick GPU")
        workers[1].gone()
        assert workers[0].ask("show still here") == {"shown": True}
        workers[0].tell("exit 0")
        codes = sorted(launcher.finish() for launcher in (first, second))
    assert codes == [0, 1]
    said = first.err + second.err
    assert "this node has left the job: rank 1 asked for exclude_this_node: a sick GPU" in said
