"""``torch.distributed.checkpoint`` also saves asynchronously in a thread, which asks for the default group each time.

After a restart that would be the group of the next iteration: a thread that was still writing took part in collectives
there that no other rank expected. So its save is cut off from all groups: it fails, as the save's future does, and the
metadata, which is written last, is not. It is waited for, since it may write to a file that the next save writes, too;
a disk may take longer than that. Tried with torch 2.13.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from inprocess.system.interpreter import repeat_with_progress, running_frames

__all__ = ["MODULE", "reset"]

MODULE = "torch.distributed.checkpoint._async_thread_executor"
#: seconds for a thread to end
LIMIT_S = 5.0
PAUSE_S = 0.005


def reset() -> None:
    """Cut off each save that is under way, and wait for its end. Raises TimeoutError."""
    if threads := repeat_with_progress(_cut_off, LIMIT_S, PAUSE_S):
        raise TimeoutError(
            f"after {LIMIT_S:g} s {len(threads)} threads of torch's are still writing a checkpoint, which will not be "
            "whole; save the next one under another name"
        )


def _cut_off() -> set[int]:
    """The threads that save. The groups of those that have just begun are not there yet: ask again."""
    frames: dict[int, list[FrameType]] = {}
    for thread, frame in running_frames():
        frames.setdefault(thread, []).append(frame)
    frames.pop(threading.get_ident(), None)
    entry = sys.modules[MODULE].save_wrapper.__code__
    saving = {thread: stack for thread, stack in frames.items() if any(frame.f_code is entry for frame in stack)}
    kind: Any = sys.modules["torch.distributed.checkpoint.utils"]._DistWrapper
    for stack in saving.values():
        for frame in stack:
            for value in frame.f_locals.values():
                if isinstance(value, kind):
                    value.group = _NO_GROUP
    return set(saving)


#: whatever is asked of it is an error; None would stand for the default group
_NO_GROUP = object()
