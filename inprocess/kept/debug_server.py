"""torch's debug server is one per process: started in the function, it was "already started" in the next iteration.

It also answers for the rank of the iteration in which it was started, under an address in that iteration's store. So
it ends with the iteration, on every rank: ``stop_debug_server()`` does that on rank 0 alone, and raises on the others.
One that was started before the first call stays. Tried with torch 2.13.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["MODULE", "enter", "reset"]

MODULE = "torch.distributed.debug"

#: that of before the iteration, which is not its own
_before: Any = None


def enter() -> None:
    """An iteration begins."""
    global _before
    _before = getattr(sys.modules.get(MODULE), "_WORKER_SERVER", None)


def reset() -> None:
    """Of the main thread."""
    module: Any = sys.modules[MODULE]
    if module._WORKER_SERVER is _before:
        return
    server, module._WORKER_SERVER = module._WORKER_SERVER, None
    page, module._DEBUG_SERVER_PROC = module._DEBUG_SERVER_PROC, None
    if page is not None:
        page.kill()  # it has the handlers for signals of the process that it was forked from
        page.join()
    if server is not None:  # the function has ended it itself
        server.shutdown()
