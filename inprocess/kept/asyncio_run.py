"""What ``asyncio.run()`` puts back when it ends: the thread's running loop, and the handler for Ctrl-C.

It does so in a ``finally``. An interruption in the line before it, or inside it, passes that by. With the loop, every
later ``asyncio.run()`` of this thread would raise.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

__all__ = ["MODULE", "enter", "reset"]

MODULE = "asyncio.runners"

#: the loop and the handler of before the iteration: the wrapped function may be called in a coroutine
_before: tuple[Any, Any] = (None, None)


def enter() -> None:
    """An iteration begins."""
    global _before
    _before = _loop(), signal.getsignal(signal.SIGINT)


def reset() -> None:
    """Of the main thread."""
    loop, handler = _before
    if _loop() is not loop:
        sys.modules["asyncio.events"]._set_running_loop(loop)
    runner = getattr(sys.modules[MODULE], "Runner", None)  # since Python 3.11; before, there was no such handler
    now: Any = signal.getsignal(signal.SIGINT)
    method = getattr(getattr(now, "func", None), "__func__", None)
    if runner is not None and now is not handler and method is runner._on_sigint:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _loop() -> Any:
    events: Any = sys.modules.get("asyncio.events")
    return None if events is None else events._get_running_loop()
