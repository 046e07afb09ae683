"""accelerate and transformers take the process with LOCAL_RANK 0 for the first of its host, which may have died.

LOCAL_RANK must stay as it is, since they take it for the number of the GPU as well. So what they ask about the first
process of a host is answered by ``INPROCESS_LOCAL_RANK`` while a call lasts. Tried with accelerate 1.15, transformers
5.24.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from inprocess.system import environment

__all__ = ["MODULES", "enter"]

#: module -> class, property, and what it answers for a local rank
MODULES: dict[str, tuple[str, str, Callable[[int], object]]] = {
    "accelerate.state": ("PartialState", "is_local_main_process", lambda local_rank: local_rank == 0),
    "transformers.training_args": ("TrainingArguments", "local_process_index", int),
}


def enter(name: str) -> None:
    """Put a function of ours around the module's property, once."""
    owner, attribute, answer = MODULES[name]
    kind = getattr(sys.modules[name], owner)
    theirs = vars(kind)[attribute].fget
    if not isinstance(theirs, functools.partial):
        setattr(kind, attribute, property(functools.partial(_ask, theirs, answer)))


def _ask(theirs: Callable[[Any], object], answer: Callable[[int], object], owner: Any) -> object:
    local_rank = environment.local_rank()
    if local_rank is None or getattr(owner, "distributed_type", "") == "MEGATRON_LM":  # there it is the last process
        return theirs(owner)
    return answer(local_rank)
