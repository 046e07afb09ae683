"""`Tree`: its five steps as diagrams, the agreement of all ranks, and assignments that never came true."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from inprocess.call.hooks import adapt_rank_assignment
from inprocess.compose import Compose
from inprocess.exception import InternalError, OptionError
from inprocess.rank_assignment import Layer, LayerFlag, RankAssignmentCtx, ShiftRanks, Tree
from inprocess.rank_assignment.plan import Leaf, Rules, plan
from inprocess.state import State

from .cluster import Cluster, drawn

RESERVE, BACKFILL = LayerFlag.RESERVE, LayerFlag.BACKFILL


def hosts(
    of: int = 4, root: LayerFlag | None = None, host: LayerFlag | None = None, world_size_filter=None, **limits: int
) -> object:
    """A root and hosts of `of` ranks."""
    return lambda name: Tree(
        [Layer(flag=root), Layer(key_or_fn=f"host {name // of}", flag=host, **limits)], world_size_filter
    )


def test_who_joins_is_where_its_key_belongs() -> None:
    """Everybody is back in its place; a reserve that was activated meanwhile is one again."""
    cluster = Cluster(8, hosts(max_ranks=3, host=RESERVE))
    assert drawn(cluster.restart(), range(8)) == "0 1 2 . 3 4 5 ."
    assert drawn(cluster.restart([1, 4]), range(8)) == "0 X 2 1 X 4 5 3"
    assert drawn(cluster.join({1: 1}), range(8)) == "0 1 2 . X 3 4 5"
    assert drawn(cluster.join({4: 4}, dead=[0]), range(8)) == "X 0 1 2 3 4 5 ."


def test_the_same_again_where_that_iteration_did_not_start() -> None:
    cluster = Cluster(4, hosts(of=2, max_ranks=1, host=RESERVE))
    assert drawn(cluster.restart(), range(4)) == "0 . 1 ."
    assert drawn(cluster.restart([0]), range(4)) == "X 0 1 ."
    assert drawn(cluster.join({0: 0}, commit=False), range(4)) == "0 . 1 ."
    assert drawn(cluster.restart([2]), range(4)) == "0 . X 1"


@pytest.mark.parametrize(
    ("make", "first", "dead", "after"),
    [
        # one layer, no flags: shift left
        (lambda name: Tree([Layer()]), "0 1 2 3", [1], "0 X 1 2"),
        (lambda name: Tree([Layer(max_ranks=3)]), "0 1 2 .", [1], "0 X 1 ."),
        (lambda name: Tree([Layer(max_ranks=3, flag=RESERVE)]), "0 1 2 .", [1], "0 X 2 1"),
        (lambda name: Tree([Layer(flag=BACKFILL)]), "0 1 2 3 4", [1], "0 X 2 3 1"),
        (lambda name: Tree([Layer(flag=BACKFILL)]), "0 1 2 3 4 5 6 7", [1, 4, 5], "0 X 2 3 X X 4 1"),
        (lambda name: Tree([Layer(flag=BACKFILL)]), "0 1 2 3 4", [3, 4], "0 1 2 X X"),
        # step 1: a host with too few is terminated whole, and its reserve with it
        (hosts(min_ranks=4), "0 1 2 3 4 5 6 7", [1], "X X X X 0 1 2 3"),
        (hosts(min_ranks=3, max_ranks=3), "0 1 2 . 3 4 5 .", [1, 2], "X X X X 0 1 2 ."),
        # step 2: the reserve of the own host takes the active rank
        (hosts(max_ranks=3, host=RESERVE), "0 1 2 . 3 4 5 .", [1], "0 X 2 1 3 4 5 ."),
        (hosts(max_ranks=3, host=RESERVE), "0 1 2 . 3 4 5 .", [1, 2], "0 X X 1 2 3 4 ."),
        (hosts(max_ranks=3, root=RESERVE), "0 1 2 . 3 4 5 .", [1], "0 X 1 . 2 3 4 ."),  # not reachable
        (hosts(max_ranks=3), "0 1 2 . 3 4 5 .", [1], "0 X 1 . 2 3 4 ."),
        (hosts(max_ranks=3, host=RESERVE), "0 1 2 . 3 4 5 .", [4], "0 1 2 . X 4 5 3"),
        (hosts(max_ranks=3, host=RESERVE), "0 1 2 . 3 4 5 .", [7], "0 1 2 . 3 4 5 X"),
        # a reserve of another host only while that host has room
        (hosts(max_ranks=3, root=RESERVE, host=RESERVE), "0 1 2 . 3 4 5 .", [1, 2], "0 X X 1 2 3 4 ."),
        (hosts(max_ranks=3, root=RESERVE, host=RESERVE), "0 1 2 . 3 4 5 .", [1, 2, 5], "0 X X 1 2 X 4 3"),
        # step 3
        (hosts(of=3, root=BACKFILL, host=BACKFILL), "0 1 2 3 4 5", [1], "0 X 2 3 4 1"),
        (hosts(of=3, host=BACKFILL), "0 1 2 3 4 5", [1], "0 X 1 2 3 4"),
        (hosts(of=3, host=BACKFILL), "0 1 2 3 4 5", [0], "X 1 0 2 3 4"),
        (hosts(of=3, root=BACKFILL), "0 1 2 3 4 5", [0], "X 0 1 2 3 4"),
        # step 4
        (hosts(of=3), "0 1 2 3 4 5", [1], "0 X 1 2 3 4"),
        # step 5
        (hosts(of=3, world_size_filter=lambda n: n // 2 * 2), "0 1 2 3 4 5", [1], "0 X 1 2 3 ."),
        (hosts(of=3, world_size_filter=lambda n: min(n, 4)), "0 1 2 3 . .", [1], "0 X 1 2 . ."),
    ],
)
def test_diagrams(make, first: str, dead: list[int], after: str) -> None:
    names = range(len(first.split()))
    cluster = Cluster(len(names), make)
    assert drawn(cluster.restart(), names) == first
    assert drawn(cluster.restart(dead), names) == after


def test_a_whole_spare_host_replaces_a_host_in_a_rack() -> None:
    def make(name: int) -> Tree:
        return Tree(
            [
                Layer(max_ranks=4, key_or_fn="job", flag=RESERVE),
                Layer(min_ranks=2, max_ranks=2, key_or_fn=f"host {name // 2}", flag=RESERVE),
            ]
        )

    cluster = Cluster(6, make)
    assert drawn(cluster.restart(), range(6)) == "0 1 2 3 . ."
    assert drawn(cluster.restart([0]), range(6)) == "X X 2 3 0 1"


def test_the_nearest_reserve_is_taken_and_a_rack_ends_the_search() -> None:
    def make(name: int) -> Tree:
        return Tree(
            [
                Layer(),
                Layer(key_or_fn=f"rack {name // 4}", flag=RESERVE),
                Layer(max_ranks=1, key_or_fn=f"host {name // 2}", flag=RESERVE),
            ]
        )

    cluster = Cluster(8, make)
    assert drawn(cluster.restart(), range(8)) == "0 . 1 . 2 . 3 ."
    assert drawn(cluster.restart([2]), range(8)) == "0 . X 1 2 . 3 ."
    assert drawn(cluster.restart([4, 5]), range(8)) == "0 . X 1 X X 2 ."  # rank 7's host is full: one active


def test_depth_first_order_keeps_a_hosts_ranks_together() -> None:
    cluster = Cluster(6, lambda name: Tree([Layer(), Layer(key_or_fn=f"host {name % 2}")]))
    assert drawn(cluster.restart(), range(6)) == "0 3 1 4 2 5"


def test_a_rack_is_numbered_whole_before_the_next_one() -> None:
    """Its second host, too, although the first rank of another rack comes before that."""

    def make(name: int) -> Tree:
        rack = name % 2
        return Tree([Layer(), Layer(key_or_fn=f"rack {rack}"), Layer(key_or_fn=f"host {name}")])

    assert drawn(Cluster(4, make).restart(), range(4)) == "0 2 1 3"


def test_terminated_before_the_first_iteration() -> None:
    cluster = Cluster(4, hosts(of=2, min_ranks=2))
    assert drawn(cluster.restart([1]), range(4)) == "X X 0 1"


def test_reserves_are_activated_when_nobody_else_is_left() -> None:
    cluster = Cluster(4, lambda name: Tree([Layer(max_ranks=2), Layer(key_or_fn=f"host {name // 2}")]))
    assert drawn(cluster.restart(), range(4)) == "0 1 . ."
    assert drawn(cluster.restart([0, 1]), range(4)) == "X X 0 1"


def test_keys_are_read_once() -> None:
    cluster = Cluster(4, lambda name: Tree([Layer(), Layer(min_ranks=2, key_or_fn=lambda state: state.rank // 2)]))
    cluster.restart()
    assert drawn(cluster.restart([0]), range(4)) == "X X 0 1"
    assert drawn(cluster.restart(), range(4)) == "X X 0 1"


@pytest.mark.parametrize("without", [[], [0], [2], [3, 4]])
def test_an_assignment_that_never_came_true_is_forgotten(without: list[int]) -> None:
    """Interrupted while assigning: again from the same numbering, with more dead. Some ranks had not even finished."""
    cluster = Cluster(8, hosts(max_ranks=3, root=RESERVE, host=RESERVE))
    assert drawn(cluster.restart(), range(8)) == "0 1 2 . 3 4 5 ."
    interrupted = cluster.restart([1], commit=False, without=()) if not without else None
    if interrupted is None:
        cluster.gone = {1}
        cluster.members = [member for member in cluster.members if member.name != 1]
        finish_only_on(cluster, [member.name for member in cluster.members if member.name not in without])
    assert drawn(cluster.restart([5]), range(8)) == "0 X 2 1 3 X 5 4"
    assert drawn(cluster.restart([6]), range(8)) == "0 X 2 1 3 X X 4"


def finish_only_on(cluster: Cluster, names: list[int]) -> None:
    """Run the assignment everywhere, then take it back on those that the interruption reached before the end."""
    before = {member.name: vars(member.made).copy() for member in cluster.members}
    cluster.restart(commit=False)
    for member in cluster.members:
        if member.name not in names:
            vars(member.made).update(before[member.name])


def test_a_second_call_starts_afresh() -> None:
    cluster = Cluster(4, hosts(of=2, host=RESERVE, max_ranks=1))
    cluster.restart()
    cluster.restart([0])
    for number, member in enumerate(cluster.members):
        member.state = State(rank=number, world_size=3, initial_rank=number, initial_world_size=3)
    assert drawn(cluster.restart(), range(4)) == "X 0 1 ."
    assert drawn(cluster.restart([2]), range(4)) == "X 0 X 1"


def test_a_newcomer_without_memory_agrees() -> None:
    cluster = Cluster(4, hosts(of=2, root=RESERVE, host=RESERVE, max_ranks=1))
    cluster.restart()
    newcomer = cluster.members[1]  # as if this process had just been started
    newcomer.assign = adapt_rank_assignment(hosts(of=2, root=RESERVE, host=RESERVE, max_ranks=1)(1))
    assert drawn(cluster.restart([0]), range(4)) == "X 0 1 ."


@pytest.mark.parametrize("seed", range(12))
def test_random_terminations_and_interrupted_assignments(seed: int) -> None:
    """All ranks agree, limits hold, healthy active ranks keep their number where the flags allow it."""
    rng = random.Random(seed)
    flags = [None, RESERVE, BACKFILL, RESERVE | BACKFILL]
    size, per_host, per_rack = 12, rng.choice([2, 3]), 6
    racks = Layer(1, rng.choice([None, 4, 5]), "", rng.choice(flags))
    host = Layer(rng.choice([1, 2]), rng.choice([None, 2]), "", rng.choice(flags))
    root = Layer(1, rng.choice([None, 9]), "root", rng.choice(flags))
    keys = {name: ("root", f"rack {name // per_rack}", f"host {name // per_host}") for name in range(size)}

    def make(name: int) -> Tree:
        layers = [root, racks, host]
        return Tree([Layer(each.min_ranks, each.max_ranks, keys[name][i], each.flag) for i, each in enumerate(layers)])

    cluster = Cluster(size, make)
    states = cluster.restart()
    while len(states) > 3:
        living = [member.name for member in cluster.members]
        dead = rng.sample(living, rng.randint(0, 2))
        states = cluster.restart(dead, commit=rng.random() < 0.6)
        for depth, layer in enumerate([root, racks, host]):
            healthy = Counter(keys[name][: depth + 1] for name in states)
            active = Counter(keys[name][: depth + 1] for name in states if states[name].active_rank is not None)
            assert all(count >= layer.min_ranks for count in healthy.values())
            assert all(count <= (layer.max_ranks or size) for count in active.values())


def test_an_interrupted_assignment_changes_nothing() -> None:
    """With any interruptions in between, the result is that of one restart with all the dead."""
    for seed in range(10):
        rng = random.Random(seed)
        make = hosts(root=RESERVE | BACKFILL, host=rng.choice([RESERVE, BACKFILL, RESERVE | BACKFILL]), max_ranks=3)
        smooth, rough = Cluster(8, make), Cluster(8, make)
        assert smooth.restart() == rough.restart()
        for _ in range(2):
            dead = rng.sample([member.name for member in smooth.members], 2)
            expected = smooth.restart(dead)
            rough.restart(dead[:1], commit=False)
            assert rough.restart(dead[1:]) == expected


def test_a_large_job_is_planned_quickly() -> None:
    leaves = [Leaf(r, ("root", str(r // 8)), r if r < 15000 else None, r % 100 != 1) for r in range(16384)]
    result = plan(Rules(((1, None), (1, None)), 0, 0), leaves, 15000, lambda n: n // 8 * 8)
    assert result.active_world_size == 15000
    assert sorted(result.ranks.values()) == list(range(len(result.ranks)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layer(min_ranks=0), "min_ranks=0"),
        (lambda: Layer(min_ranks=3, max_ranks=2), "max_ranks=2 is less than min_ranks=3"),
        (lambda: Layer(key_or_fn=None), "key_or_fn=None"),
        (lambda: Layer(flag="RESERVE"), "flag='RESERVE'"),
        (lambda: Tree([]), "at least one Layer"),
        (lambda: Tree(Layer()), "list"),
        (lambda: Tree([Layer(), 3]), "Layer"),
        (lambda: Tree([Layer()], 3), "world_size_filter=3"),
        (lambda: adapt_rank_assignment(Compose(Tree([Layer()]), ShiftRanks())), "cannot be composed"),
        (lambda: adapt_rank_assignment(Tree([Layer()]), lambda state: state), "cannot be composed"),
    ],
)
def test_wrong_arguments(make, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        make()


def test_wrong_results() -> None:
    for size in (5, -1, 1.0, True):
        with pytest.raises(OptionError, match="world_size_filter"):
            Cluster(1, lambda name, size=size: Tree([Layer()], lambda n: size)).restart()
    with pytest.raises(OptionError, match=r"layers\[0\]"):
        Cluster(2, lambda name: Tree([Layer(key_or_fn=f"root {name}")])).restart()
    with pytest.raises(OptionError, match="numbers of layers"):
        Cluster(2, lambda name: Tree([Layer()] * (name + 1))).restart()


@pytest.mark.parametrize("said", ["no json", "[1]", '[["a"],0,"1",true]', '[["a"],-1,1,true]', '["a",0,1,true]', "3"])
def test_what_comes_from_the_store_is_checked(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inprocess.rank_assignment.tree.gather_next", lambda ctx, value: {0: value, 1: said})
    state = State(rank=0, world_size=2, initial_rank=0, initial_world_size=2)
    with pytest.raises(InternalError):
        Tree([Layer()])(RankAssignmentCtx(state, None, set()))
