"""What a KeptLoader loads, without workers: which batches, their random numbers, and copies of them."""

from __future__ import annotations

import itertools
import random
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
)

from inprocess import ElasticSampler, KeptLoader
from inprocess.exception import OptionError
from inprocess.live import batches, sampler, workers
from inprocess.live.batches import NotCopied, copied, duplicate


class Drawing(Dataset[Any]):
    """Its samples are random numbers, of all three generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(numpy.random.rand()), float(torch.rand(1))


def loaded(loader: KeptLoader, step: int, count: int, **options: Any) -> list[list[Any]]:
    return [[each.tolist() for each in batch] for batch in itertools.islice(loader.from_step(step, **options), count)]


def indices(loader: KeptLoader, step: int, count: int, **options: Any) -> list[list[int]]:
    return [batch[0] for batch in loaded(loader, step, count, **options)]


def distributed() -> BatchSampler:
    return BatchSampler(DistributedSampler(Drawing(), 2, 1, seed=3), 2, drop_last=False)


def test_steps_go_over_epochs() -> None:
    loader = KeptLoader(DataLoader(Drawing(), batch_size=4))
    assert len(loader) == 3
    assert indices(loader, 1, 4) == [[4, 5, 6, 7], [8, 9], [0, 1, 2, 3], [4, 5, 6, 7]]


def test_each_epoch_has_its_order() -> None:
    loader = KeptLoader(DataLoader(Drawing(), batch_sampler=distributed()))
    expected = []
    for epoch in range(3):
        own = distributed()
        own.sampler.set_epoch(epoch)  # type: ignore[union-attr]
        expected += list(own)
    assert indices(loader, 0, 9) == expected
    assert indices(loader, 4, 5) == expected[4:]
    assert expected[:3] != expected[3:6]


def test_a_sampler_without_a_length_begins_where_it_stands() -> None:
    order = ElasticSampler(10, 4, shuffle=False)
    loader = KeptLoader(DataLoader(Drawing(), batch_sampler=order))
    order.position = 8
    assert indices(loader, 2, 2) == [[8, 9, 0, 1], [2, 3, 4, 5]]
    with pytest.raises(TypeError, match="len"):
        len(loader)


def test_a_sampler_of_this_iteration() -> None:
    loader = KeptLoader(DataLoader(Drawing(), batch_size=4))
    assert indices(loader, 1, 2, batch_sampler=[[5], [7, 3]]) == [[7, 3], [5]]


def test_random_numbers_follow_from_the_step() -> None:
    loader = KeptLoader(DataLoader(Drawing(), batch_size=2))
    whole = loaded(loader, 0, 6)
    assert loaded(loader, 4, 2) == whole[4:]
    assert loaded(KeptLoader(DataLoader(Drawing(), batch_size=2), seed=1), 0, 1) != whole[:1]
    assert whole[0][1:] != whole[5][1:]  # the same samples, in the next epoch


def test_random_numbers_follow_from_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = KeptLoader(DataLoader(Drawing(), batch_size=2))
    whole = loaded(loader, 0, 1)
    monkeypatch.setattr(sampler, "place", lambda: (1, 2))
    assert loaded(loader, 0, 1) != whole


def test_those_of_the_program_are_left_alone() -> None:
    before = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist()  # type: ignore[index]
    loaded(KeptLoader(DataLoader(Drawing(), batch_size=2)), 0, 3)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert numpy.random.get_state()[1].tolist() == before[2]  # type: ignore[index]


def test_only_the_last_ones_go_on() -> None:
    loader = KeptLoader(DataLoader(Drawing(), batch_size=2))
    earlier = loader.from_step(0)
    later = loader.from_step(0)
    next(later)
    with pytest.raises(RuntimeError, match="of an earlier from_step"):
        next(earlier)


class Stream(IterableDataset[int]):
    """Without indices."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("loader", "what"),
    [
        (DataLoader(Drawing(), shuffle=True), "RandomSampler draws another order each time.*ElasticSampler"),
        (DataLoader(Drawing(), sampler=SubsetRandomSampler([1, 2])), "SubsetRandomSampler draws"),
        (DataLoader(Drawing(), batch_size=None), "batch_size=None"),
        (DataLoader(Stream()), "an IterableDataset"),
    ],
)
def test_what_cannot_be_moved_to_a_step(loader: DataLoader[Any], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        KeptLoader(loader)


def test_options() -> None:
    loader = KeptLoader(DataLoader(Drawing()))
    with pytest.raises(OptionError, match=r"from_step\(-1\)"):
        loader.from_step(-1)
    with pytest.raises(OptionError, match="RandomSampler draws"):
        loader.from_step(0, DataLoader(Drawing(), shuffle=True).batch_sampler)
    with pytest.raises(OptionError, match="list has no batches"):
        loader.from_step(0, [])
    with pytest.raises(OptionError, match="repeats=-1"):
        KeptLoader(DataLoader(Drawing()), repeats=-1)


class Lying(BatchSampler):
    """It has fewer batches than it says."""

    def __len__(self) -> int:
        return 7


def test_a_length_that_is_not_true() -> None:
    loader = KeptLoader(DataLoader(Drawing(), batch_sampler=Lying(SequentialSampler(Drawing()), 5, False)))
    with pytest.raises(RuntimeError, match="Lying had 2 batches in epoch 0, and its length is 7"):
        loaded(loader, 0, 3)


def test_a_sampler_that_ends() -> None:
    loader = KeptLoader(DataLoader(Drawing()))
    with pytest.raises(RuntimeError, match="has no length, and has ended"):
        loaded(loader, 0, 2, batch_sampler=iter([[1]]))


def test_a_share_that_is_not_that_of_the_rank_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "place", lambda: (1, 2))
    loader = KeptLoader(DataLoader(Drawing(), batch_sampler=distributed()))
    loader.from_step(0)
    monkeypatch.setattr(sampler, "place", lambda: (0, 1))
    with pytest.raises(OptionError, match="made for rank 1 of 2, and this is rank 0 of 1"):
        loader.from_step(0)
    assert indices(loader, 0, 1, batch_sampler=distributed()) == [next(iter(distributed()))]


# --- copies -------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["a", "b"])


def test_a_copy_is_a_batch_of_its_own() -> None:
    images = torch.arange(240.0).reshape(2, 3, 8, 5).to(memory_format=torch.channels_last)
    batch = {"images": images, "more": [Pair(torch.tensor(3), "text"), (1, None, b"x", torch.ones(0))], 4: True}
    kept = copied(batch)
    given = duplicate(kept)
    batch["images"].zero_()
    batch["more"].clear()
    del batch[4]
    again = duplicate(kept)
    for each in (given, again):
        assert torch.equal(each["images"], torch.arange(240.0).reshape(2, 3, 8, 5))
        assert each["images"].is_contiguous(memory_format=torch.channels_last)
        assert type(each["more"][0]) is Pair
        assert str(each["more"]) == "[Pair(a=tensor(3), b='text'), (1, None, b'x', tensor([]))]"
        assert each[4] is True
        each["images"].zero_()


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(4, 4)[:, :2],
        torch.ones(2, requires_grad=True),
        torch.eye(2).to_sparse(),
        torch.nn.Parameter(torch.ones(1)),
        numpy.ones(2),
        object(),
        set(),
        list(range(batches.LIMIT)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_copied(value: Any) -> None:
    with pytest.raises(NotCopied):
        copied([value])


# --- what a worker does -------------------------------------------------------------------------------------------


class Failing(Dataset[Any]):
    """Raises what it is asked for."""

    def __getitem__(self, index: Exception) -> None:
        raise index


class Odd(Exception):
    """Cannot be made from a text."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("bad"), ValueError),
        (StopIteration("bad"), RuntimeError),
        (Odd(1, 2), RuntimeError),
        (type("Local", (Exception,), {})("bad"), RuntimeError),
    ],
)
def test_what_a_dataset_raises(error: Exception, kind: type[Exception]) -> None:
    work = workers.Work(DataLoader(Failing(), batch_sampler=[]))
    number, batch, failure = work[3, 0, [error]]
    assert (number, batch) == (3, None)
    assert failure is not None
    assert type(failure.error()) is kind
    assert "raise index" in str(failure.error())


class Many(Drawing):
    """Loads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [10 * each for each in indices]


@pytest.mark.parametrize("dataset", [Many(), range(0, 100, 10)])
def test_what_nobody_wants_is_not_loaded(dataset: Any) -> None:
    work = workers.Work(DataLoader(dataset, batch_sampler=[]), torch.tensor([5]))
    assert work[4, 0, [1, 2]] == (4, None, None)
    assert work[5, 0, [1, 2]][1].tolist() == [10, 20]
