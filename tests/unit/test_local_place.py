"""Which members share a host, and how its active ranks count: what an interrupted writer and a hostile one leave."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest

from inprocess.call.local_place import host_name
from inprocess.call.part import IterationContext
from inprocess.exception import BadMessage
from inprocess.hardware import gpu
from inprocess.protocol import verbs
from inprocess.protocol.keys import MAX_TICKETS
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import Arrival, ArrivalKind, dump
from inprocess.state import State
from tests.sim.engine import SimStore

from .verbs import do

RANKS = {0: 0, 1: 1, 2: None, 3: 2}
"""Member -> active rank; None: a reserve."""


@pytest.fixture
def store() -> SimStore:
    """Members 1, 2 and 3 are on host a, 0 on b. All have arrived in the start round of iteration 5."""
    store = SimStore()
    for member in (3, 0, 2, 1):
        do(store, verbs.register_on_host("a" if member else "b", member))
    for member, active_rank in RANKS.items():
        store.write(f"5/start/{member}", dump(Arrival(ArrivalKind.RANK, member, 4, 3, active_rank)))
    return store


def neighbors(store: SimStore, host: str = "a") -> dict[int, int]:
    return do(store, verbs.find_neighbors(5, host, {}))  # type: ignore[no-any-return]


def place(store: SimStore, member: int, roster: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[int, int]:
    membership = Membership(member, roster, 5, member, 4)
    found = neighbors(store, "a" if member else "b").values()
    own = RANKS[member]
    assert own is not None
    return do(store, verbs.place_on_host(5, membership, found, own, 3))  # type: ignore[no-any-return]


def test_by_rank_and_without_reserves_and_other_hosts(store: SimStore) -> None:
    assert [place(store, member) for member in (0, 1, 3)] == [(0, 1), (0, 2), (1, 2)]


def test_who_is_out_of_the_job_does_not_count(store: SimStore) -> None:
    assert place(store, 3, (0, 2, 3)) == (0, 1)


@pytest.mark.parametrize(
    ("roster", "found", "place"),
    [((0, 1), [1, 2], (0, 1)), ((0, 1, 2), [0, 1, 2, 7], (1, 2))],
    ids=["alone on the host", "all on one host"],
)
def test_nothing_is_read(roster: tuple[int, ...], found: Sequence[int], place: tuple[int, int]) -> None:
    with pytest.raises(StopIteration) as caught:
        next(verbs.place_on_host(5, Membership(1, roster, 5, 1, 3), found, 1, 2))
    assert caught.value.value == place


def test_only_new_ones_are_looked_up(store: SimStore) -> None:
    known = neighbors(store)
    assert known == {1: 3, 2: 2, 3: 1}
    do(store, verbs.register_on_host("a", 9))
    store.write("host/a/1", "not read again")
    assert do(store, verbs.find_neighbors(5, "a", known)) == {**known, 4: 9}


def test_one_that_died_before_it_wrote(store: SimStore) -> None:
    do(store, verbs.register_on_host("a", 7), 2)
    do(store, verbs.register_on_host("a", 8))
    assert neighbors(store) == {1: 3, 2: 2, 3: 1, 5: 8}
    assert place(store, 1) == (0, 2)


@pytest.mark.parametrize(
    ("key", "value"), [("host/a/2", "two"), ("host/a#", "many"), ("host/a#", str(MAX_TICKETS + 1))]
)
def test_a_broken_value_ends_the_job_for_all(store: SimStore, key: str, value: str) -> None:
    store.write(key, value)
    with pytest.raises(BadMessage, match=key):
        neighbors(store)
    assert b"abort" in store.data["5/next"]


def test_a_host_is_a_node_of_the_launcher() -> None:
    here = socket.gethostname()
    assert [host_name({"GROUP_RANK": text}) for text in ("3", " 3 ", "", "x/y")] == [f"{here}.3"] * 2 + [f"{here}."] * 2
    assert host_name({}) == f"{here}."


@pytest.mark.parametrize(
    ("ranks", "local_rank", "several", "told"),
    [
        ((1, 1, 0, 0), None, True, 1),
        ((1, 1), None, True, 0),
        ((1, 0), "1", True, 0),
        ((1, 0), None, False, 0),
    ],
    ids=["once", "the same rank", "LOCAL_RANK", "one GPU, or none in use"],
)
def test_without_a_local_rank_another_rank_may_mean_another_gpu(
    ranks: Sequence[int],
    local_rank: str | None,
    several: bool,
    told: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(gpu, "may_take_another", lambda: several)
    binding = gpu.Binding()
    for rank in ranks:
        state = State(rank, 2)
        state.activate_all_ranks()
        binding.look(IterationContext(state.freeze(), ("127.0.0.1", 1)))
    assert [("was rank 1 and is rank 0" in message) for message in caplog.messages] == [True] * told
