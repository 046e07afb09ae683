"""Who has which ranks in a running generation: a table of blocks, one for each node. Nothing here does IO.

torch's rendezvous closes when it is complete: a node that comes later could only make everybody start anew. So the
nodes of a running job keep this table in the store of the rendezvous, and a node that finds it takes a block: one whose
node has left or is lost, or a new one beyond the last.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from inprocess.system import strict_json

__all__ = ["Block", "Table"]

RUNNING, DONE, LEFT, LOST = "running", "done", "left", "lost"


@dataclass(frozen=True)
class Block:
    """The ranks of one node: ``size`` of them from ``base`` on."""

    base: int
    size: int
    #: tells one launcher from another
    owner: str
    #: running, done (all its workers exited with 0), left (by itself), lost (it fell silent)
    state: str = RUNNING

    @property
    def free(self) -> bool:
        return self.state in (LEFT, LOST)


@dataclass(frozen=True)
class Table:
    """All blocks, by rank."""

    blocks: tuple[Block, ...] = ()

    @classmethod
    def parse(cls, text: bytes | str) -> Table:
        """What `text` wrote; an empty one for an empty text. Raises ValueError for anything else."""
        rows = strict_json.parse(text or "[]")
        return cls(tuple(Block(int(base), int(size), str(owner), str(state)) for base, size, owner, state in rows))

    def text(self) -> str:
        return json.dumps([[block.base, block.size, block.owner, block.state] for block in self.blocks])

    def put(self, block: Block) -> Table:
        """With this block in place of the one that begins at the same rank."""
        others = (each for each in self.blocks if each.base != block.base)
        return Table(tuple(sorted((*others, block), key=lambda each: each.base)))

    def mark(self, owner: str, state: str) -> Table:
        """With another state for this owner's block."""
        return Table(tuple(replace(each, state=state) if each.owner == owner else each for each in self.blocks))

    def of(self, owner: str) -> Block | None:
        return next((block for block in self.blocks if block.owner == owner), None)

    def index(self, block: Block) -> int:
        return [each.base for each in self.blocks].index(block.base)

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return max((block.base + block.size for block in self.blocks), default=0)

    def present(self) -> list[Block]:
        return [block for block in self.blocks if not block.free]

    def running(self) -> list[Block]:
        return [block for block in self.blocks if block.state == RUNNING]

    def place(self, owner: str, size: int, most: int) -> Block | None:
        """Where a node with so many workers can join; None: nowhere, the job has ``most`` nodes."""
        if len(self.present()) >= most:
            return None
        for block in self.blocks:
            if block.free and block.size == size:
                return replace(block, owner=owner, state=RUNNING)
        return Block(self.world, size, owner)

    def watched_by(self, owner: str) -> Block | None:
        """The node whose signs of life this one looks for: the next that runs, in a ring.

        A node that is done looks as well: it waits for those that run, and one of these may be lost.
        """
        mine = self.of(owner)
        if mine is None or mine.free:
            return None
        begin = self.blocks.index(mine)
        following = (*self.blocks[begin + 1 :], *self.blocks[:begin])
        return next((block for block in following if block.state == RUNNING), None)
