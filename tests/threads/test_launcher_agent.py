"""The launcher's agent looks at its workers, with stand-ins for their processes."""

from __future__ import annotations

import argparse
import contextlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from inprocess.launcher import agent as agent_module
from inprocess.launcher import job
from inprocess.launcher.agent import Agent, JobOver
from inprocess.launcher.decisions import Rules
from inprocess.launcher.generation import NodeEvent
from inprocess.launcher.processes import Ended, WorkerLaunch
from inprocess.launcher.workers import WorkerSlot


class Worker:
    """A process that is seen to run so many times, and has then ended with code 1."""

    def __init__(self, rank: int, looks: int) -> None:
        self.pid, self.ended, self._looks = 100 + rank, None, looks
        self._end = Ended(1, ProcessFailure(rank, self.pid, 1, ""))

    def poll(self) -> Ended | None:
        self.ended = self._end if not self._looks else None
        self._looks -= self._looks > 0
        return self.ended


def agent(looks: list[int]) -> Any:
    """Of workers whose calls have ended with an error on all ranks."""
    one: Any = Agent.__new__(Agent)
    one._slots = {
        rank: WorkerSlot(
            SimpleNamespace(global_rank=rank, local_rank=rank), WorkerLaunch((), {}), 0, Worker(rank, number)
        )  # type: ignore[arg-type]
        for rank, number in enumerate(looks)
    }
    control = MagicMock()
    control.is_over.return_value = control.is_wrapped.return_value = True
    one._setup = MagicMock(control=control, rules=Rules())
    one._worker_group, one._remaining_restarts = MagicMock(), 0
    one._worker_group.spec.max_restarts = 0
    one._told = MagicMock()
    one._stop_workers = lambda group: None
    for name in ("_start_due", "_end_overdue", "_obey", "_open", "_stuck", "_hear", "_finished"):
        setattr(one, name, lambda: None)
    return one


@pytest.mark.parametrize("looks", [[0, 0, 1], [1, 0, 0], [0, 1, 2], [0, 2, 4], [3, 0, 1]])
def test_each_failure_is_told_whenever_the_last_worker_ends(looks: list[int]) -> None:
    """Also where that is while the launcher looks at them, one after the other."""
    one = agent(looks)
    result = next(result for _ in range(10) if (result := one._turn()) is not None)
    assert sorted(result.failures) == [0, 1, 2]


@pytest.mark.parametrize("name", ["doomed", "others_until"])
def test_a_worker_s_time_is_not_over_as_late_as_the_interval(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With --monitor-interval 30 the SIGKILL after its grace came up to 30 s late, and so did a failure of all."""
    one = agent([9, 9])
    one._worker_group.spec.monitor_interval, one._told.due.return_value = 30.0, []
    monkeypatch.setattr(agent_module.clock, "monotonic", lambda: 100.0)
    assert one._pause() == 30.0
    setattr(one._slots[1], name, 104.0)
    assert one._pause() == 4.0
    one._slots[1].process = None  # it has ended, and waits for its replacement
    assert one._pause() == 30.0


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RendezvousTimeoutError(), "too few nodes came in time (--rdzv-conf join_timeout=SECONDS)"),
        (RendezvousClosedError(), "the job has ended, its rendezvous is closed"),
        (RuntimeError("Connection reset by peer\nException raised from recvBytes at ..."), "Connection reset by peer"),
    ],
)
def test_nodes_that_cannot_meet_end_with_a_message(error: Exception, told: str) -> None:
    """Not with thirty lines of a traceback; also a node that waits for a place while the store goes."""
    one = agent([])
    one._setup.signals.interruptible = lambda function: function()
    one.record_duration = lambda state: contextlib.nullcontext()
    one._setup.meeting.next.side_effect = error
    with pytest.raises(JobOver, match=re.escape(f"this node did not meet the others: {told}")) as caught:
        one._rendezvous(MagicMock())
    assert "\n" not in str(caught.value)


def test_a_worker_that_waits_in_the_kernel_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the check of torch's that a variable asks for. There is no failure of a worker of which to make a report."""
    one = agent([9, 9])
    one._uninterruptible_state_timeout = 60.0
    one._check_uninterruptible_state_timeout = lambda group, limit: object()
    monkeypatch.setattr(agent_module.procfs, "state_of", lambda pid: {"state": "D" if pid == 101 else "S"})
    del one._stuck
    with pytest.raises(JobOver, match=r"rank 1 .*pid 101.* waited in the kernel for 60 s or more") as caught:
        one._turn()
    told = one._setup.meeting.say_over.call_args.args[0]
    assert told in str(caught.value)


@pytest.mark.parametrize("has_failed", [False, True])
def test_log_files_that_nobody_asked_for_go_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_failed: bool
) -> None:
    """Unless the report names one: a worker that failed may have been replaced, and the job have succeeded."""
    monkeypatch.setattr(job.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    given = argparse.Namespace(log_dir=None, logs_specs=None, redirects="0", tee="0")
    with contextlib.suppress(ChildFailedError), job._log_directory(given):
        (tmp_path / "error.json").write_text("{}")
        if has_failed:
            raise ChildFailedError("train.py", {0: ProcessFailure(0, 1, 1, "")})
    assert tmp_path.exists() is has_failed


@pytest.mark.parametrize(("kind", "left"), [("restart", [1, 0, 0]), ("join", [2, 2, 2])])
def test_a_restart_for_another_node_s_failure_counts(kind: str, left: list[int]) -> None:
    """With --max-restarts 2 each node could restart all workers twice. A node that comes is no failure."""
    one = agent([9])
    del one._hear
    one._remaining_restarts, one._restart_workers = 2, MagicMock()
    one._setup.meeting.news.return_value = NodeEvent(kind, "why")
    for number in left:
        assert one._hear() is None and one._remaining_restarts == number
    assert one._restart_workers.call_count == 3
