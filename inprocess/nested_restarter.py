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

from inprocess.system.logs import get_logger

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


class _Teller:
    def __init__(self, special_rank: int | None = None) -> None:
        self.special_rank = special_rank

    def _tell(self, state: FrozenState, change: str) -> FrozenState:
        if self.special_rank in (None, state.initial_rank):
            _log.info("[NestedRestarter] name=[InProcess] state=%s", change)
        return state


class NestedRestarterHandlingStarting(_Teller, Abort):
    """For ``abort``: an iteration was interrupted and a restart begins.

    Args:
        special_rank: only the rank that was started with this number logs; None, the default: all do.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        return self._tell(state, "handling_start")


class NestedRestarterHandlingCompleted(_Teller, Initialize):
    """For ``initialize``: a restart succeeded so far. Silent in iteration 0, where nothing has been handled.

    Args:
        special_rank: only the rank that was started with this number logs; None, the default: all do.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        return self._tell(state, "handling_completed") if state.iteration > 0 else state


class NestedRestarterFinalized(_Teller, Completion):
    """For ``completion``: the job is completed.

    Args:
        special_rank: only the rank that was started with this number logs; None, the default: all do.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        return self._tell(state, "finalized")


class NestedRestarterAborted(_Teller, Terminate):
    """For ``terminate``: this rank leaves without completing; the outer launcher takes over.

    Args:
        special_rank: only the rank that was started with this number logs; None, the default: all do.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        return self._tell(state, "aborted")
