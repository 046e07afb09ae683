"""NCCL's group calls, and how torch counts them, as their sources have it."""

from __future__ import annotations

import threading
from typing import Any

#: any of NCCL's
ERROR = 5


class Nccl(threading.local):
    """What NCCL and torch keep of each thread, as their sources have it; the library, as far as it is used."""

    def __init__(self) -> None:
        self.depth = self.counted = 0
        self.failed = False
        self.queue: list[Any] = []

    def ncclGroupStart(self) -> int:
        self.depth += 1
        return 0

    def ncclAllReduce(self, *args: Any) -> int:
        assert args[5] is None  # the communicator
        self.failed = self.depth > 0
        return ERROR

    def ncclGroupEnd(self) -> int:
        if not self.depth:
            return ERROR
        self.depth -= 1
        if self.depth:
            return 0
        queue, self.queue = self.queue, []
        failed, self.failed = self.failed or any(group.aborted for group in queue), False
        for group in queue:
            assert not group.freed, "what an abort has freed is used"
            if not failed:
                group.begun += 1
        return ERROR if failed else 0

    def start(self) -> None:
        """``ProcessGroupNCCL::groupStart``."""
        self.ncclGroupStart()
        self.counted += 1

    def end(self) -> None:
        """``ProcessGroupNCCL::groupEnd``."""
        if self.ncclGroupEnd():
            raise RuntimeError("NCCL error")
        self.counted -= 1

    def make_communicator(self, error: str = "") -> None:
        """In a group call it is made outside, as often as torch has counted."""
        for _ in range(self.counted):
            if self.ncclGroupEnd():
                raise RuntimeError("NCCL error: not in a group call")
        if error:
            raise RuntimeError(error)
        self.depth += self.counted


class Backend:
    def __init__(self, nccl: Nccl) -> None:
        self._group_start, self._group_end = nccl.start, nccl.end
