"""What ranks inherit from whoever started them: SIGCHLD ignored, every signal blocked; and what their children do."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from inprocess.testing.command import Command
from tests.harness import At, Kill, KillMonitor, Raise, ReservedPort, When
from tests.harness.child import Context

from . import checks, targets


def run_ignoring_children(context: Context) -> Any:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        return targets.run_with_new_monitor(context)
    finally:
        assert signal.signal(signal.SIGCHLD, signal.SIG_DFL) is signal.SIG_IGN


def run_with_all_signals_blocked(context: Context) -> Any:
    blocked = signal.valid_signals()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    during = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        return targets.run_blocked(context)
    finally:
        assert signal.pthread_sigmask(signal.SIG_SETMASK, before) == during


def test_without_exit_codes_of_children(launch):
    """A monitor is replaced, all restart, and a rank dies: nobody needs the kernel's word for it."""
    faults = {
        At(2, step="monitor"): KillMonitor(),
        At(0, step=1): Raise(),
        At(1, iteration=1, step=1): Kill(),
    }
    ranks = launch(run_ignoring_children, 3, faults=faults).wait()
    checks.went_on(ranks, without=[1], iteration=2)


@pytest.mark.parametrize("place", ["sleep", "lock"])
def test_with_all_signals_blocked(launch, place):
    """They are released all the same, in time."""
    faults = {At(1, step="fault"): Raise(when=When("blocked", 1))}
    args = {"place": place, "victims": [1]}
    ranks = launch(run_with_all_signals_blocked, 2, faults=faults, args=args).wait(20)
    checks.went_on(ranks)


SCRIPT = """
import multiprocessing, sys
import inprocess

@inprocess.Wrapper()
def train() -> None:
    process = multiprocessing.get_context(sys.argv[1]).Process(target=print, args=("began",))
    process.start()
    process.join()
    print("exit code of the child:", process.exitcode)

train()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_children_that_import_the_main_module(tmp_path, method):
    """Without `if __name__ == "__main__":` they would be a second job. They end at once, and say what to write."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with ReservedPort() as port:
        env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number)}
        command = Command([str(script), method], time.monotonic() + 30, env=env)
        try:
            assert command.finish() == 0, command.err
        finally:
            command.close()
    assert command.out == "exit code of the child: 1\n"
    (line,) = (line for line in command.err.splitlines() if "RestartError: " in line)
    assert "while multiprocessing imports the main module" in line
    assert 'Call it below if __name__ == "__main__":' in line
