"""No sample is lost or seen twice in an epoch, whatever the world does; proved by counting."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from inprocess import ElasticSampler, LiveState
from inprocess.exception import LiveStateError, OptionError
from inprocess.live import sampler as module


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[rank, world size], to be changed."""
    place = [0, 1]
    monkeypatch.setattr(module, "place", lambda: tuple(place))
    return place


#: world size, batch size, steps that are committed, batches that loaders take in advance
runs = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 6), st.integers(0, 3)), max_size=6)


@given(st.integers(1, 20), runs)
def test_each_epoch_has_each_sample_once(size: int, runs: list[tuple[int, int, int, int]]) -> None:
    used: list[int] = []
    state = {"position": 0, "size": size, "seed": 5}
    with pytest.MonkeyPatch.context() as patch:
        for world_size, batch, steps, ahead in runs:
            ranks = [ElasticSampler(size, batch, seed=5) for _ in range(world_size)]
            taken = []
            for rank, sampler in enumerate(ranks):
                patch.setattr(module, "place", lambda rank=rank, world_size=world_size: (rank, world_size))
                sampler.load_state_dict(state)
                taken.append(list(itertools.islice(sampler, steps + ahead)))
                for _ in range(steps):
                    sampler.advance()
            used += [index for step in range(steps) for rank in taken for index in rank[step]]
            (position,) = {sampler.position for sampler in ranks}
            assert position == len(used)
            state = ranks[-1].state_dict()
    whole, rest = divmod(len(used), size)
    for epoch in range(whole):
        assert sorted(used[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert max(Counter(used[whole * size :]).values(), default=1) == 1
    assert len(set(used[whole * size :])) == rest


def test_each_epoch_has_another_order() -> None:
    taken = list(itertools.islice(ElasticSampler(50, 50), 3))
    assert len({tuple(batch) for batch in taken}) == 3
    assert taken == list(itertools.islice(ElasticSampler(50, 50), 3))
    assert taken != list(itertools.islice(ElasticSampler(50, 50, seed=1), 3))


def test_in_order() -> None:
    assert list(itertools.islice(ElasticSampler(5, 3, shuffle=False), 3)) == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_ranks_take_turns(world: list[int]) -> None:
    world[:] = [1, 3]
    sampler = ElasticSampler(100, 2, shuffle=False)
    assert list(itertools.islice(sampler, 2)) == [[2, 3], [8, 9]]
    sampler.advance()
    assert (sampler.position, sampler.epoch) == (6, 0)


def test_with_a_loader_and_a_live_state() -> None:
    """A loader has taken more than was committed when it is cut off."""
    data = TensorDataset(torch.arange(10))
    sampler = ElasticSampler(10, 3, shuffle=False)
    live = LiveState(sampler=sampler)
    live.recover()
    loader = iter(DataLoader(data, batch_sampler=sampler, generator=torch.Generator()))
    seen = [next(loader)[0].tolist() for _ in range(3)]
    for step in (1, 2):
        with live.commit(step):
            sampler.advance()
    sampler.advance()  # a step that comes to nothing
    assert live.recover() == 2
    loader = iter(DataLoader(data, batch_sampler=sampler, generator=torch.Generator()))
    assert next(loader)[0].tolist() == seen[2]


def test_of_another_dataset() -> None:
    with pytest.raises(LiveStateError, match="size=10, seed=0, and is one of size=11"):
        ElasticSampler(11, 1).load_state_dict(ElasticSampler(10, 1).state_dict())


@pytest.mark.parametrize(("size", "batch"), [(0, 1), (1, 0)])
def test_wrong_options_are_named(size: int, batch: int) -> None:
    with pytest.raises(OptionError, match=f"size={size} and batch_size={batch}"):
        ElasticSampler(size, batch)
