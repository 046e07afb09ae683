"""Workers that call `inprocess.monitored()`, and one that misses its time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.launcher.harness import Hub, Launcher

Run = Callable[..., Launcher]
SOON = ["--ft-workload-check-interval", "0.05", "--ft-rank-heartbeat-timeout", "0.2"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_worker_that_misses_its_time_is_ended_and_has_failed(run: Run, hub: Hub, wrapped: bool) -> None:
    options = [*SOON, "--ft-rank-termination-signal", "SIGABRT", "--max-restarts", "1", "--nproc-per-node", "2"]
    launcher = run(*options, wrapped=wrapped)
    first = hub.group(2)
    assert first[1].ask("ping") == {"pinged": True}  # and never again
    again = [hub.next()] if wrapped else hub.group(2)
    assert again[-1].rank == 1
    assert again[-1].restart == (1 if wrapped else 0)
    for worker in [first[0], *again] if wrapped else again:
        worker.tell("exit 0")
    assert launcher.finish() == 0
    assert f"rank 1 (local rank 1, pid {first[1].pid}) is ended with SIGABRT: " in launcher.err
    assert "failed: signal SIGABRT, " in launcher.err


def test_who_ignores_the_signal_is_killed(run: Run, hub: Hub) -> None:
    options = [*SOON, "--ft-rank-termination-signal", "SIGTERM", "--shutdown-timeout", "3", "--max-restarts", "1"]
    launcher = run(*options)
    first = hub.next()
    assert first.ask("ignore") == {"ignoring": True}
    assert first.ask("ping") == {"pinged": True}
    assert first.hear() == {"got": "SIGTERM"}
    again = hub.next()
    again.tell("exit 0")
    assert launcher.finish() == 0
    assert f"rank 0 (local rank 0, pid {first.pid}) is killed" in launcher.err
    assert "failed: signal SIGKILL, " in launcher.err
