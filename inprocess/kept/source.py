"""Libraries that keep their process groups in variables of a module: these get the values that the source gives them.

`megatron.core.parallel_state` refuses to be initialized twice, and DeepSpeed goes on with groups that are aborted.
Which variables there are changes with each version, so they are read from the module's own source: whatever it sets to
a constant or to an empty list or dict outside of functions, and what is so no more. Tried with megatron-core 0.16 and
DeepSpeed 0.19.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import sys
from typing import Any

__all__ = ["MODULES", "restore"]

MODULES = (
    "deepspeed.comm.comm",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "deepspeed.runtime.pipe.p2p",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp",
    "deepspeed.sequence.layer",
    "deepspeed.utils.groups",
    "megatron.core.num_microbatches_calculator",
    "megatron.core.parallel_state",
    "megatron.core.rerun_state_machine",
    "megatron.core.tensor_parallel.random",
)


def restore(name: str) -> None:
    """Give the variables of a module that was imported their first values."""
    module: Any = sys.modules[name]
    for variable, first in _first_values(name).items():
        if _differs(getattr(module, variable, None), first):
            setattr(module, variable, copy.copy(first))


def _differs(value: Any, first: Any) -> bool:
    """Not by comparing them: a process group has no use for that, and a tensor answers with a tensor."""
    if isinstance(first, list | dict):
        return type(value) is not type(first) or bool(value)
    return value is not first and not (type(value) is type(first) and value == first)


@functools.cache
def _first_values(name: str) -> dict[str, Any]:
    """Its variables."""
    found = {}
    for line in ast.parse(inspect.getsource(sys.modules[name])).body:
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        value: ast.expr | None = getattr(line, "value", None)
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and value and _is_first(value):
            found[targets[0].id] = ast.literal_eval(value)
    return found


def _is_first(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return value.value is None or isinstance(value.value, bool | int)
    return (isinstance(value, ast.List) and not value.elts) or (isinstance(value, ast.Dict) and not value.keys)
