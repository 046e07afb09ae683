"""torch's process groups: which there are, who makes one, and how torch forgets them all.

The tables are cleared here and not by ``destroy_process_group()`` or ``_abort_process_group()``: these first wait for
every group, and when one that hung comes back later, they would clear away the groups of the next iteration.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from inprocess.system.interpreter import is_inside
from inprocess.system.logs import get_logger, once

log = get_logger(__name__)
#: functions of torch that make groups
_MAKERS = frozenset({"_new_process_group_helper", "init_process_group", "new_group", "split_group"})
#: where `distributed_c10d` has torch's tables of groups, and which; not every version has all of them
WORLD = "_world"
_TABLES = (
    "comms",
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
    "pg_flight_recorder_hooks",
)


def world() -> Any:
    """torch's tables of groups; None where this version has none under that name."""
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415  (absent where torch is built without)

    return getattr(c10d, WORLD, None)


def current() -> list[Any]:
    """All process groups, the latest first."""
    names = getattr(world(), "pg_names", None)
    if names is None:
        return [dist.group.WORLD] if dist.is_initialized() else []
    names = dict(names)
    return sorted(names, key=lambda group: str(names[group]), reverse=True)


def forget() -> None:
    """Have torch forget its groups, so that init_process_group works again; a group ends with its last reference."""
    try:
        _clear_tables()
    except (AttributeError, ImportError) as error:
        once(
            log.warning,
            "torch %s keeps its process groups in a way that is not known here (%s): they are destroyed with "
            "destroy_process_group(), which waits for a group that hangs",
            torch.__version__,
            str(error),
        )
        if dist.is_initialized():
            dist.destroy_process_group()


def _clear_tables() -> None:
    from torch._C import _distributed_c10d as bindings  # noqa: PLC0415
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

    # all that may be missing comes first, so that it is done whole or not at all
    tables, set_default = getattr(c10d, WORLD), c10d._update_default_pg
    unregister_all = bindings._unregister_all_process_groups
    set_default(None)
    for table in _TABLES:
        getattr(tables, table, {}).clear()
    unregister_all()
    # groups are named by number: a rank that began to make one and a rank that did not would never meet again
    tables.group_count = 0


def name_of(group: Any) -> str:
    """As torch names it: the default group is "0". Where a backend in Python keeps no name, as torch's table has it."""
    try:
        return str(group.group_name)
    except (RuntimeError, AttributeError):
        return str(getattr(world(), "pg_names", {}).get(group, "?"))


def backend_of(group: Any, device: torch.device) -> Any:
    """What a group has for tensors on a device, out of its wrapper for debugging. Raises RuntimeError for none."""
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)


def unfinished() -> bool:
    """Whether torch.distributed has process groups, or only began to make some: then the abort is needed again.

    A group that was in the making while torch forgot all of them is in the tables alone: the next one of that name
    would be refused.
    """
    if not dist.is_available():
        return False
    tables = world()
    return dist.is_initialized() or any(getattr(tables, name, None) for name in ("group_count", *_TABLES))


def is_making() -> bool:
    """Whether a thread is inside torch's functions that make groups."""
    return is_inside(_MAKERS, "distributed_c10d.py")
