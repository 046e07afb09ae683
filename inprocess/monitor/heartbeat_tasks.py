"""What the thread of a monitor that sends heartbeats does between two of them, over its connection.

A new thread, and a new connection, would each take some 4 ms beside ranks that compute.
"""

from __future__ import annotations

import contextlib
import queue
from typing import TypeVar

from inprocess.protocol.ops import Pause, Verb
from inprocess.system import clock

__all__ = ["HeartbeatTasks"]

T = TypeVar("T")


class HeartbeatTasks:
    """Asked for by any thread, done by one."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Verb[None]] = queue.SimpleQueue()

    def ask(self, verb: Verb[None]) -> None:
        """From any thread; the verb waits for nothing."""
        self._asked.put(verb)

    def within(self, verb: Verb[T]) -> Verb[T]:
        """The same verb, with what is asked done in its pauses."""
        try:
            op = next(verb)
            while True:
                if isinstance(op, Pause):
                    yield from self._pause(op.seconds)
                    op = next(verb)
                else:
                    op = verb.send((yield op))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def _pause(self, seconds: float) -> Verb[None]:
        end = clock.monotonic() + seconds
        while (left := end - clock.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                yield from self._asked.get(timeout=left)
