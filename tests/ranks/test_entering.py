"""Ctrl-C at each moment around the user's function, from when the MonitorThread knows of it, and of the call's end."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from inprocess.call.loop import Loop
from inprocess.call.thread import MonitorThread
from inprocess.call.user_code import UserCode
from inprocess.interrupt.gate import Gate
from tests.harness.child import Context
from tests.harness.strike import Strike

#: what is around the function, and what the end of the call consists of
AROUND = (UserCode.in_window, MonitorThread.enter, Gate.run)
END = (Loop._let_go, Loop._tell, Loop._end_parts, Loop._leave_job)
CODES = {each.__name__: [each.__code__] for each in AROUND} | {"the end": [each.__code__ for each in END]}
#: ceiling for a call at each moment of one of them (seconds)
DEADLINE_S = 120.0


def _returns(context: Context, call: Any) -> str:
    return "returned"


def _strikes(context: Context) -> list[list[Any]]:
    """Calls, each struck one moment later than the one before, until one is not struck: where, and what is left."""
    hook, found, codes = sys.unraisablehook, [], CODES[context.args["inside"]]
    function = context.wrap(_returns)
    while True:
        strike = Strike(len(found), codes)
        sys.settrace(strike)
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


@pytest.mark.parametrize("inside", CODES)
def test_ctrl_c_at_each_moment_around_the_function(launch, inside):
    found = launch(_strikes, 1, args={"inside": inside}).wait(DEADLINE_S)[0].value
    assert len(found) > 1 and [each for each in found if each[1:] != [[], True]] == []
