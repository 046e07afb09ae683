"""From which step all go on, and who gets the state from whom."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inprocess.live.plan import (
    COPIES,
    DRAWN_BITS,
    NOTHING,
    NOWHERE,
    WIDTH,
    Copy,
    Holdings,
    Plan,
    Point,
    Shard,
    Source,
    Where,
    differing,
    newest,
    next_history,
    plan,
    whole_copies,
)

ONE = Shard()


def live(*steps: int) -> list[Holdings]:
    """Ranks with a replicated state; NOTHING: torn."""
    return [Holdings(step=step) for step in steps]


def shards(*held: tuple[int, ...]) -> list[Holdings]:
    """Ranks with a shard each and no copies: the steps of the live states."""
    return [Holdings(Shard(index, len(held)), step) for index, (step,) in enumerate(held)]


def where(found: Plan | None) -> str:
    """The step, and for each rank where its state comes from: ``.`` is its own live state, ``c`` its own copy."""
    if found is None:
        return "nowhere"
    signs = {(True, Where.LIVE): ".", (True, Where.COPY): "c"}
    parts = [
        signs.get((source.rank == rank, source.where)) or f"{source.rank}{'' if source.where is Where.LIVE else 'c'}"
        for rank, source in enumerate(found.sources)
    ]
    return f"{found.step}: {' '.join(parts)}"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((7, 7, 7), "7: . . ."),
        ((7, 7, NOTHING), "7: . . 0"),
        ((7, 8, 7), "8: 1 . 1"),
        ((NOTHING, NOTHING, 8, 7, 8), "8: 2 4 . 2 ."),
        ((NOTHING, NOTHING), "nowhere"),
        ((0, NOTHING), "0: . 0"),
    ],
)
def test_replicated(steps: tuple[int, ...], expected: str) -> None:
    assert where(plan(live(*steps))) == expected


def test_a_copy_where_all_are_torn() -> None:
    haves = [Holdings(copies=(Copy(ONE, 4), Copy(ONE, 6))), Holdings(copies=(Copy(ONE, 4),)), Holdings()]
    assert where(plan(haves)) == "6: c 0c 0c"


def test_a_live_state_rather_than_a_copy() -> None:
    """Both are of one step; the copy may be somewhere else."""
    haves = [Holdings(step=6, copies=(Copy(ONE, 6),)), Holdings(copies=(Copy(ONE, 6),))]
    assert where(plan(haves)) == "6: . c"


def ring(size: int, *, steps: tuple[int, ...], own: tuple[int, ...], kept: tuple[int, ...]) -> list[Holdings]:
    """Ranks with a shard each, two copies of it, and two of that of the rank before."""
    haves = []
    for rank in range(size):
        mine, other = Shard(rank, size), Shard((rank - 1) % size, size)
        copies = (*(Copy(mine, step) for step in own), *(Copy(other, step) for step in kept))
        haves.append(Holdings(mine, steps[rank], copies))
    return haves


def test_sharded_all_at_one_step() -> None:
    assert where(plan(ring(3, steps=(7, 7, 7), own=(4, 6), kept=(4, 6)))) == "7: . . ."


def test_sharded_one_is_a_step_ahead() -> None:
    assert where(plan(ring(3, steps=(7, 8, 7), own=(4, 6), kept=(4, 6)))) == "6: c c c"


def test_sharded_one_is_new() -> None:
    haves = ring(3, steps=(7, NOTHING, 7), own=(4, 6), kept=(4, 6))
    haves[1] = Holdings(Shard(1, 3))
    assert where(plan(haves)) == "6: c 2c c"


def test_sharded_one_is_new_and_its_last_copy_was_under_way() -> None:
    haves = ring(3, steps=(7, NOTHING, 7), own=(4, 6), kept=(4, 6))
    haves[1], haves[2] = Holdings(Shard(1, 3)), Holdings(Shard(2, 3), 7, (*haves[2].copies[:2], Copy(Shard(1, 3), 4)))
    assert where(plan(haves)) == "4: c 2c c"


def test_sharded_two_neighbours_are_new() -> None:
    haves = ring(4, steps=(7, 7, 7, 7), own=(4, 6), kept=(4, 6))
    haves[1], haves[2] = Holdings(Shard(1, 4)), Holdings(Shard(2, 4))
    assert plan(haves) is None


def test_of_other_shards_nothing_can_be_used() -> None:
    """The world is smaller, and each rank needs another part of the whole."""
    haves = [Holdings(Shard(rank, 2), NOTHING, (Copy(Shard(rank, 3), 6),)) for rank in range(2)]
    assert plan(haves) is None
    assert newest(haves) == 6


def test_ranks_that_were_numbered_anew_exchange_what_they_have() -> None:
    haves = [Holdings(Shard(rank, 3), 5, live=Shard((rank + 1) % 3, 3)) for rank in range(3)]
    assert where(plan(haves)) == "5: 2 0 1"


# --- histories ----------------------------------------------------------------------------------------------------

A, B, C = 1, 2, 3


def points(*held: tuple[int, int] | None, count: int = 1) -> list[Holdings]:
    """Ranks with (history, step) in place, of so many shards in turn; None: torn."""
    return [
        Holdings(Shard(rank % count, count), NOTHING if point is None else point[1], history=point[0] if point else 0)
        for rank, point in enumerate(held)
    ]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        # rank 2 was in reserve while ranks 0 and 1 did its step again: the newer history counts
        (((B, 2), (B, 2), (A, 2), None), "B 2: . . 0 1"),
        (((A, 2), (B, 2), (B, 2)), "B 2: 1 . ."),
        # also where it has come further, or the others have
        (((B, 2), (A, 3)), "B 2: . 0"),
        (((B, 4), (A, 3)), "B 4: . 0"),
        # they have continued, and made nothing of it yet: its step was not done again
        (((A, 1), (A, 1), (A, 2)), "A 2: 2 2 ."),
        # the newer history is lost with its ranks: what the one from the reserve has is the newest
        ((None, (A, 2), (A, 1)), "A 2: 1 . 1"),
        # a rank that was cut off in `recover`, and one that got its state there
        (((A, 10), (A, 10)), "A 10: . ."),
        # in reserve for several iterations; the first iteration; a job where nobody has anything
        (((C, 7), (A, 6), (B, 6), (C, 6)), "C 7: . 0 0 0"),
        (((A, 0), (A, 0), None), "A 0: . . 0"),
        ((None, None), "nowhere"),
    ],
)
def test_two_histories(held: tuple[tuple[int, int] | None, ...], expected: str) -> None:
    found = plan(points(*held))
    assert (f"{' ABC'[found.history]} " if found else "") + where(found) == expected


def test_shards_of_two_histories_are_not_matched() -> None:
    """Rank 2, with the first shard, was in reserve; rank 1 has done step 23 with other ranks. All have copies of 20."""
    held = points((A, 22), (B, 23), (A, 23), None, count=2)
    haves = [Holdings(each.shard, each.step, (Copy(each.shard, 20, A),), True, history=each.history) for each in held]
    found = plan(haves)
    assert where(found) == "20: c c c c"
    assert found is not None and found.history == A


def test_copies_of_two_histories_are_not_matched() -> None:
    """Those that a rank brings back from the reserve, of its own shard and of another one."""
    one, two = Shard(0, 2), Shard(1, 2)
    old = (Copy(one, 6, A), Copy(two, 6, A), Copy(one, 4, A), Copy(two, 4, A))
    new = Holdings(two, NOTHING, (Copy(two, 6, B), Copy(two, 4, A)))
    found = plan([Holdings(one, NOTHING, (Copy(one, 4, A),)), new])
    assert (where(found), found and found.history) == ("4: c c", A)
    found = plan([Holdings(one, NOTHING, old), new])
    assert (where(found), found and found.history) == ("6: c 0c", A)
    found = plan([Holdings(one, 6, old, history=B), new])
    assert (where(found), found and found.history) == ("6: . c", B)


def test_a_new_history_is_newer_than_all_that_its_ranks_know() -> None:
    old = next_history(0, 1, drawn=5)
    assert max(next_history(old, 1, drawn=0), next_history(0, 1, drawn=7)) > old
    assert next_history(old, 3, drawn=0) > next_history(old, 2, drawn=(1 << DRAWN_BITS) - 1)
    assert next_history(old, 1, drawn=1) != next_history(old, 1, drawn=2)  # of ranks that know nothing of each other
    assert next_history(old, 1 << 30, drawn=0) < 1 << 63


def test_whole_copies_are_of_one_history_and_of_the_way_to_the_step() -> None:
    one, two = Shard(0, 2), Shard(1, 2)
    haves = [
        Holdings(one, 6, (Copy(one, 2, A), Copy(one, 4, B), Copy(one, 8, A), Copy(one, 2, C)), history=B),
        Holdings(two, 6, (Copy(two, 2, A), Copy(two, 4, A), Copy(two, 8, A), Copy(two, 2, C)), history=B),
    ]
    assert whole_copies(haves, Point(B, 6)) == Point(A, 2)
    assert whole_copies(haves, Point(C, 6)) == Point(C, 2)
    assert whole_copies(haves, Point(A, 1)) == NOWHERE


def test_nobody_sends_everything() -> None:
    found = plan(live(*[5] * 4, *[NOTHING] * 12))
    assert found is not None
    assert set(Counter(source.rank for source in found.sources[4:]).values()) == {3}


def test_transfers_are_in_one_order() -> None:
    found = Plan(3, (Source(0, Where.LIVE), Source(0, Where.LIVE), Source(3, Where.COPY), Source(3, Where.LIVE)))
    assert found.transfers() == [(0, 1), (3, 2)]


steps, histories = st.integers(NOTHING, 4), st.integers(0, 2)
copies = st.builds(Copy, st.builds(Shard, st.integers(0, 2), st.just(3)), st.integers(0, 4), histories)


@st.composite
def jobs(draw: st.DrawFn) -> list[Holdings]:
    size = draw(st.integers(1, 6))
    return [
        Holdings(
            Shard(rank % 3, 3),
            draw(steps),
            tuple(draw(st.lists(copies, max_size=COPIES))),
            draw(st.booleans()),
            draw(st.sampled_from([None, Shard((rank + 1) % 3, 3), Shard(0, 2)])),
            draw(histories),
            draw(st.integers(0, 1 << 62)),
        )
        for rank in range(size)
    ]


@given(jobs())
def test_rows(haves: list[Holdings]) -> None:
    rows = [have.row() for have in haves]
    assert {len(row) for row in rows} == {WIDTH}
    assert [Holdings.of(row) for row in rows] == haves


@given(jobs())
def test_whoever_sends_has_it(haves: list[Holdings]) -> None:
    found = plan(haves)
    needed = {have.shard for have in haves}

    def at(point: tuple[int, int]) -> set[Shard]:
        return {copy.shard for have in haves for _, copy in have.holdings() if (copy.history, copy.step) == point}

    whole = [point for point in itertools.product(range(3), range(5)) if needed <= at(point)]
    assert (found.point if found else None) == (max(whole) if whole else None)
    for have, source in zip(haves, found.sources if found else (), strict=False):
        assert found is not None
        assert (source.where, Copy(have.shard, found.step, found.history)) in list(haves[source.rank].holdings())


def test_copies_that_all_ranks_have() -> None:
    """Wherever they are; those of live states do not count: these change."""
    first, second = Shard(0, 2), Shard(1, 2)
    haves = [
        Holdings(first, 6, (Copy(first, 2), Copy(second, 2), Copy(second, 4))),
        Holdings(second, 6, (Copy(second, 2), Copy(first, 4), Copy(second, 6))),
    ]
    found = [whole_copies(haves, Point(0, step)).step for step in (1, 2, 3, 4, 6)]
    assert found == [NOTHING, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("rows", "step"),
    [
        ([[A, 4, 1, A, 5, 2], [A, 4, 1, A, 5, 2]], None),
        ([[A, 4, 1, A, 5, 2], [A, 3, 9, A, 4, 1]], None),
        ([[A, 4, 1, A, 5, 2], [A, 3, 9, A, 4, 8]], 4),
        ([[A, 4, 1, A, 5, 2], [A, 4, 7, A, 5, 8]], 5),
        ([[A, 4, 1, A, 5, 2], [A, 4, 1, B, 5, 8]], None),
        ([[A, 4, 1, A, 5, 2], [0, NOTHING, 0, 0, NOTHING, 0]], None),
    ],
)
def test_parts_that_differ(rows: list[list[int]], step: int | None) -> None:
    """Compared are ranks that have been at the same step of one history; of the shards of a state each has its own."""
    found = differing([Shard(), Shard()], rows)
    assert (found.step if found else None) == step
    assert differing([Shard(0, 2), Shard(1, 2)], rows) is None
