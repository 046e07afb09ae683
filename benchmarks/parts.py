"""What `back_to_training` trains, and with what: a small GPT, compiled, AdamW, and texts that are unpacked first."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo  # what imports it later seems to hang
from torch.utils.data import DataLoader, Dataset

import inprocess
from benchmarks.work import SIZES, Packed, Transformer

__all__ = ["Parts"]

SIZE = SIZES["cpu"]
SAMPLES = 10_000
#: bytes that a worker unpacks for a sample
PACKED = 3 * 320 * 320


class Texts(Dataset[Any]):
    """Each is unpacked first."""

    def __init__(self) -> None:
        self._packed = Packed(PACKED)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self._packed.unpack()[: SIZE["length"] + 1].long() + index) % SIZE["words"]


class Parts:
    """All that one process has of it."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # what is compiled for another number is compiled once more
        torch.manual_seed(0)
        self.network = Transformer(SIZE["words"], SIZE["width"], SIZE["layers"])
        self.compiled = torch.compile(self.network)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-4)
        self.sampler = inprocess.ElasticSampler(SAMPLES, SIZE["batch"])

    def loader(self, workers: int) -> DataLoader[Any]:
        return DataLoader(Texts(), batch_sampler=self.sampler, num_workers=workers, generator=torch.Generator())

    def learn(self, model: torch.nn.Module, words: torch.Tensor) -> None:
        """All of a step but the optimizer's."""
        found = model(words[:, :-1])
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(found.flatten(0, 1), words[:, 1:].flatten()).backward()

    def rehearse(self, model: torch.nn.Module) -> None:
        """Two steps but the optimizer's: what the second one finds otherwise is compiled, too."""
        texts = Texts()
        words = torch.stack([texts[index] for index in range(SIZE["batch"])])
        for _ in range(2):
            self.learn(model, words)
        self.optimizer.zero_grad()
