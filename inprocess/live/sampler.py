"""Which samples a step takes, over restarts, epochs and changes of the world size."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from inprocess.exception import LiveStateError, OptionError
from inprocess.live.randoms import derive_seed

__all__ = ["ElasticSampler", "place"]


class ElasticSampler(Sampler[list[int]]):
    """Batches of indices that go on where they were, whoever takes part. For ``DataLoader(batch_sampler=...)``.

    ::

        sampler = inprocess.ElasticSampler(len(dataset), batch_size=16)
        live = inprocess.LiveState(model=model, optim=optim, sampler=sampler)
        ...
        step = live.recover(call)
        loader = DataLoader(dataset, batch_sampler=sampler, generator=torch.Generator())
        for step, batch in enumerate(loader, step):
            ...
            with live.commit(step + 1):
                optim.step()
                sampler.advance()

    The samples of all epochs are one endless row, each epoch in another order. A step takes the next ``batch_size`` of
    it for each rank. So nothing is dropped or padded at the end of an epoch, each epoch has each sample once, and all
    that is to be kept is one number, which means the same for any world size.

    A loader takes batches in advance; only what was committed counts. Iterating begins at `position`, with the ranks
    that there are then.

    Args:
        size: of the dataset.
        batch_size: of one rank; may be another one after a restart.
        shuffle: whether each epoch has an order of its own, that follows from ``seed``. It takes 8 bytes per sample.
        seed: the same on all ranks.
    """

    def __init__(self, size: int, batch_size: int, *, shuffle: bool = True, seed: int = 0) -> None:
        if size < 1 or batch_size < 1:
            raise OptionError(f"size={size} and batch_size={batch_size} must be at least 1")
        self.size, self.batch_size, self.shuffle, self.seed = size, batch_size, shuffle, seed
        #: how many samples all ranks have used, in all epochs
        self.position = 0
        self._order = functools.lru_cache(maxsize=2)(self._make_order)

    @property
    def epoch(self) -> int:
        """That of the next sample, from 0."""
        return self.position // self.size

    def __iter__(self) -> Iterator[list[int]]:
        rank, world_size = place()
        begin = self.position + rank * self.batch_size
        while True:
            yield [self._at(position) for position in range(begin, begin + self.batch_size)]
            begin += world_size * self.batch_size

    def advance(self) -> None:
        """A step of all ranks has used its samples. Belongs inside ``commit``."""
        self.position += place()[1] * self.batch_size

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "size": self.size, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Raises LiveStateError for that of another dataset or seed: the position would mean other samples."""
        if (state["size"], state["seed"]) != (self.size, self.seed):
            raise LiveStateError(
                f"the sampler was one of size={state['size']}, seed={state['seed']}, and is one of size={self.size}, "
                f"seed={self.seed} here: its position means other samples"
            )
        self.position = state["position"]

    def _at(self, position: int) -> int:
        epoch, index = divmod(position, self.size)
        return int(self._order(epoch)[index]) if self.shuffle else index

    def _make_order(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch) >> 1)
        return torch.randperm(self.size, generator=generator)


def place() -> tuple[int, int]:
    """Rank and world size."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
