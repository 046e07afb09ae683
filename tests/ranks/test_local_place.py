"""INPROCESS_LOCAL_RANK and INPROCESS_LOCAL_WORLD_SIZE count the active ranks of a host, without holes."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import pytest

from inprocess import Compose
from inprocess.rank_assignment import ActiveWorldSizeDivisibleBy, ShiftRanks
from tests.harness import At, HostLoss, Kill, Raise
from tests.harness.child import Context
from tests.harness.launch import BEATING

from . import targets


def run_on_nodes(context: Context) -> Any:
    """Ranks 0 and 1 on the first node, 2 and 3 on the second one, and so on."""
    node = context.rank // 2
    os.environ["GROUP_RANK"] = str(node)
    context.emit("node", node=node)
    try:
        return targets.run_full(context) if context.args.get("full") else targets.run_train(context)
    finally:
        assert not [name for name in os.environ if name.startswith("INPROCESS_LOCAL")]
        del os.environ["GROUP_RANK"]


def places(ranks: Any) -> dict[int, dict[int, list[list[int]]]]:
    """Iteration -> node -> (local rank, how many there are) of its ranks, in the order of their ranks."""
    found: dict[int, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        ((node,),) = [[event["node"]] for event in rank.of("node")]
        for event in rank.of("enter"):
            found[event["iteration"]][node].append((event["rank"], event["local"]))
    return {it: {node: [place for _, place in sorted(nodes[node])] for node in nodes} for it, nodes in found.items()}


BOTH, ONE = [[0, 2], [1, 2]], [[0, 1]]


@pytest.mark.parametrize("victim", [0, 2, 3])
def test_one_dies(launch, victim):
    ranks = launch(run_on_nodes, 4, faults={At(victim, step=1): Kill()}).wait()
    assert places(ranks) == {0: {0: BOTH, 1: BOTH}, 1: {victim // 2: ONE, 1 - victim // 2: BOTH}}
    said = [rank.rank for rank in ranks if "is the first of its host now, and its LOCAL_RANK is" in rank.log]
    assert said == ([victim + 1] if victim % 2 == 0 else [])


def test_one_raises(launch):
    ranks = launch(run_on_nodes, 4, faults={At(1, step=1): Raise()}).wait()
    assert places(ranks) == {0: {0: BOTH, 1: BOTH}, 1: {0: BOTH, 1: BOTH}}


def test_a_reserve_does_not_count(launch):
    """One of three dies, and only two may be active."""
    wrapper = {"rank_assignment": Compose(ActiveWorldSizeDivisibleBy(2), ShiftRanks())}
    ranks = launch(run_on_nodes, 4, faults={At(0, step=1): Kill()}, wrapper=wrapper).wait()
    assert places(ranks) == {0: {0: BOTH, 1: BOTH}, 1: {0: ONE, 1: ONE}}


def test_one_is_replaced(launch):
    """By a process that is registered on the host as well."""
    ranks = launch(run_on_nodes, 4, faults={At(2, step=1): Kill()}, respawn=1, args={"full": True}).wait()
    found = places(ranks)
    assert found[0] == found[max(found)] == {0: BOTH, 1: BOTH}


def test_over_another_store(launch):
    """With rank 0 its host's store is lost, and all are registered again."""
    ranks = launch(run_on_nodes, 4, faults={At(0, step=1): HostLoss()}, wrapper=BEATING).wait()
    assert list(places(ranks).values()) == [{0: BOTH, 1: BOTH}, {0: ONE, 1: BOTH}]
