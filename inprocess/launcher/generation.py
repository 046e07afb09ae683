"""What a node learns when it meets the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inprocess.launcher.nodes import Block

__all__ = ["Generation", "NodeEvent"]


@dataclass(frozen=True)
class Generation:
    """A generation as one node sees it."""

    #: of the rendezvous; the part that belongs to this generation
    store: Any
    rank: int
    nodes: int
    #: counts the starts of the whole group, from 0; the same on all nodes
    generation: int
    #: where the workers' store is
    host: str
    port: int
    #: the ranks that this node took in a generation that runs; None: it began together with the others
    block: Block | None = None
    #: how many ranks there are then, and whether these are new ones
    world: int = 0
    grows: bool = False


@dataclass(frozen=True)
class NodeEvent:
    """What another node wants."""

    #: restart (all workers), end (of the job), few (nodes are left), done (the workers of all nodes are)
    kind: str
    why: str
