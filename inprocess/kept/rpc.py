"""torch.distributed.rpc keeps its agent per process, and numbers what the ranks do together.

A second ``init_rpc()`` raised "RPC is already initialized". The numbers, of agents and of gatherings among all, are in
the keys and messages of the ranks. They differ where a process replaces another one, or was interrupted between: then
the ranks waited for each other in ``init_rpc()``. Tried with torch 2.13.

What stays is the number of this worker, in C++: a process whose rank changes cannot initialize it again.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["MODULE", "reset"]

MODULE = "torch.distributed.rpc"


def reset() -> None:
    """As in a process that has just begun. Without the others: the calls that are under way fail."""
    rpc: Any = sys.modules[MODULE]
    if not hasattr(rpc, "api"):  # built without it
        return
    if rpc.api._is_current_rpc_agent_set():
        rpc.shutdown(graceful=False)
    rpc._init_counter = 0
    rpc.api._all_gather_sequence_id.clear()
    rpc.api._all_gather_sequence_id_to_states.clear()
