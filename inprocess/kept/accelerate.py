"""accelerate keeps rank, world size and device in three objects that all of its classes share.

Without a reset ``Accelerator()`` believes after a restart what was true before it: of three ranks that became two both
believed in three, and where rank 0 had died nobody was the main process. Tried with accelerate 1.15.
"""

from __future__ import annotations

import sys

__all__ = ["MODULE", "reset"]

MODULE = "accelerate.state"


def reset() -> None:
    """What the next ``Accelerator()`` reads from the environment."""
    state = sys.modules[MODULE]
    state.AcceleratorState._reset_state(True)  # with what it has from PartialState
    state.GradientState._reset_state()
