"""Tells an outer launcher what the restarts inside the process do: one log line for each change, and nothing else.

The line is ``[NestedRestarter] name=[InProcess] state=<state>``, at INFO level, of the logger of this module:

================================  ==================  ====================  =================================
class                             option              state                 when
================================  ==================  ====================  =================================
NestedRestarterHandlingStarting   ``abort``           handling_start        an iteration was interrupted
NestedRestarterHandlingCompleted  ``initialize``      handling_completed    the next iteration starts
NestedRestarterFinalized          ``completion``      finalized             the job is completed
NestedRestarterAborted            ``terminate``       aborted               this rank leaves without completing
================================  ==================  ====================  =================================
"""

from __future__ import annotations

from inprocess.logs import get_logger

from .abort import Abort
from .completion import Completion
from .initialize import Initialize
from .state import FrozenState
from .terminate import Terminate

__all__ = [
    "NestedRestarterAborted",
    "NestedRestarterFinalized",
    "NestedRestarterHandlingCompleted",
    "NestedRestarterHandlingStarting",
]

_log = get_logger(__name__)


def _tell(state: str) -> None:
    _log.info("[NestedRestarter] name=[InProcess] state=%s", state)


class NestedRestarterHandlingStarting(Abort):
    """For ``abort``: an iteration was interrupted and a restart begins."""

    def __call__(self, state: FrozenState) -> FrozenState:
        _tell("handling_start")
        return state


class NestedRestarterHandlingCompleted(Initialize):
    """For ``initialize``: a restart succeeded so far. Silent in iteration 0, where nothing has been handled."""

    def __call__(self, state: FrozenState) -> FrozenState:
        if state.iteration > 0:
            _tell("handling_completed")
        return state


class NestedRestarterFinalized(Completion):
    """For ``completion``: the job is completed."""

    def __call__(self, state: FrozenState) -> FrozenState:
        _tell("finalized")
        return state


class NestedRestarterAborted(Terminate):
    """For ``terminate``: this rank leaves without completing; the outer launcher takes over."""

    def __call__(self, state: FrozenState) -> FrozenState:
        _tell("aborted")
        return state
