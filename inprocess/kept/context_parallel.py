"""torch's context parallelism keeps each replacement that it ever made for attention, with its device mesh.

So each iteration's groups stayed, with a thread and five descriptors. Where the way out of ``context_parallel()`` is
interrupted, the replacement itself stays. Tried with torch 2.13.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.nn.functional as F

__all__ = ["MODULE", "reset"]

MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"


def reset() -> None:
    """As in a process that has just begun."""
    module: Any = sys.modules[MODULE]
    module._restore_function(F.scaled_dot_product_attention, F)
    module._replaced_functions.clear()
