"""A rank of a test forks its first monitor, which is to be no other than one that was started as a program."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import inprocess
from inprocess.monitor import starting
from inprocess.monitor.pidfile import is_monitor, stat_fields
from inprocess.testing import leaks
from tests.harness import Run
from tests.harness.child import Context


def seen(pid: int) -> dict[str, Any]:
    """What tells two monitors apart."""
    fields = stat_fields(pid)
    signals = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Sig")]
    return {
        "is a monitor": is_monitor(pid),
        "parent": int(fields[1]) == os.getpid(),
        "leads its session": int(fields[3]) == pid,
        "folder": os.readlink(f"/proc/{pid}/cwd"),
        "standard input and output": [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in range(2)],
        "signals": [line for line in signals if line.startswith(("SigIgn", "SigBlk"))],
    }


def twice(context: Context) -> list[Any]:
    """Two calls: the first has the monitor that was forked, the second one that was started."""
    prepared = starting.prepared()
    found = []
    for _ in range(2):

        @inprocess.Wrapper(**context.spec.wrapper)
        def function(call: inprocess.CallWrapper = None) -> tuple[int, dict[str, Any]]:
            (pid,) = (child for child in leaks.children_of(os.getpid()) if is_monitor(child))
            return pid, seen(pid)

        found.append(context.called(function))
    return [prepared, starting.prepared(), *found]


def test_it_is_like_one_that_was_started(launch: Callable[..., Run]) -> None:
    before, after, (first, forked), (second, started) = launch(twice, 1).wait()[0].value
    assert (before, after) == ([first], [])
    assert second != first
    assert forked == started
    assert forked["is a monitor"]


def nothing(context: Context) -> list[int]:
    return starting.prepared()


def test_it_ends_with_a_rank_that_makes_no_call(launch: Callable[..., Run]) -> None:
    (pid,) = launch(nothing, 1).wait()[0].value
    assert not os.path.exists(f"/proc/{pid}")
