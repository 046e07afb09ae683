"""One line for each change, through the logger."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from inprocess import nested_restarter as nested
from inprocess.abort import Abort
from inprocess.completion import Completion
from inprocess.initialize import Initialize
from inprocess.state import FrozenState
from inprocess.terminate import Terminate

STATE = FrozenState(rank=0, world_size=1, initial_rank=0, initial_world_size=1, iteration=1)


@pytest.mark.parametrize(
    ("hook", "base", "state"),
    [
        (nested.NestedRestarterHandlingStarting(), Abort, "handling_start"),
        (nested.NestedRestarterHandlingCompleted(), Initialize, "handling_completed"),
        (nested.NestedRestarterFinalized(), Completion, "finalized"),
        (nested.NestedRestarterAborted(), Terminate, "aborted"),
    ],
)
def test_lines(hook, base: type, state: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "inprocess")
    assert isinstance(hook, base)
    assert hook(STATE) is STATE
    assert caplog.messages == [f"[NestedRestarter] name=[InProcess] state={state}"]


def test_nothing_was_handled_in_the_first_iteration(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "inprocess")
    nested.NestedRestarterHandlingCompleted()(dataclasses.replace(STATE, iteration=0))
    assert not caplog.messages
