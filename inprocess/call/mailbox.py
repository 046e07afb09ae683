"""Where the MonitorThread puts what it has learned, for the main thread."""

from __future__ import annotations

import threading
from typing import Any

from inprocess.exception import RestartAbort, RestartError
from inprocess.protocol.keys import JOINING
from inprocess.system import clock
from inprocess.system.interpreter import SLICE

__all__ = ["Mailbox"]


class Mailbox:
    """What the MonitorThread has learned, for the main thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # under the condition
        self._letters: dict[tuple[str, int], Any] = {}
        self._failure: RestartError | RestartAbort | None = None

    def put(self, name: str, iteration: int, value: Any) -> None:
        with self._changed:
            # what an earlier iteration learned is of no use any more
            recent = {key: letter for key, letter in self._letters.items() if key[1] >= iteration - 1}
            self._letters = {key: letter for key, letter in self._letters.items() if key[1] == JOINING} | recent
            self._letters[name, iteration] = value
            self._changed.notify_all()

    def fail(self, error: RestartError | RestartAbort) -> None:
        """Nothing more will come; whoever takes gets ``error``."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def await_failure(self, timeout: float) -> bool:
        """Wait until nothing more will come; False after ``timeout`` seconds."""
        deadline = clock.monotonic() + timeout
        with self._changed:
            while self._failure is None and (left := deadline - clock.monotonic()) > 0:
                self._changed.wait(min(left, SLICE))
            return self._failure is not None

    def take(self, name: str, iteration: int, timeout: float | None = None) -> Any:
        """Wait for a letter; None after ``timeout`` seconds. Raises what the MonitorThread failed with."""
        deadline = None if timeout is None else clock.monotonic() + timeout
        with self._changed:
            while (name, iteration) not in self._letters:
                if self._failure is not None:
                    raise self._failure
                left = SLICE if deadline is None else deadline - clock.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(min(left, SLICE))
            return self._letters[name, iteration]
