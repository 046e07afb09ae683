"""torch.compile takes the rank and the world size for constants of the code that it compiles.

So compiled code of an iteration in which this process had another rank, or the world another size, computes with the
wrong ones, and so does what a reserve has compiled while it warmed up, in a group of its own. Where both are as before
it is kept: to compile it again takes seconds. Tried with torch 2.13.
"""

from __future__ import annotations

import sys

import torch

__all__ = ["MODULE", "enter"]

MODULE = "torch._dynamo"
#: rank and world size of the iteration before, with which code may have been compiled
_place: tuple[int | None, int] | None = None


def enter(rank: int | None, world_size: int) -> None:
    """Drop compiled code where it was compiled in another place; ``rank`` None: a reserve's."""
    global _place  # one per process, as the compiler's caches are
    before, _place = _place, (rank, world_size)
    if before not in (None, _place) and MODULE in sys.modules:
        torch.compiler.reset()
