"""torch's profiler runs until it is stopped: one that an interrupted function has started would meet the next one.

One that was started before the call stays. It is not interrupted while it begins or ends (`interrupt/frames`). Tried
with torch 2.13.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["MODULE", "enter", "reset"]

MODULE = "torch.autograd.profiler"


#: whether one ran before the iteration, whose own it is not
_before = False


def enter() -> None:
    """An iteration begins."""
    global _before
    _before = MODULE in sys.modules and _runs()


def reset() -> None:
    """Of the main thread."""
    if _runs() and not _before:
        module: Any = sys.modules[MODULE]
        module._disable_profiler()
        module._run_on_profiler_stop()


def _runs() -> bool:
    module: Any = sys.modules[MODULE]
    return bool(module.torch._C._autograd._profiler_enabled())
