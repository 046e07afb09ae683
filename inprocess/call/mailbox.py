"""Where the MonitorThread puts what it has learned, for the main thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from inprocess.exception import RestartAbort, RestartError
from inprocess.protocol.keys import JOINING
from inprocess.system import clock
from inprocess.system.interpreter import SLICE

__all__ = ["Mailbox"]


class Mailbox:
    """What the MonitorThread has learned, for the main thread.

    Ctrl-C may strike at any line of the main thread. A ``threading.Condition``, which is entered by a method in Python,
    can stay locked then, and the MonitorThread would wait for it for ever. Between a lock that is taken by ``with`` and
    the block behind it CPython looks for no signal. So the main thread takes that, and nothing else.
    """

    def __init__(self) -> None:
        # held while the others are looked at or changed
        self._lock = threading.Lock()
        self._letters: dict[tuple[str, int], Any] = {}
        self._failure: RestartError | RestartAbort | None = None
        # locked; the main thread waits for it, and the next change releases it
        self._waiter: threading.Lock | None = None
        #: called by the main thread while it waits, each time it wakes; what it raises ends the wait
        self.look: Callable[[], object] = _nothing

    def put(self, name: str, iteration: int, value: Any) -> None:
        with self._lock:
            # what an earlier iteration learned is of no use any more
            recent = {key: letter for key, letter in self._letters.items() if key[1] >= iteration - 1}
            self._letters = {key: letter for key, letter in self._letters.items() if key[1] == JOINING} | recent
            self._letters[name, iteration] = value
            self._wake()

    def fail(self, error: RestartError | RestartAbort) -> None:
        """Nothing more will come; whoever takes gets ``error``."""
        with self._lock:
            self._failure = self._failure or error
            self._wake()

    def poke(self) -> None:
        """Wake the main thread where it waits."""
        with self._lock:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.release()
            self._waiter = None

    def await_failure(self, timeout: float) -> bool:
        """Wait until nothing more will come; False after ``timeout`` seconds."""
        deadline = clock.monotonic() + timeout
        while True:
            with self._lock:
                if self._failure is not None:
                    return True
                waiter = self._next()
            if (left := deadline - clock.monotonic()) <= 0:
                return False
            waiter.acquire(timeout=min(left, SLICE))

    def take(self, name: str, iteration: int, timeout: float | None = None) -> Any:
        """Wait for a letter; None after ``timeout`` seconds. Raises what the MonitorThread failed with."""
        deadline = None if timeout is None else clock.monotonic() + timeout
        while True:
            self.look()
            with self._lock:
                if (name, iteration) in self._letters:
                    return self._letters[name, iteration]
                if self._failure is not None:
                    raise self._failure
                waiter = self._next()
            left = SLICE if deadline is None else deadline - clock.monotonic()
            if left <= 0:
                return None
            waiter.acquire(timeout=min(left, SLICE))

    def _next(self) -> threading.Lock:
        """What the next change releases."""
        if self._waiter is None:
            waiter = threading.Lock()
            waiter.acquire()
            self._waiter = waiter
        return self._waiter


def _nothing() -> None:
    """Nobody looks."""
