"""What the trainers of all frameworks do with a LiveState: they get their step from it, and commit each one to it.

A Trainer calls ``optimizer.step()`` itself, so a commit begins in the hook before that and ends in the one after.
"""

from __future__ import annotations

from typing import Any

from inprocess.call_wrapper import current_call
from inprocess.exception import OptionError
from inprocess.live.state import LiveState

__all__ = ["Keeping"]


class Keeping:
    """Of one training, in one iteration.

    Args:
        live: that outlives it. Without checkpoints of its own, else OptionError.
    """

    def __init__(self, live: LiveState) -> None:
        if live.folder is not None:
            raise OptionError(
                f"live=LiveState(folder={live.folder!r}): a Trainer looks for its own checkpoint before there are "
                "parts, so it would be at another step than they are. Leave out folder= and save_every=, and let the "
                "Trainer write checkpoints"
            )
        self._live = live
        self._commit: Any = None
        #: no random number has been drawn in this step
        self._is_fresh = False

    @property
    def is_open(self) -> bool:
        """Parameters are being changed."""
        return self._commit is not None

    def found(self) -> int:
        """The step to go on from; 0: there is none in memory, on any rank. Collective."""
        step = self._live.peek()
        if step is None:
            self._live.forget()  # all states are torn, or there was none: what the framework has loaded counts
        return step or 0

    def begin(self, **parts: Any) -> None:
        """Get the state of the step that was found. Collective."""
        self._live.recover(current_call(), **parts)
        self._is_fresh = True

    def open(self, step: int) -> None:
        """What changes parameters begins, and leads to this step. No restart cuts it in half."""
        if self._commit is None:
            commit = self._live.commit(step)
            commit.__enter__()
            self._commit = commit

    def close(self) -> None:
        """It is over."""
        if self._commit is not None:
            commit, self._commit = self._commit, None
            self._is_fresh = True
            commit.__exit__(None, None, None)

    def fail(self, error: BaseException) -> None:
        """The training ends with an error; where it came inside, the state is torn."""
        if self._commit is not None:
            commit, self._commit = self._commit, None
            commit.__exit__(type(error), error, None)

    def refresh(self) -> None:
        """Something beside the parameters has changed, and the step is the same."""
        if self._commit is None:
            self._live.refresh()

    def reseed(self, step: int) -> None:
        """What follows this step begins, or a part of it: with the same random numbers, also after a restart."""
        if self._is_fresh:
            self._live.reseed(step)
            self._is_fresh = False

    def end(self) -> None:
        """The training is over: for copies and checkpoints that are under way."""
        self._live.wait()
