"""Threads for what may take long and nobody waits for, except for a moment at the end of a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from inprocess.system import clock

__all__ = ["FREEING", "join", "run", "to_be_joined"]

#: the name of these threads
FREEING = "inprocess-free"
#: those for which the end of a call waits; main thread
_joined: list[threading.Thread] = []


def run(action: Callable[[], object]) -> threading.Thread:
    """Do it in a thread of its own. Raises RuntimeError where there is none left."""
    thread = threading.Thread(target=action, name=FREEING, daemon=True)
    thread.start()
    return thread


def to_be_joined(threads: Iterable[threading.Thread]) -> None:
    """Have the next `join` wait for them."""
    _joined.extend(threads)


def join(seconds: float) -> None:
    """Wait for those, so long at most in all."""
    until = clock.monotonic() + seconds
    while _joined:
        _joined.pop().join(max(0.0, until - clock.monotonic()))
