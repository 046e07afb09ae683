"""The default groups that the program makes during a call: what torch leaves out of a second one.

*Addresses.* All groups of an iteration meet in one store, and each default group has the same name there. So a second
``init_process_group()`` (train, destroy, evaluate) finds the addresses of the first, and connects to what is closed,
unless all ranks come at the same moment. Each one after the first of its size gets a prefix to its keys. Ranks count
how often they have begun to make one, not how often that succeeded: where it fails on some ranks, all try again.

*Ranks.* torch takes the global ranks of the first group of a process for 0 to n-1, and reads those of any other default
group from its options, where it leaves them out. So after a restart ``split_group()``, and a ``DeviceMesh`` with
``device_id=``, end every rank by SIGSEGV (NCCL and Gloo, torch 2.13). They are filled in.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch.distributed as dist

from inprocess.collectives.nccl_shutdown import Method, Replaced

#: the function of ``distributed_c10d`` that makes every group
MAKER = "_new_process_group_helper"


class DefaultGroups:
    """Those that are made, from `begin` to `end`."""

    def __init__(self) -> None:
        self._replaced: Replaced | None = None
        #: by size: how many this iteration has begun to make
        self._begun: Counter[int] = Counter()

    def begin(self) -> None:
        """A call begins."""
        module = getattr(dist, "distributed_c10d", None)
        if self._replaced is None and hasattr(module, MAKER):
            self._replaced = Replaced(module, MAKER, self._make)

    def begin_iteration(self) -> None:
        """Its store is new."""
        self._begun.clear()

    def end(self) -> None:
        """The call is over."""
        if self._replaced is not None:
            self._replaced.restore()
            self._replaced = None

    def _make(
        self, original: Method, size: int, rank: int, ranks: Any, backend: Any, store: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if len(ranks) > 0:
            return original(size, rank, ranks, backend, store, *args, **kwargs)
        earlier = self._begun[size]
        self._begun[size] += 1
        if earlier:
            store = dist.distributed_c10d.PrefixStore(f"again_{earlier}", store)
        made = original(size, rank, ranks, backend, store, *args, **kwargs)
        _fill_in_ranks(made[0])
        return made


def _fill_in_ranks(group: Any) -> None:
    for device in getattr(group, "_device_types", ()):
        with contextlib.suppress(RuntimeError, AttributeError, TypeError):  # a backend of another kind
            backend = group._get_backend(device)
            options = getattr(backend, "wrapped_pg", backend).options
            if options.global_ranks_in_group == []:
                options.global_ranks_in_group = list(range(group.size()))


#: one per process, like torch's default group; the loop begins and ends it
default_groups = DefaultGroups()
