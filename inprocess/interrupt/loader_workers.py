"""A worker of a DataLoader that died is the user's function's business, wherever the main thread happens to be then.

torch handles SIGCHLD in Python and raises there ("DataLoader worker (pid 4711) is killed by signal"), in whatever line
the main thread is. In the middle of a restart that would be one of this library's, and the rank would be lost. So while
a function is wrapped, torch's handler raises only where the innermost code, this library's counted, is the function's.

Nothing is lost by that: a DataLoader that waits for a batch looks every five seconds whether its workers live.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from inprocess.interrupt.frames import CALL_CODE
from inprocess.system.errors import PACKAGE, in_words
from inprocess.system.logs import get_logger

__all__ = ["WorkerDeaths"]

log = get_logger("inprocess")
#: where torch's handler finds what raises, by this name
MODULE, NAME = "torch.utils.data._utils.signal_handling", "_error_if_any_worker_fails"


def _is_in_function(frame: FrameType | None) -> bool:
    """Whether no line of this library is further in than the call of the user's function."""
    while frame is not None:
        if frame.f_code is CALL_CODE:
            return True
        if frame.f_code.co_filename.startswith(PACKAGE):
            return False
        frame = frame.f_back
    return False


class WorkerDeaths:
    """For one call of a wrapped function; `install` and `restore` in the main thread."""

    def __init__(self) -> None:
        self._module: ModuleType | None = None
        self._original: Callable[[], Any] | None = None

    def install(self) -> None:
        """From here on. Without torch, or with one that does this in another way, nothing changes."""
        self._module = sys.modules.get(MODULE)
        self._original = getattr(self._module, NAME, None)
        if self._module is not None and self._original is not None:
            setattr(self._module, NAME, self._look)

    def restore(self) -> None:
        """Put torch's own back, unless somebody else has replaced it meanwhile. Harmless when repeated."""
        if self._module is not None and getattr(self._module, NAME, None) == self._look:
            setattr(self._module, NAME, self._original)
        self._module = None

    def _look(self) -> Any:
        """In torch's handler: called by it, which was called in the line that was interrupted."""
        assert self._original is not None
        handler = sys._getframe(1)
        try:
            return self._original()  # in any case: it forgets the workers of which it has told
        except RuntimeError as error:
            if _is_in_function(handler):
                raise
            log.debug("not raised in the middle of a restart: %s", in_words(error))
