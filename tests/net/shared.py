"""What all hosts share, as if on a shared disk: the journal to which every rank's function writes its checkpoints, and
a page on which it shows when it last ran. Both outlive a process that is killed."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

RANKS = 64


@dataclass(frozen=True)
class Write:
    """One checkpoint."""

    rank: int
    iteration: int
    step: int
    #: monotonic, taken just before it was written
    t: float


class Shared:
    """Opened by the test and by each rank."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._journal = os.open(self.folder / "journal", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with open(self.folder / "page", "r+b") as page:
            self._memory = mmap.mmap(page.fileno(), 0)
        self._slots = memoryview(self._memory).cast("q")

    @classmethod
    def create(cls, folder: Path) -> Shared:
        (folder / "page").write_bytes(bytes(8 * (RANKS + 1)))
        return cls(folder)

    def close(self) -> None:
        self._slots.release()
        self._memory.close()
        os.close(self._journal)

    # --- a rank's function

    def run(self, rank: int) -> None:
        """The function of this initial rank runs."""
        self._slots[1 + rank] = time.monotonic_ns()

    def write(self, rank: int, iteration: int, step: int) -> None:
        """A checkpoint."""
        os.write(self._journal, f"{rank} {iteration} {step} {time.monotonic()!r}\n".encode())

    @property
    def finishing(self) -> bool:
        return bool(self._slots[0])

    # --- the test

    def finish(self) -> None:
        """Let the functions return."""
        self._slots[0] = 1

    def last_ran(self, rank: int) -> float:
        """When the function of this initial rank last ran (monotonic)."""
        return self._slots[1 + rank] / 1e9

    def writes(self, rank: int | None = None) -> list[Write]:
        """The journal, or what one rank wrote."""
        whole = (self.folder / "journal").read_text().rpartition("\n")[0]  # a line may be on its way
        lines = [line.split() for line in whole.splitlines()]
        found = [Write(int(a), int(b), int(c), float(d)) for a, b, c, d in lines]
        return [write for write in found if rank in (None, write.rank)]
