"""Random numbers that depend on the step and the rank alone.

So a rank that gets its state from another one, or is a new process, draws what the one before it would have drawn, and
nothing has to be kept or sent for that.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch

_MASK = (1 << 64) - 1


def derive_seed(*numbers: int) -> int:
    """64 bits of all of these (splitmix64: Steele, Lea and Flood, OOPSLA 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed(base: int, step: int, rank: int) -> None:
    """Python's, NumPy's where it is imported, and torch's on the CPU and the current CUDA device."""
    use(derive_seed(base, step, rank))


def use(value: int) -> None:
    """64 bits as the seed of them all."""
    random.seed(value)
    # not torch.manual_seed(): it asks for every kind of device that there could be, which takes 70 us
    for generator in (torch.default_generator, *_current_cuda()):
        generator.manual_seed(value >> 1)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(value & 0xFFFFFFFF)


def _current_cuda() -> tuple[torch.Generator, ...]:
    """That of the current CUDA device, where CUDA is used."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    return (torch.cuda.default_generators[torch.cuda.current_device()],)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """What is drawn inside changes nothing outside."""
    numpy = sys.modules.get("numpy")
    generators = [torch.default_generator, *_current_cuda()]
    python, torchs = random.getstate(), [each.get_state() for each in generators]
    numpys = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        for generator, state in zip(generators, torchs, strict=True):
            generator.set_state(state)
        if numpy is not None:
            numpy.random.set_state(numpys)
