"""``torch.distributed.checkpoint`` saves asynchronously in a process of its own, with a process group of its own.

That is made once, for the world of that moment: after a restart a save would wait in it for ranks that are gone. So it
is ended, with a save that is under way. The metadata of a checkpoint is written last, so one that is cut off is none. A
thread of torch waits for each save; it fails then, as the save's future does. Tried with torch 2.13.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType
from typing import Any

from inprocess.system import clock
from inprocess.system.interpreter import repeat_with_progress, running_frames

__all__ = ["MODULE", "reset"]

MODULE = "torch.distributed.checkpoint._async_process_executor"
#: seconds for a process to end after SIGKILL, and for the thread that waits for it
LIMIT_S = 5.0
PAUSE_S = 0.005


def reset() -> None:
    """End the process, also one that is just being made; the next save makes another one. Raises TimeoutError."""
    module: Any = sys.modules[MODULE]
    until = clock.monotonic() + LIMIT_S
    if repeat_with_progress(lambda: _end_all(module, until), LIMIT_S, PAUSE_S):
        raise TimeoutError(f"after {LIMIT_S:g} s a thread of torch's is still busy with an asynchronous save")


def _end_all(module: Any, until: float) -> bool:
    """End each process there is. Whether a thread is busy with a save: it may be about to make another process."""
    kind, executor = module._AsyncCheckpointProcess, module._ProcessBasedAsyncCheckpointExecutor
    frames = [frame for thread, frame in running_frames() if thread != threading.get_ident()]
    found = [frame.f_locals.get("self") for frame in frames if frame.f_code in _codes(kind)]
    for each in (module._CHECKPOINT_PROCESS, *found):
        if process := getattr(each, "_save_process", None):
            process.kill()
            process.join(max(0.0, until - clock.monotonic()))
    module._CHECKPOINT_PROCESS = None
    return any(frame.f_code is executor._execute_save_impl.__code__ for frame in frames)


def _codes(kind: Any) -> set[CodeType]:
    return {method.__code__ for method in (kind.__init__, kind._wait_for_response, kind.save)}
