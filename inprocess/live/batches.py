"""Copies of batches: what the program does to the one that it was given must not show in the one that it gets again.

Only what is certainly copied whole: dense tensors of the host in plain containers. Whatever else a batch has makes it
one that is loaded again, not copied.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["NotCopied", "copied", "duplicate"]

#: values in a batch; each takes a microsecond or two of the interpreter, beside the training
LIMIT = 1000
_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes)


class NotCopied(Exception):
    """There is something in it of which nobody knows how to copy it."""


@dataclass(frozen=True)
class _Pinned:
    """Stands in a copy for a tensor in pinned memory, and is not pinned itself."""

    tensor: torch.Tensor


def copied(batch: Any) -> Any:
    """To keep. In any thread; large tensors do not hold the interpreter.

    Raises:
        NotCopied: not everything in it is of a kind that is copied, or there are too many values.
    """
    return _walk(batch, _copy, [LIMIT])


def duplicate(copy: Any) -> Any:
    """A batch of what `copied` has made, to be given away."""
    return _walk(copy, _give, [LIMIT])


def _walk(value: Any, leaf: Any, left: list[int]) -> Any:
    left[0] -= 1
    if left[0] < 0:
        raise NotCopied
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is dict:
        return {key: _walk(each, leaf, left) for key, each in value.items()}
    if kind in (list, tuple):
        return kind(_walk(each, leaf, left) for each in value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):  # a named one
        return kind(*(_walk(each, leaf, left) for each in value))
    return leaf(value)


def _copy(value: Any) -> Any:
    is_plain = type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided
    if not is_plain or value.requires_grad or not (value.is_contiguous() or _is_channels_last(value)):
        raise NotCopied
    made = torch.empty_like(value, pin_memory=False)
    # not copy_(): for a large tensor each thread that calls that starts threads of its own
    ctypes.memmove(made.data_ptr(), value.data_ptr(), value.nbytes)
    return _Pinned(made) if value.is_pinned() else made


def _give(value: Any) -> Any:
    return value.tensor.pin_memory() if isinstance(value, _Pinned) else value.clone()


def _is_channels_last(value: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return value.ndim in formats and value.is_contiguous(memory_format=formats[value.ndim])
