"""Watches the other nodes: a thread that asks for news of them, and for how long there have been too few."""

from __future__ import annotations

import threading
from collections.abc import Callable

from inprocess.launcher.generation import NodeEvent
from inprocess.launcher.nodes import Table
from inprocess.system import clock
from inprocess.system.logs import get_logger

__all__ = ["NodeWatch", "Shortage"]

log = get_logger(__name__)


class Shortage:
    """For how long a job has had fewer nodes than it needs.

    A node that comes meanwhile takes the free ranks, and the workers of the others go on. At once they would all be
    restarted, also where a node waits already: it looks for free ranks less often than the others look at the table.
    """

    def __init__(self, fewest: int, patience: float) -> None:
        self._fewest, self._patience = fewest, patience
        self._since: float | None = None

    def lasts(self, table: Table) -> str:
        """Look once. What is missing, where that has lasted for more than ``patience`` seconds; otherwise empty."""
        present, now = len(table.present()), clock.monotonic()
        if present >= self._fewest:
            self._since = None
            return ""
        what = f"{present} of {len(table.blocks)} nodes are left, and the job needs {self._fewest}"
        if self._since is None:
            self._since = now
            log.warning("%s; if no node comes within %g s, all workers are restarted", what, self._patience)
        return what if now - self._since > self._patience else ""


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
