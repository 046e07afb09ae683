"""DeepSpeed's ZeRO 3 numbers the modules and parameters of a process, and stacks up those that are in a forward pass.

The ranks compare these numbers. Those of a process that lives on went on from its last iteration, and those of its
replacement began at 0: each iteration failed. The stack kept every model that there had been. Tried with DeepSpeed
0.19. Its groups are those of `source`.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["MODULE", "reset"]

MODULE = "deepspeed.runtime.zero.parameter_offload"


def reset() -> None:
    """As in a process that has just begun."""
    module: Any = sys.modules[MODULE]
    module.FWD_MODULE_STACK.clear()
    module.Init.param_id = 0
    (count,) = module.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    count[0] = 0
