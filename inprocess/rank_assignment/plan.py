"""The five steps of `Tree`, pure: places of all ranks in, new ranks out. Nothing here knows of stores or states."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..exception import OptionError

__all__ = ["Leaf", "Result", "Rules", "plan"]

Node = tuple[str, ...]  # the keys from the root down to the node


@dataclasses.dataclass
class Leaf:
    """One rank in the tree."""

    rank: int
    keys: Node  #: one key for each layer, the root's first
    active: int | None  #: active rank, None for a reserve
    healthy: bool = True

    def nodes(self) -> Iterator[tuple[int, Node]]:
        """(depth, node) of the branches this rank is in, from the last layer up to the root."""
        for depth in range(len(self.keys) - 1, -1, -1):
            yield depth, self.keys[: depth + 1]


@dataclasses.dataclass(frozen=True)
class Rules:
    """The layers, as far as planning needs them."""

    limits: tuple[tuple[int, int | None], ...]  #: (min_ranks, max_ranks) by depth
    reserve_depth: int  #: highest depth searched for a reserve; the number of layers: none is searched
    backfill_depth: int  #: depth of the branches within which gaps are backfilled; the number of layers: none


@dataclasses.dataclass(frozen=True)
class Result:
    """The new numbering: new rank by old rank of everyone who stays; ranks below `active_world_size` are active."""

    ranks: dict[int, int]
    active_world_size: int


def plan(
    rules: Rules, leaves: Sequence[Leaf], active_world_size: int, size_filter: Callable[[int], int] | None
) -> Result:
    """Assign ranks to `leaves`, which must be in rank order and are changed; size 0: the first time."""
    terminate_small_branches(rules, leaves)
    order = [leaf for leaf in leaves if leaf.healthy]
    if active_world_size > 0:
        backfill(rules, order, replace(rules, leaves))
    if not any(leaf.active is not None for leaf in order):
        order = depth_first(order)
        activate(rules, order)
    return number(order, size_filter)


def terminate_small_branches(rules: Rules, leaves: Iterable[Leaf]) -> None:
    """Step 1: children before parents, a branch with fewer than min_ranks healthy ranks loses them all."""
    for depth in reversed(range(len(rules.limits))):
        healthy = Counter(leaf.keys[: depth + 1] for leaf in leaves if leaf.healthy)
        for leaf in leaves:
            leaf.healthy = leaf.healthy and healthy[leaf.keys[: depth + 1]] >= rules.limits[depth][0]


def depth_first(leaves: Sequence[Leaf]) -> list[Leaf]:
    """The ranks branch by branch; branches in the order of their lowest rank."""
    first: dict[Node, int] = {}
    for leaf in leaves:
        for _, node in leaf.nodes():
            first.setdefault(node, leaf.rank)
    return sorted(leaves, key=lambda leaf: (*[first[node] for _, node in reversed([*leaf.nodes()])], leaf.rank))


def activate(rules: Rules, order: Iterable[Leaf]) -> None:
    """At first: activate in the given order while every branch above has room."""
    active: Counter[Node] = Counter()
    total = 0
    for leaf in order:
        leaf.active = None
        if has_room(rules, leaf, active):
            leaf.active = total
            total += 1
            active.update(node for _, node in leaf.nodes())


def has_room(rules: Rules, leaf: Leaf, active: Counter[Node]) -> bool:
    """Whether all branches above `leaf` have fewer than max_ranks active."""
    maxima = ((rules.limits[depth][1], node) for depth, node in leaf.nodes())
    return all(limit is None or active[node] < limit for limit, node in maxima)


def replace(rules: Rules, leaves: Sequence[Leaf]) -> list[Leaf]:
    """Step 2: reserves take the place of terminated active ranks. Returns the terminated that nobody replaced."""
    active: Counter[Node] = Counter()
    reserves: defaultdict[Node, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        for _, node in leaf.nodes():
            if leaf.healthy and leaf.active is None:
                reserves[node].append(leaf)
            elif leaf.healthy:
                active[node] += 1
    gaps = sorted((leaf.active, leaf.rank, leaf) for leaf in leaves if not leaf.healthy and leaf.active is not None)
    unfilled = [leaf for _, _, leaf in gaps]
    for depth in range(len(rules.limits) - 1, rules.reserve_depth - 1, -1):  # near replacements before far ones
        unfilled = [gap for gap in unfilled if not fill(rules, gap, reserves[gap.keys[: depth + 1]], active)]
    return unfilled


def fill(rules: Rules, gap: Leaf, reserves: list[Leaf], active: Counter[Node]) -> bool:
    """Give the gap's active rank to the first of `reserves` that may be activated; whether there is one."""
    for leaf in reserves:
        if leaf.active is None and has_room(rules, leaf, active):
            leaf.active = gap.active
            active.update(node for _, node in leaf.nodes())
            return True
    return False


def backfill(rules: Rules, order: Iterable[Leaf], gaps: Iterable[Leaf]) -> None:
    """Step 3: the largest active rank of the gap's branch at backfill_depth moves into the gap, if it is larger."""
    depth = rules.backfill_depth
    if depth == len(rules.limits):
        return
    movable: defaultdict[Node, list[tuple[int, Leaf]]] = defaultdict(list)
    for leaf in order:
        if leaf.active is not None:
            movable[leaf.keys[: depth + 1]].append((leaf.active, leaf))
    for candidates in movable.values():
        candidates.sort(key=lambda each: each[0])
    for gap in gaps:
        candidates = movable[gap.keys[: depth + 1]]
        if candidates and gap.active is not None and candidates[-1][0] > gap.active:
            candidates.pop()[1].active = gap.active


def number(order: Sequence[Leaf], size_filter: Callable[[int], int] | None) -> Result:
    """Steps 4 and 5: close the gaps that are left, apply the filter, put the reserves behind the active ranks."""
    active = sorted((leaf.active, leaf.rank) for leaf in order if leaf.active is not None)
    size = len(active) if size_filter is None else size_filter(len(active))
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(active):
        raise OptionError(f"world_size_filter({len(active)}) returned {size!r}: return 0 to {len(active)}")
    ranks = {rank: new for new, (_, rank) in enumerate(active[:size])}
    for leaf in order:
        if leaf.rank not in ranks:
            ranks[leaf.rank] = len(ranks)
    return Result(ranks, size)
