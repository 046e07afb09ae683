"""Ctrl-C at each line around the user's function, from the moment at which the MonitorThread knows of it."""

from __future__ import annotations

import linecache
import sys
import threading
from types import FrameType
from typing import Any

from inprocess.call.thread import MonitorThread
from inprocess.call.user_code import UserCode
from inprocess.interrupt.gate import Gate
from tests.harness.child import Context

#: the frames around the function; none of them comes while the MonitorThread waits for another thing
CODES = [each.__code__ for each in (UserCode.in_window, MonitorThread.enter, Gate.run, Gate.leave)]
#: fewer lines would mean that the frames were not seen
FEWEST = 20


class _Strike:
    """Raises KeyboardInterrupt at line number ``line`` of these frames."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.where = ""

    def enter(self, frame: FrameType, event: str, argument: object) -> Any:
        return self.step if frame.f_code in CODES else None

    def step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and not _takes_lock(frame) and (left := self.left) >= 0:
            self.left = left - 1
            if left == 0:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self.step


def _takes_lock(frame: FrameType) -> bool:
    """Python handles no signal between the lines of ``with`` and the call that gives the lock back."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def _returns(context: Context, call: Any) -> str:
    return "returned"


def _strikes(context: Context) -> list[list[Any]]:
    """Calls, each struck one line later than the one before, until one is not struck: where, and what is left."""
    hook, found = sys.unraisablehook, []
    function = context.wrap(_returns)
    while True:
        strike = _Strike(len(found))
        sys.settrace(strike.enter)
        try:
            function()
        except KeyboardInterrupt:
            found.append([strike.where, _threads(), sys.unraisablehook is hook])
        else:
            return found
        finally:
            sys.settrace(None)


def _threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("inprocess")]


def test_ctrl_c_at_each_line_around_the_function(launch):
    found = launch(_strikes, 1).wait()[0].value
    assert [each for each in found if each[1:] != [[], True]] == []
    assert len({where for where, _, _ in found}) >= FEWEST
