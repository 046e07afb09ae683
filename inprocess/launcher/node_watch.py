"""A thread that asks for news of the other nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from inprocess.launcher.generation import NodeEvent

__all__ = ["NodeWatch"]


class NodeWatch:
    """Asks again and again in a thread: a store whose host cannot be reached would hold up the loop for a minute."""

    def __init__(
        self, look: Callable[[], NodeEvent | None], failed: Callable[[Exception], None], interval: float
    ) -> None:
        self.news: NodeEvent | None = None
        self._look, self._failed, self._interval = look, failed, interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inprocess-nodes", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self.news is None and not self._stopped.wait(self._interval):
            try:
                self.news = self._look()
            except Exception as error:  # torch raises several kinds
                self._failed(error)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(2.0)  # longer where the store does not answer: it is left to itself then
