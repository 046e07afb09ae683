"""Who has which ranks, as the nodes write it into the store of the rendezvous, and who of them lives."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any

from inprocess.launcher.nodes import LOST, Table
from inprocess.system import clock, procfs

__all__ = ["Silence", "change", "new_owner", "read", "without_the_dead", "write"]


class Silence:
    """Which launchers have shown no new sign of life since they were first looked at."""

    def __init__(self, patience: float) -> None:
        self._patience, self._begun = patience, clock.monotonic()
        self._seen: dict[str, tuple[bytes, float]] = {}

    def of(self, owner: str, beat: bytes) -> bool:
        """Whether it has been silent for too long."""
        now = clock.monotonic()
        before, since = self._seen.setdefault(owner, (beat, now))
        if before != beat:
            self._seen[owner] = (beat, clock.monotonic() + 1e9)  # heard once: it lives
        return now - since > self._patience

    @property
    def all_heard(self) -> bool:
        """Each one lives, or time enough has passed to miss it."""
        known = all(since > clock.monotonic() for _, since in self._seen.values())
        return known or clock.monotonic() - self._begun > self._patience


def read(root: Any, key: str) -> bytes:
    """What a key holds; nothing where it is absent."""
    return bytes(root.get(key)) if root.check([key]) else b""


def write(root: Any, generation: int, before: bytes, table: Table) -> bool:
    """Write a table where it is still the one before; whether it was."""
    text = table.text()
    return bool(root.compare_set(f"table/{generation}", before.decode(), text) == text.encode())


def change(root: Any, generation: int, how: Callable[[Table], Table]) -> None:
    """Change the table of a generation, whoever else does meanwhile."""
    while True:
        text = read(root, f"table/{generation}")
        table = how(Table.parse(text))
        if table.text().encode() == text or write(root, generation, text, table):
            return


def without_the_dead(root: Any, table: Table, silent: Silence) -> Table:
    """Mark those that have ended on this machine, or were silent for too long."""
    for block in table.running():
        if _is_dead_here(block.owner) or silent.of(block.owner, read(root, f"alive/{block.owner}")):
            table = table.mark(block.owner, LOST)
    return table


def new_owner() -> str:
    """The name of this launcher: where its process id counts, the id, and what tells it from a later process."""
    return f"{_space()}:{os.getpid()}:{secrets.token_hex(4)}"


def _is_dead_here(owner: str) -> bool:
    """Whether it was a process of this machine that is no more. Host names do not tell: two containers on one machine
    may share that, and have process ids of their own."""
    space, pid, _ = owner.rsplit(":", 2)
    if not space or space != _space():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        pass
    return False


def _space() -> str:
    try:
        return procfs.pid_space()
    except OSError:  # /proc is hidden; then only silence tells
        return ""
