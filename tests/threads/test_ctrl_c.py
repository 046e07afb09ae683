"""Ctrl-C in the main thread while it waits for its monitor."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pytest

from inprocess.monitor import process
from inprocess.monitor.board import Board
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor_process import MonitorProcess
from inprocess.stores.spec import StoreSpec
from tests.harness.strike import Strike

BLOCKED_S = 5.0  # a ceiling


def _struck(monitor: MonitorProcess, number: int) -> bool:
    """Whether Ctrl-C came at moment ``number`` of a wait for a monitor that is being replaced."""
    tracing = sys.gettrace()
    sys.settrace(Strike(number))
    try:
        monitor.listen(0.001)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(tracing)
    return False


def test_where_the_monitor_is_replaced_no_lock_stays_taken() -> None:
    monitor: Any = MonitorProcess(MonitorConfig(member=0, roster=(0,), store=StoreSpec()), None)  # type: ignore[arg-type]
    number = 0
    while _struck(monitor, number):
        other = threading.Thread(target=monitor.serves, args=(1,), daemon=True)
        other.start()
        other.join(BLOCKED_S)
        assert not other.is_alive(), number
        number += 1
    assert number > 2


def test_a_monitor_that_was_told_of_the_end_is_reaped_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not killed: it may still have to tell the others."""
    board = Board.create()
    monitor = MonitorProcess(MonitorConfig(member=0, roster=(0,), store=StoreSpec().to_json()), board)
    monitor.start()
    pid = monitor.pid
    assert pid is not None
    monkeypatch.setattr(monitor, "_hear", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        monitor.bye("completed")
    board.close()
    assert monitor._ends is None and pid in process._lingering
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    process.reap_lingering()
    assert pid not in process._lingering


def _interrupted(seconds: float) -> bool:
    raise KeyboardInterrupt
