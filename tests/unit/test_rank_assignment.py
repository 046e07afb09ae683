"""Rank assignments, written as the diagrams of their docstrings: 'X' is terminated, '.' is inactive."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from inprocess import rank_filter as older
from inprocess.compose import Compose
from inprocess.exception import InternalError, OptionError
from inprocess.exception import RankDiscarded as ExceptionRankDiscarded
from inprocess.hooks import adapt_rank_assignment
from inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    RankFilter,
    ShiftRanks,
    gather,
)
from inprocess.state import Mode, State

from .cluster import Cluster, drawn


def ctx_of(rank: int, world_size: int, terminated: set[int] | None = None, store: object = None) -> RankAssignmentCtx:
    state = State(
        rank=rank,
        world_size=world_size,
        active_rank=rank,
        active_world_size=world_size,
        initial_rank=rank,
        initial_world_size=world_size,
        mode=Mode.ACTIVE,
    )
    return RankAssignmentCtx(state, store, set(terminated or ()))


def check(assignment: object, before: str, after: str, rank_filter: object = None) -> None:
    """`after` names the old ranks in the order of their new ones; a '.' before one says it is inactive."""
    places = before.split()
    terminated = {rank for rank, place in enumerate(places) if place == "X"}
    assign = adapt_rank_assignment(assignment, rank_filter)
    new = {}
    for rank in range(len(places)):
        if rank in terminated:
            continue
        state = assign(ctx_of(rank, len(places), terminated)).state
        assert state.world_size == len(places) - len(terminated)
        assert (state.active_rank is None) == (state.mode is Mode.INACTIVE)
        assert state.active_rank in (None, state.rank)
        new[state.rank] = f"{rank}" if state.active_rank is not None else f".{rank}"
        active_world_size = state.active_world_size
    assert " ".join(new[rank] for rank in sorted(new)) == after
    assert active_world_size == sum(not place.startswith(".") for place in after.split())


@pytest.mark.parametrize(
    ("assignment", "before", "after"),
    [
        (ShiftRanks(), "0 X 2 3 X X 6 7", "0 2 3 6 7"),
        (ShiftRanks(), "X 1", "1"),
        (ShiftRanks(), "0 1 2", "0 1 2"),
        (ShiftRanks(), "X X X 3", "3"),
        (FillGaps(), "0 X 2 3 X X 6 7", "0 6 2 3 7"),
        (FillGaps(), "X 1 2 3", "3 1 2"),
        (FillGaps(), "0 1 2 X", "0 1 2"),
        (FillGaps(), "X X 2 3", "2 3"),
        (FillGaps(), "0 X 2 X 4 X 6 X", "0 4 2 6"),
        (FillGaps(), "0 1 2", "0 1 2"),
        (ActivateAllRanks(), "0 1 2", "0 1 2"),
        (ActivateAllRanks(), "0 X 2", "0 2"),
        (MaxActiveWorldSize(2), "0 X 2 3", "0 2 .3"),
        (MaxActiveWorldSize(), "0 X 2 3", "0 2 3"),
        (ActiveWorldSizeDivisibleBy(2), "0 1 X 3 4 5", "0 1 3 4 .5"),
        (Compose(ShiftRanks(), MaxActiveWorldSize(2)), "0 X 2 3", "0 2 .3"),
        (Compose(MaxActiveWorldSize(2), ShiftRanks()), "0 X 2 3", "0 2 .3"),
        (Compose(MaxActiveWorldSize(2), FillGaps()), "0 X 2 3", "0 3 .2"),
        (Compose(ActiveWorldSizeDivisibleBy(2), MaxActiveWorldSize(3), ShiftRanks()), "0 1 2 3", "0 1 .2 .3"),
        (Compose(MaxActiveWorldSize(2), ActivateAllRanks(), ShiftRanks()), "0 X 2 3", "0 2 .3"),
        (Compose(ActivateAllRanks(), MaxActiveWorldSize(2), ShiftRanks()), "0 X 2 3", "0 2 3"),
        (
            Compose(ShiftRanks(), older.MaxActiveWorldSize(2)),
            "0 X 2 3",
            "0 2 3",
        ),  # an older filter acts where it stands
        (Compose(older.MaxActiveWorldSize(2), ShiftRanks()), "0 X 2 3", "0 2 .3"),
    ],
)
def test_diagrams(assignment: object, before: str, after: str) -> None:
    check(assignment, before, after)


@pytest.mark.parametrize(
    ("rank_filter", "after"),
    [
        (older.MaxActiveWorldSize(2), "0 2 .3 .4"),
        (older.MaxActiveWorldSize(), "0 2 3 4"),
        (older.WorldSizeDivisibleBy(3), "0 2 3 .4"),
        (Compose(older.WorldSizeDivisibleBy(2), older.MaxActiveWorldSize(3)), "0 2 .3 .4"),
        (MaxActiveWorldSize(1), "0 .2 .3 .4"),
        (lambda state: None, "0 2 3 4"),
    ],
)
def test_rank_filter_follows_the_assignment(rank_filter: object, after: str) -> None:
    check(ShiftRanks(), "0 X 2 3 4", after, rank_filter)


def test_older_assignment_and_filter() -> None:
    def assign(state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:
        state.rank -= sum(rank < state.rank for rank in terminated_ranks)
        state.world_size -= len(terminated_ranks)
        return state, set()

    check(assign, "0 X 2 3", "0 2 3")
    check(assign, "0 X 2 3", "0 2 .3", older.MaxActiveWorldSize(2))
    check(Compose(MaxActiveWorldSize(1), assign), "0 X 2 3", "0 .2 .3")


def test_assignment_that_returns_nothing_or_leaves_gaps() -> None:
    check(lambda ctx: None, "0 X 2", "0 2")
    check(lambda state, terminated_ranks: None, "0 X 2", "0 2")


def test_a_terminated_rank_is_discarded() -> None:
    assert RankDiscarded is ExceptionRankDiscarded
    for assignment in (ShiftRanks(), FillGaps(), FilterCountGroupedByKey("a", bool)):
        with pytest.raises(RankDiscarded, match="rank 1 "):
            adapt_rank_assignment(assignment)(ctx_of(1, 3, {1}))


def test_compose_is_a_rank_assignment() -> None:
    assert isinstance(Compose(ShiftRanks(), MaxActiveWorldSize(2)), RankAssignment)
    assert isinstance(Compose(ActiveWorldSizeDivisibleBy(2), MaxActiveWorldSize(2)), RankFilter)


@pytest.mark.parametrize(
    ("assignment", "error", "words"),
    [
        (lambda ctx: 3, TypeError, "rank_assignment=.*returned an object of type int"),
        (lambda state, terminated: state, TypeError, "terminated_ranks"),
        (lambda ctx: setattr(ctx.state, "rank", 9), OptionError, "rank=9"),
    ],
)
def test_results_that_cannot_be(assignment: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        adapt_rank_assignment(assignment)(ctx_of(0, 4))


def test_active_numbers_must_fit() -> None:
    def too_many(ctx: RankAssignmentCtx) -> None:
        ctx.state.active_world_size, ctx.state.mode = 9, Mode.ACTIVE

    def out_of_range(ctx: RankAssignmentCtx) -> None:
        ctx.state.active_rank, ctx.state.mode = 7, Mode.ACTIVE

    def active_without_rank(ctx: RankAssignmentCtx) -> None:
        ctx.state.active_rank, ctx.state.mode = None, Mode.ACTIVE

    for assignment, words in ((too_many, "=9"), (out_of_range, "=7"), (active_without_rank, "=None")):
        with pytest.raises(OptionError, match=words):
            adapt_rank_assignment(assignment)(ctx_of(0, 4))


@pytest.mark.parametrize("make", [MaxActiveWorldSize, ActiveWorldSizeDivisibleBy, older.MaxActiveWorldSize])
@pytest.mark.parametrize("value", [0, -1, "2", 1.5, True])
def test_limits_must_be_positive_integers(make: type, value: object) -> None:
    with pytest.raises(OptionError, match="integer >= 1"):
        make(value)


def group_of_two(name: int) -> object:
    return Compose(ShiftRanks(), FilterCountGroupedByKey(f"host {name // 2}", lambda count: count == 2))


def test_a_group_that_fails_its_condition_is_terminated_whole() -> None:
    cluster = Cluster(6, group_of_two)
    assert drawn(cluster.restart(), range(6)) == "0 1 2 3 4 5"
    assert drawn(cluster.restart(dead=[3]), range(6)) == "0 1 X X 2 3"
    assert drawn(cluster.restart(dead=[0, 1]), range(6)) == "X X X X 0 1"


def test_groups_by_a_function_of_the_rank_and_two_filters_in_a_row() -> None:
    pairs = FilterCountGroupedByKey(lambda state: state.rank // 2, lambda count: count == 2)
    halves = FilterCountGroupedByKey(lambda state: "left" if state.rank < 4 else "right", lambda count: count > 2)
    cluster = Cluster(8, lambda name: Compose(MaxActiveWorldSize(3), ShiftRanks(), halves, pairs))
    assert drawn(cluster.restart(dead=[0]), range(8)) == "X X X X 0 1 2 ."


def test_filter_arguments_are_checked() -> None:
    with pytest.raises(OptionError, match="key_or_fn=3"):
        FilterCountGroupedByKey(3, bool)
    with pytest.raises(OptionError, match="condition=3"):
        FilterCountGroupedByKey("a", 3)
    with pytest.raises(OptionError, match="5000 characters"):
        FilterCountGroupedByKey("a" * 5000, bool)(ctx_of(0, 2))


def test_gather_alone_needs_no_store() -> None:
    assert gather(None, "name", 1, 3, {0, 2}, "mine") == {1: "mine"}


@pytest.mark.parametrize("bad", ["no json", '{"0":"a"}', '{"0":"a","1":2}', "[]"])
def test_gather_trusts_nobody(bad: str) -> None:
    store = dist.HashStore()
    store.set("name/all", bad)
    with pytest.raises(InternalError, match="name"):
        gather(store, "name", 0, 2, (), "a")


def test_gather_ends_with_the_stores_error() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=5))
    with pytest.raises(RuntimeError):
        gather(store, "name", 0, 2, (), "a")
    assert store.get("name/0") == b"a"
