"""Rank assignments as in nvidia-resiliency-ext 0.2, in real processes: called directly, and under a Wrapper."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from inprocess import Compose
from inprocess.rank_assignment import FillGaps, FilterGroupedByKey, RankAssignment, RankDiscarded, ShiftRanks
from inprocess.state import State
from inprocess.store import FileStore, TCPStore
from tests.harness import At, Kill
from tests.harness.child import Context
from tests.harness.launch import PATIENT

from . import checks, targets

DEAD = 3
PAIRS = FilterGroupedByKey(
    key_or_fn=lambda rank, world_size: f"pair {rank // 2} of {world_size // 2}", condition=lambda count: count == 2
)


def assign_directly(context: Context) -> Any:
    """As a program of that generation, without a Wrapper; one rank is dead and does nothing."""
    state = State()
    if state.rank == DEAD:
        return None
    file = context.args["file"]
    state.store = store = FileStore(file) if file else TCPStore()
    _, terminated = PAIRS(state, {DEAD})
    try:
        state, left = Compose(FillGaps(), PAIRS)(state, {DEAD})
        place = [state.rank, state.world_size, sorted(left)]
    except RankDiscarded:
        place = None
    if store.add("done", 1) == state.initial_world_size - 1:
        store.set("all done", "")
    if state.initial_rank == 0 and not file:
        store.get("all done")  # it serves the store
    return [sorted(terminated), place]


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_without_a_wrapper(launch, kind, tmp_path):
    """0 1 2 X 4 5: rank 2 has lost its pair, so ranks 4 and 5 fill the gaps."""
    file = str(tmp_path / "store") if kind == "file" else ""
    # libuv opens a pipe in the process that serves, for good
    ranks = launch(assign_directly, 6, args={"file": file}, env={"USE_LIBUV": "0"}).wait()
    places = [[0, 4, []], [1, 4, []], None, None, [2, 4, []], [3, 4, []]]
    assert ranks.values == [None if rank == DEAD else [[2, 3], place] for rank, place in enumerate(places)]


class OwnShift(ShiftRanks):
    """On top of ours; talks over the iteration's store."""

    def __call__(self, state, terminated_ranks):
        state.store.set(f"asked {state.rank}", str(os.getpid()))
        return super().__call__(state, terminated_ranks)


class OwnBase(RankAssignment):
    def __call__(self, state, terminated_ranks):
        assert state.store.add("asked", 1) > 0
        if state.rank in terminated_ranks:
            raise RankDiscarded("mine")
        state.rank -= sum(rank < state.rank for rank in terminated_ranks)
        state.world_size -= len(terminated_ranks)
        return state, set()


class OwnNewer(ShiftRanks):
    def __call__(self, ctx):
        assert ctx.store.add("asked", 1) > 0
        return super().__call__(ctx)


OWN = {"of ours": OwnShift, "of the base class": OwnBase, "newer": OwnNewer}


def whole_pairs(context: Context) -> dict[str, Any]:
    return {**PATIENT, "rank_assignment": Compose(OWN[context.args["own"]](), PAIRS)}


@pytest.mark.parametrize("own", OWN)
def test_under_a_wrapper(launch, own):
    faults = {At(3, step=1): Kill()}
    ranks = launch(targets.run_train, 4, faults=faults, args={"own": own}, wrapper=whole_pairs).wait()
    checks.failed(ranks, {2: "RankDiscarded"})
    assert ranks[2].message.startswith("rank 2 is discarded: its group 'pair 1 of 2' has 1 healthy ranks")
    assert ranks[3].exitcode == -signal.SIGKILL
    assert [rank.value for rank in ranks[:2]] == [[1, 0, 2], [1, 1, 2]]
