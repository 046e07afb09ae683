"""A rank that is dying: its main thread has begun to end, the process has not ended.

A process ends, and its pidfd says so, when each of its threads has run once more and its memory has been given back:
10 to 20 ms after a SIGKILL where cores are idle, 40 ms and more beside ranks that compute. Its main thread begins to
end within a millisecond. So the others are interrupted while the process ends, and compute no longer beside it. Only
the pidfd accounts for it: until then they do not go on.

*Where a memory cgroup is full*, the kernel may look for another process to end before the memory of this one, its first
choice, counts as free (seen on Linux 6.18; the second came 4 to 19 ms after the first). A page that the monitor asks
for then makes it that process, and nobody says how the rank died: 5 of 75 with 1.5 GB on busy cores. So the monitor
gives back some memory of its own first, of which it then takes: about ten pages until it has spoken, a hundred where it
was forked (measured). With that none of 75, and none of 210 that were forked.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.monitor import pidfile, policy
from inprocess.monitor.board import Board
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.endings import exit_status, how_died, is_dying
from inprocess.monitor.link import Link
from inprocess.protocol.phases import RUNNING
from inprocess.system import clock

__all__ = ["DyingRank"]

#: bytes; the kernel counts pages in batches of 64 per core
_SPARE = 1 << 20


class DyingRank:
    """Of a training process, as the main thread of its monitor sees them."""

    def __init__(self, config: MonitorConfig, board: Board, training: int) -> None:
        self._config, self._board, self._training = config, board, training
        self._started = pidfile.start_time(config.training_pid)
        #: why it was killed, if this monitor did it
        self.killed: InterruptionRecord | None = None
        #: what was said before it was dead; it must not be said twice in different words
        self._foretold: InterruptionRecord | None = None
        self._died = threading.Event()
        self._spare = mmap.mmap(-1, _SPARE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._spare.write(bytes(_SPARE))  # what is not written to does not count

    def await_them(self, begin: Callable[[], None]) -> None:
        """``begin`` is called once in a thread of its own."""

        def wait() -> None:
            begun = self._board.await_end()
            self._spare.close()
            if begun:
                begin()

        threading.Thread(target=wait, name="inprocess-dying", daemon=True).start()

    def status(self) -> int | None:
        """As `exit_status` gives it."""
        return exit_status(self._config.training_pid, self._started, self._training)

    def foretell(self, link: Link) -> None:
        """They have begun, perhaps. It is missed only where it runs the function, or is about to."""
        seen = self._board.snapshot()
        runs = seen.phase in RUNNING and not seen.reserve and link.inside
        # its main thread may also have made the process another program
        if runs and self._foretold is None and is_dying(self._config.training_pid, self._started):
            self._foretold = self._record(seen, how_died(self.status()))
            link.foretell(seen.iteration, self._foretold, self._died)

    def tell(self, link: Link, how: str) -> None:
        """They are over."""
        self._died.set()
        if self._foretold is None:
            link.speak(self._record(self._board.snapshot(), how))

    def _record(self, seen: policy.Snapshot, how: str) -> InterruptionRecord:
        rank, kind = self._config.rank, Interruption.TERMINATED
        if self.killed is not None:
            return self.killed
        record = InterruptionRecord(seen.rank, kind, initial_rank=rank, message=how)
        return record.noticed(clock.monotonic(), clock.name())
