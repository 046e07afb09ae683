"""What a node learns when it meets the others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from inprocess.launcher.decisions import keep_ranks
from inprocess.launcher.nodes import Block
from inprocess.system import strict_json

__all__ = ["Generation", "NodeEvent", "agree_on_rank"]


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

    #: restart (all workers, for a failure), join (which takes a restart), end (of the job), few (nodes are left), done
    #: (the workers of all nodes are)
    kind: str
    why: str


def agree_on_rank(place: Any, rank: int, nodes: int, preferred: int, lowest: int) -> tuple[int, int]:
    """This node's rank, and the lowest number that the generation may have.

    A node keeps its rank where that is possible; torch sorts by name and process id. The number is above those that any
    of them knows: a new store counts from 0, and log files of an earlier generation would be replaced.

    Args:
        place: the generation's own part of the store.
        rank: as torch has it.
        nodes: how many there are.
        preferred: the rank that this node would like to have; -1: any.
        lowest: the lowest number that this node allows.
    """
    place.set(f"rank/{rank}", json.dumps([preferred, lowest]))
    wanted = [strict_json.parse(text) for text in place.multi_get([f"rank/{each}" for each in range(nodes)])]
    return keep_ranks([int(before) for before, _ in wanted])[rank], max(int(number) for _, number in wanted)
