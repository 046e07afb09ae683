"""Threads for what may take long and nobody waits for, but for a moment at the end of a call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from inprocess.system import clock

__all__ = ["FREEING", "join", "run"]

#: the name of these threads
FREEING = "inprocess-free"
_threads = weakref.WeakSet[threading.Thread]()


def run(action: Callable[[], object]) -> threading.Thread:
    """Do it in a thread of its own. Raises RuntimeError where there is none left."""
    thread = threading.Thread(target=action, name=FREEING, daemon=True)
    thread.start()
    _threads.add(thread)
    return thread


def join(seconds: float) -> None:
    """Wait for all of them, so long at most."""
    until = clock.monotonic() + seconds
    for thread in list(_threads):
        thread.join(max(0.0, until - clock.monotonic()))
