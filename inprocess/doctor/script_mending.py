"""In a rank: go on around process groups that the program makes in the wrong place, so that other defects can be seen.

Groups that were made outside the wrapped function end when it is called, and are made anew in each of its runs.
Variables that keep a group of an earlier run are set to None when the function is entered.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import distributed as ddp

from inprocess.testing import growth

__all__ = ["KEPT", "OUTSIDE", "Mending"]

#: what can be mended
OUTSIDE, KEPT = "outside", "kept"
#: how long the others are waited for before a group that was made outside ends (seconds)
MEET_S = 20.0


class Mending:
    """Of one rank.

    Args:
        folder: where the ranks meet for a group that is made outside; one for all of them.
        what: of `OUTSIDE` and `KEPT`.
    """

    def __init__(self, folder: str, what: Collection[str]) -> None:
        self._folder, self._what = folder, frozenset(what)
        #: the wrapped function runs
        self.inside = False
        self._making = False
        self._meetings = 0
        #: arguments of init_process_group() outside
        self._outside: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        #: groups that were made outside, with the arguments of new_group()
        self._groups: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        #: variables that had one of these: number of the group, owner, name
        self._variables: list[tuple[int, Any, str]] = []
        self._init, self._new, self._default = c10d.init_process_group, c10d.new_group, c10d._get_default_group

    def install(self) -> None:
        """Before the program is imported."""
        if OUTSIDE not in self._what:
            return
        places: tuple[Any, ...] = (dist, c10d, ddp)
        for module in places[:2]:
            module.init_process_group = self._init_process_group
            module.new_group = self._new_group
        for module in places[1:]:
            module._get_default_group = self._get_default_group

    def called(self) -> None:
        """A wrapped function is called: there must be no group."""
        while OUTSIDE in self._what and dist.is_initialized():
            self._meet()
            dist.destroy_process_group()

    def _meet(self) -> None:
        """A rank that is still connecting would get an error from one that has ended the group already."""
        self._meetings += 1
        store, keys = c10d._get_default_store(), [f"left/{self._meetings}/{n}" for n in range(dist.get_world_size())]
        store.set(keys[dist.get_rank()], "1")
        with contextlib.suppress(RuntimeError):  # one that does not come is seen by what it does
            store.wait(keys, timedelta(seconds=MEET_S))

    def entered(self) -> None:
        """The function is about to be entered: no variable has a group that is no more."""
        for owner, name, value in list(_variables_with_groups()):
            number = next((n for n, (group, _, _) in enumerate(self._groups) if group is value), None)
            if number is not None:
                self._variables.append((number, owner, name))
            if number is not None or KEPT in self._what:
                _set(owner, name, None)

    def _init_process_group(self, *args: Any, **kwargs: Any) -> None:
        if self.inside:
            self._begin(args, kwargs)
            return
        self._outside = (args[:1], {name: kwargs[name] for name in ("backend", "timeout") if name in kwargs})
        if "store" not in kwargs:  # MASTER_PORT is for the wrapped function
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            kwargs |= {"init_method": f"file://{self._folder}/outside", "rank": rank, "world_size": size}
        self._init(*args[:1], **kwargs)

    def _get_default_group(self) -> Any:
        if self.inside and self._outside is not None and not self._making and not dist.is_initialized():
            self._begin(*self._outside)
        return self._default()

    def _new_group(self, *args: Any, **kwargs: Any) -> Any:
        group = self._new(*args, **kwargs)
        if not self.inside:
            self._groups.append((group, args, kwargs))
        return group

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the default group, and all others that were made outside, in the same order on each rank."""
        self._making = True
        try:
            self._init(*args, **kwargs)
            self._groups = [self._again(*each) for each in self._groups]
        finally:
            self._making = False
        for number, owner, name in self._variables:
            _set(owner, name, self._groups[number][0])

    def _again(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        """The same group, of the ranks that are left."""
        ranks, size = args[0] if args else kwargs.get("ranks"), dist.get_world_size()
        left = None if ranks is None or len(ranks) >= size else [rank for rank in ranks if rank < size]
        more = {name: value for name, value in kwargs.items() if name != "ranks"}
        return self._new(left, *args[1:], **more), args, kwargs


def _variables_with_groups() -> Iterator[tuple[Any, Any, Any]]:
    """(owner, name, group) of what the program's modules, their classes and objects, and their dicts have."""
    for module in growth.modules():
        for owner in growth.owners(module):
            for name, value in growth.public(vars(owner)):
                if growth.is_group(value):
                    yield owner, name, value
                if isinstance(value, dict):
                    yield from ((value, key, part) for key, part in list(value.items()) if growth.is_group(part))


def _set(owner: Any, name: Any, value: Any) -> None:
    if not isinstance(owner, dict):
        setattr(owner, name, value)
    elif value is None:
        owner.pop(name, None)
    else:
        owner[name] = value
