"""What ranks do while a restart is measured: a small training, as programs write it, in a process with many objects.

The heap is what a program has before it trains: a tokenizer's tables, a dataset's index, what its imports made.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

HEADS = 8
#: objects of the heap that Python's garbage collector looks at
OBJECTS = 1_000_000
#: the model, by device: 0.8 million parameters, or 27 million, and what it is given in a step
SIZES = {
    "cpu": {"words": 512, "width": 128, "layers": 4, "batch": 2, "length": 32},
    "cuda": {"words": 8192, "width": 512, "layers": 6, "batch": 16, "length": 256},
}
#: batches that the loader has
BATCHES = 64


class Transformer(torch.nn.Module):
    """Predicts the next word, as language models do."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True)
        self.embed = torch.nn.Embedding(words, width)
        self.body = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=words.device)
        found: torch.Tensor = self.head(self.body(self.embed(words), mask=mask, is_causal=True))
        return found


def heap(objects: int = OBJECTS) -> list[list[int]]:
    """So many objects, for the caller to keep."""
    return [[number] for number in range(objects)]


class Packed:
    """Bytes that a loader's worker unpacks for some milliseconds, as it does with pictures."""

    def __init__(self, size: int) -> None:
        noise = torch.randint(0, 16, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        self._packed = zlib.compress(noise.numpy().tobytes(), 6)

    def unpack(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(zlib.decompress(self._packed)), dtype=torch.uint8)


class Training:
    """A model in DistributedDataParallel, its optimizer, and a loader. Make it when the process group is there."""

    def __init__(self, device: torch.device) -> None:
        sizes = SIZES[device.type]
        torch.manual_seed(0)
        model = Transformer(sizes["words"], sizes["width"], sizes["layers"]).to(device)
        self._model = DistributedDataParallel(model)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        words = torch.randint(sizes["words"], (BATCHES * sizes["batch"] * dist.get_world_size(), sizes["length"] + 1))
        data = TensorDataset(words)
        self._loader: DataLoader[Any] = DataLoader(data, sizes["batch"], sampler=DistributedSampler(data))
        self._device = device

    def batches(self) -> Iterator[torch.Tensor]:
        """Of one epoch, on the device."""
        for (words,) in self._loader:
            yield words.to(self._device)

    def loss(self, words: torch.Tensor) -> torch.Tensor:
        """The forward pass."""
        found = self._model(words[:, :-1])
        return torch.nn.functional.cross_entropy(found.flatten(0, 1), words[:, 1:].flatten())

    def learn(self, loss: torch.Tensor) -> None:
        """The backward pass, whose all-reduces meet those of the other ranks, and the optimizer's step."""
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
