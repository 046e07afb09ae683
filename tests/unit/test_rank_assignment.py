"""Rank assignments, written as the diagrams of their docstrings: 'X' is terminated, '.' is inactive."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from inprocess import rank_filter as older
from inprocess.call.hooks import adapt_rank_assignment
from inprocess.compose import Compose
from inprocess.exception import InternalError, OptionError
from inprocess.exception import RankDiscarded as ExceptionRankDiscarded
from inprocess.exception import TimeoutError as OurTimeoutError
from inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    FilterGroupedByKey,
    Layer,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    RankFilter,
    ShiftRanks,
    Tree,
    gather,
)
from inprocess.state import Mode, State, Status

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


def test_a_key_may_be_anything() -> None:
    """Such as the number of a host; its text counts."""
    cluster = Cluster(
        4, lambda name: Compose(ShiftRanks(), FilterCountGroupedByKey(name // 2, lambda count: count == 2))
    )
    assert drawn(cluster.restart(dead=[3]), range(4)) == "0 1 X X"


def test_groups_by_a_function_of_the_rank_and_two_filters_in_a_row() -> None:
    pairs = FilterCountGroupedByKey(lambda state: state.rank // 2, lambda count: count == 2)
    halves = FilterCountGroupedByKey(lambda state: "left" if state.rank < 4 else "right", lambda count: count > 2)
    cluster = Cluster(8, lambda name: Compose(MaxActiveWorldSize(3), ShiftRanks(), halves, pairs))
    assert drawn(cluster.restart(dead=[0]), range(8)) == "X X X X 0 1 2 ."


def test_filter_arguments_are_checked() -> None:
    with pytest.raises(OptionError, match="key_or_fn=None"):
        FilterCountGroupedByKey(None, bool)
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


# --- called as nvidia-resiliency-ext 0.2 calls them, and what users derive from ours


class OlderShift(ShiftRanks):
    """A user's, of the older form, on top of ours."""

    def __call__(self, state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:  # type: ignore[override]
        assert state.store is not None
        return super().__call__(state, terminated_ranks)


class OlderBase(RankAssignment):
    """A user's own, of the older form."""

    def __call__(self, state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:  # type: ignore[override]
        if state.rank in terminated_ranks:
            raise RankDiscarded("mine")
        state.rank -= sum(rank < state.rank for rank in terminated_ranks)
        state.world_size -= len(terminated_ranks)
        return state, set()


class Newer(ShiftRanks):
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:  # type: ignore[override]
        return super().__call__(ctx)


class Untouched(ShiftRanks):
    pass


class AnyForm(ShiftRanks):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)


class FirstTwo(RankFilter):
    """A user's filter of the newer form without `limit`: it writes to the state."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:  # type: ignore[override]
        size = min(2, ctx.state.active_world_size)
        active = ctx.state.rank < size
        ctx.state.mode = Mode.ACTIVE if active else Mode.INACTIVE
        ctx.state.active_rank, ctx.state.active_world_size = ctx.state.rank if active else None, size
        return ctx


def older_filter(state: State) -> State:
    """A user's: that generation knows no active rank."""
    state.active_world_size = min(2, state.active_world_size)
    state.status = Status.ACTIVE if state.rank < state.active_world_size else Status.INACTIVE
    return state


def in_older_form(assign: Callable[..., Any], before: str, store: object = None) -> list[tuple[int, int, set[int]]]:
    """(rank, world size, terminated ranks) on each rank of `before`; a rank that is terminated is asked, too."""
    places = before.split()
    terminated = {rank for rank, place in enumerate(places) if place == "X"}

    def run(rank: int) -> Any:
        state = State(rank, len(places), store=store)
        try:
            state, left = assign(state, frozenset(terminated))
        except RankDiscarded:
            return None
        return state.rank, state.world_size, left

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(run, range(len(places))))


@pytest.mark.parametrize("assign", [ShiftRanks(), OlderBase(), Untouched(), AnyForm(), Compose(ShiftRanks())])
def test_shift_in_the_older_form(assign: Callable[..., Any]) -> None:
    assert in_older_form(assign, "0 X 2 X") == [(0, 2, set()), None, (1, 2, set()), None]


def test_fill_gaps_in_the_older_form() -> None:
    found = in_older_form(FillGaps(), "0 X 2 3 X X 6 7")
    assert [each and each[0] for each in found] == [0, None, 2, 3, None, None, 1, 4]


def test_our_assignments_change_the_state_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    state = State()
    terminated = {0}
    after, left = ShiftRanks()(state, terminated)
    assert (after is state, state.rank, state.active_world_size, left, terminated) == (True, 1, 2, set(), {0})
    assert older.MaxActiveWorldSize(1)(state).status is Status.INACTIVE


@pytest.mark.parametrize("kind", [older.MaxActiveWorldSize, older.WorldSizeDivisibleBy])
def test_older_filters_on_a_state_of_that_generation(kind: Any) -> None:
    """Its rank alone says who is active, also where it was set after the state was made."""
    for rank, status in enumerate([Status.ACTIVE] * 4 + [Status.INACTIVE] * 2):
        state = State()
        state.rank, state.world_size, state.active_world_size = rank, 6, 6
        assert kind(4)(state).status is status
        assert (state.active_world_size, state.active_rank) == (4, rank if rank < 4 else None)


@pytest.mark.parametrize("assign", [OlderShift(), OlderBase(), Newer(), Untouched(), AnyForm()])
def test_what_users_derive_runs_under_a_wrapper(assign: object) -> None:
    def checked(part: object, before: str, after: str) -> None:
        places = before.split()
        terminated = {rank for rank, place in enumerate(places) if place == "X"}
        made = adapt_rank_assignment(part)
        states = [
            made(ctx_of(rank, len(places), terminated, object())).state
            for rank in range(len(places))
            if rank not in terminated
        ]
        assert [state.active_rank for state in states] == [int(a) if a != "." else None for a in after.split()]
        assert all(state.store is None for state in states)

    checked(assign, "0 X 2 3", "0 1 2")
    checked(Compose(MaxActiveWorldSize(2), assign), "0 X 2 3", "0 1 .")
    checked(Compose(assign, MaxActiveWorldSize(2)), "0 X 2 3", "0 1 .")
    checked(Compose(assign, MaxActiveWorldSize(2)), "0 1 2 3", "0 1 . .")
    checked(Compose(FirstTwo(), assign), "0 X 2 3", "0 1 .")


def backwards(ctx: RankAssignmentCtx) -> None:
    ctx.state.rank = ctx.state.world_size - 1 - ctx.state.rank


def older_backwards(state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:
    return dataclasses.replace(state, rank=state.world_size - 1 - state.rank), terminated_ranks


def leader_last(ctx: RankAssignmentCtx) -> None:
    """Says by itself who is active: rank 0 alone, which gets the last rank."""
    state, leads = ctx.state, ctx.state.rank == 0
    state.rank = (state.rank - 1) % state.world_size
    state.mode, state.active_rank = (Mode.ACTIVE, 0) if leads else (Mode.INACTIVE, None)
    state.active_world_size = 1


@pytest.mark.parametrize("turn", [backwards, older_backwards])
@pytest.mark.parametrize(
    ("parts", "before", "after"),
    [
        ((ShiftRanks(),), "0 X 2 3", "3 2 0"),
        ((MaxActiveWorldSize(2), ShiftRanks()), "0 X 2 3", "3 2 .0"),
        ((MaxActiveWorldSize(2), ActivateAllRanks()), "0 1 2", "2 1 .0"),
        ((older.MaxActiveWorldSize(2), ShiftRanks()), "0 1 2", "2 1 .0"),
        ((backwards, ShiftRanks()), "0 1 2", "0 1 2"),
    ],
)
def test_a_users_part_renumbers_ranks_that_are_active_already(
    turn: object, parts: tuple[Any, ...], before: str, after: str
) -> None:
    check(Compose(turn, *parts), before, after)
    filters = [part for part in parts if "MaxActive" in type(part).__name__]
    check(Compose(*filters, turn, *(part for part in parts if part not in filters)), before, after)


def test_a_users_part_that_says_who_is_active() -> None:
    states = [adapt_rank_assignment(Compose(leader_last, ShiftRanks()))(ctx_of(rank, 3)).state for rank in range(3)]
    assert [(state.rank, state.active_rank) for state in states] == [(2, 0), (0, None), (1, None)]


def test_a_users_filter_stands_alone() -> None:
    for rank, active_rank in enumerate((0, 1, None)):
        ctx = adapt_rank_assignment(FirstTwo())(RankAssignmentCtx(State(rank, 3), None, set()))
        assert (ctx.state.active_rank, ctx.state.active_world_size) == (active_rank, 2)
    check(ShiftRanks(), "0 X 2 3", "0 2 .3", older_filter)


class Half(RankFilter):
    """A user's filter with a `limit`."""

    def limit(self, active_world_size: int) -> int:
        return active_world_size // 2


FORESEEN = {
    "shift": (ShiftRanks(), None, [0, 1, 2, 3, 4, 5]),
    "at most 3": (Compose(FillGaps(), MaxActiveWorldSize(3)), None, [0, 1, 2, 3, 3, 3]),
    "the same, the other way round": (Compose(MaxActiveWorldSize(3), ShiftRanks()), None, [0, 1, 2, 3, 3, 3]),
    "even": (ActiveWorldSizeDivisibleBy(2), None, [0, 0, 2, 2, 4, 4]),
    "as a filter": (ShiftRanks(), Compose(ActiveWorldSizeDivisibleBy(2), MaxActiveWorldSize(3)), [0, 0, 2, 2, 2, 2]),
    "a user's limit": (Compose(Half(), ShiftRanks()), None, [0, 0, 1, 1, 2, 2]),
    "no limit any more": (Compose(ActivateAllRanks(), MaxActiveWorldSize(1)), None, [0, 1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize(("assignment", "rank_filter", "sizes"), FORESEEN.values(), ids=FORESEEN)
def test_how_many_will_be_active(assignment: Any, rank_filter: Any, sizes: list[int]) -> None:
    adapted = adapt_rank_assignment(assignment, rank_filter)
    assert [adapted.active_of(size) for size in range(1, 6)] == sizes[1:]
    assert [adapted.gains(size, size + 1) for size in range(1, 5)] == [
        after > before for before, after in itertools.pairwise(sizes[1:])
    ]


class ShiftsAndMore(ShiftRanks):
    """A user's own, which may look at anything."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:  # type: ignore[override]
        raise AssertionError("nobody asks it before its time")


@pytest.mark.parametrize(
    "assignment",
    [
        ShiftsAndMore(),
        FirstTwo(),
        Compose(MaxActiveWorldSize(1), ShiftsAndMore()),
        Tree([Layer(max_ranks=1)]),
        lambda ctx: ctx,
    ],
)
def test_what_looks_at_more_than_the_number_is_not_asked_before(assignment: Any) -> None:
    older_filter = older.MaxActiveWorldSize(1)
    for adapted in (adapt_rank_assignment(assignment), adapt_rank_assignment(ShiftRanks(), older_filter)):
        assert adapted.active_of(3) is None
        assert adapted.gains(3, 4)


def test_a_limit_that_fails_hides_nobody() -> None:
    class Fails(RankFilter):
        def limit(self, active_world_size: int) -> int:
            raise ValueError("in the assignment it is told")

    assert adapt_rank_assignment(Fails()).gains(3, 4)


def test_a_filter_without_a_limit() -> None:
    class Nothing(RankFilter):
        pass

    with pytest.raises(NotImplementedError, match=r"Nothing must define limit"):
        Nothing()(ctx_of(0, 1))


def test_a_part_that_terminates_its_own_rank_discards_it() -> None:
    """The next one, which does not look at that, is not asked."""
    newer = Compose(lambda ctx: pytest.fail("asked"), lambda ctx: setattr(ctx, "terminated_ranks", {1}))
    two = Compose(lambda ctx: pytest.fail("asked"), lambda state, terminated_ranks: (state, {1}))
    for assign in (newer, two):
        with pytest.raises(RankDiscarded, match="rank 1"):
            adapt_rank_assignment(assign)(ctx_of(1, 3))


def test_the_store_is_taken_back_also_where_an_assignment_raises() -> None:
    def fails(state: State, terminated_ranks: set[int]) -> None:
        assert state.store == "store"
        raise ValueError

    ctx = ctx_of(0, 1, store="store")
    with pytest.raises(ValueError):
        adapt_rank_assignment(fails)(ctx)
    assert ctx.state.store is None


# --- groups without a Wrapper


@pytest.fixture
def hash_store() -> dist.Store:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    return store


PAIRS = FilterGroupedByKey(
    key_or_fn=lambda rank, world_size: f"{rank // 2} of {world_size // 2}", condition=lambda count: count == 2
)


def test_a_filter_in_the_older_form_only_says_who_is_terminated(hash_store: dist.Store) -> None:
    assert FilterGroupedByKey is FilterCountGroupedByKey
    assert in_older_form(PAIRS, "0 1 X 3", hash_store) == [
        (0, 4, {2, 3}),
        (1, 4, {2, 3}),
        (2, 4, {2}),
        (3, 4, {2, 3}),
    ]


def test_one_store_serves_any_number_of_assignments(hash_store: dist.Store) -> None:
    """Of the same ranks and of others, in both forms, one filter after another in one assignment."""
    whole = FilterCountGroupedByKey("all", lambda count: count == 4, timeout=20)
    assign = Compose(ShiftRanks(), whole, PAIRS)
    kept = [(0, 4, set()), (1, 4, set()), None, None, (2, 4, set()), (3, 4, set())]
    for _ in range(3):
        assert in_older_form(assign, "0 1 X 3 4 5", hash_store) == kept
        assert in_older_form(assign, "0 X 2 3 X 5", hash_store) == [None] * 6
        assert in_older_form(assign, "0 1 2 3", hash_store) == [(rank, 4, set()) for rank in range(4)]
        assert in_older_form(PAIRS, "0 1", hash_store) == [(0, 2, set()), (1, 2, set())]

    def newer(rank: int) -> int:
        return Compose(FillGaps(), PAIRS)(ctx_of(rank, 4, store=hash_store)).state.rank

    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(newer, range(4))) == [0, 1, 2, 3]


def test_a_tree_uses_one_store_again(hash_store: dist.Store) -> None:
    """Also for the places of the dead, which are others each time."""
    trees = [Tree([Layer()]) for _ in range(4)]
    states = {rank: State(rank, 4) for rank in range(4)}
    for dead in (set(), {1}, {0}):
        terminated = {states.pop(name).rank for name in dead}
        contexts = [RankAssignmentCtx(state, hash_store, set(terminated)) for state in states.values()]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda tree, ctx: tree(ctx), [trees[name] for name in states], contexts))
    assert {name: state.rank for name, state in states.items()} == {2: 0, 3: 1}


def test_why_a_rank_is_discarded() -> None:
    with pytest.raises(RankDiscarded, match=r"rank 0 is discarded: its group '0 of 0' has 1 healthy"):
        adapt_rank_assignment(PAIRS)(ctx_of(0, 1))


@pytest.mark.parametrize("form", ["newer", "older"])
def test_a_filter_without_a_store(form: str) -> None:
    with pytest.raises(OptionError, match=r"of 2 ranks needs a store: set state\.store"):
        PAIRS(ctx_of(0, 2)) if form == "newer" else PAIRS(State(0, 2), set())


def test_ranks_that_do_not_come(hash_store: dist.Store) -> None:
    late = FilterGroupedByKey("a", bool, timeout=timedelta(milliseconds=5))
    with pytest.raises(OurTimeoutError, match=r"1 of 3 ranks came within timeout=0:00:00\.005"):
        late(State(0, 3, store=hash_store), set())
    with pytest.raises(OptionError, match="timeout='soon'"):
        FilterGroupedByKey("a", bool, timeout="soon")


def test_a_store_that_fails_is_not_late(hash_store: dist.Store) -> None:
    class Gone:
        set, add, calls = hash_store.set, hash_store.add, 0

        def wait(self, *_: object) -> None:
            self.add = self.fail
            raise RuntimeError("the wait")

        def fail(self, *_: object) -> int:
            raise RuntimeError("the store")

    with pytest.raises(RuntimeError, match="the store"):
        FilterGroupedByKey("a", bool, timeout=1)(State(0, 2, store=Gone()), set())


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (lambda state: state.rank, "'1'"),
        (lambda state, extra=7: extra, "'7'"),
        (lambda rank, world_size: rank + world_size, "'4'"),
        (lambda *args: len(args), "'1'"),
        (PAIRS.key_or_fn, "'0 of 1'"),
        (str, '"FrozenState(rank=1'),
        ("a", "'a'"),
    ],
)
def test_keys_of_both_generations(key: object, expected: str) -> None:
    reason = FilterGroupedByKey(key, lambda count: False)(ctx_of(1, 3, {0, 2})).reason
    assert f"group {expected}" in reason
