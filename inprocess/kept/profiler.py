"""torch's profiler runs until it is stopped: one that an interrupted function has started would meet the next one.

It is not interrupted while it begins or ends (`interrupt/frames`). Tried with torch 2.13.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["MODULE", "reset"]

MODULE = "torch.autograd.profiler"


def reset() -> None:
    """Of the main thread."""
    module: Any = sys.modules[MODULE]
    if module.torch._C._autograd._profiler_enabled():
        module._disable_profiler()
        module._run_on_profiler_stop()
