"""The default groups that the program makes during a call: where ranks meet, and what torch leaves out of a second one.

*Where.* A restart changes the address, rank and world size. A program that sets ``MASTER_PORT`` in the function, or
passes ``init_method="tcp://..."``, means the group of all ranks: it meets at the iteration's store all the same, since
nobody listens at the address that it names. One that passes a rank or a world size from before would wait for ranks
that do not exist; an error says so at once.

*A store of the program's own* (``store=``, ``file://``) still has the addresses of the iterations before, under the
same keys. So the group of all ranks gets a prefix there: the iteration's number and, since calls count anew, its
store's port.

*Addresses.* All groups of an iteration meet in one store, and each default group has the same name there. So a second
``init_process_group()`` (train, destroy, evaluate) finds the addresses of the first, and connects to what is closed,
unless all ranks come at the same moment. Each one after the first of its size gets a prefix to its keys. Ranks count
how often they have begun to make one, not how often that succeeded: where it fails on some ranks, all try again.

*Ranks.* torch takes the global ranks of the first group of a process for 0 to n-1, and reads those of any other default
group from its options, where it leaves them out. So after a restart ``split_group()``, and a ``DeviceMesh`` with
``device_id=``, end every rank by SIGSEGV (NCCL and Gloo, torch 2.13). They are filled in.

*Other groups.* Frameworks make groups with processes that are not wrapped, such as inference engines, by the functions
that make a default group. While there is one, what they make is none, and meets where and under the keys that it says.
Before 2.14 torch takes every address for one at which somebody serves, as it is told of the iteration's store, so no
rank of such a group would serve. For the time of that meeting it is told what the launcher says.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from inprocess.collectives import groups
from inprocess.collectives.nccl_shutdown import Method, Replaced
from inprocess.exception import OptionError
from inprocess.system.environment import meet_at, put_back
from inprocess.system.logs import get_logger, once

log = get_logger("inprocess")
#: functions of ``distributed_c10d``: one makes every group, the other finds the store for a default one
MAKER, RENDEZVOUS = "_new_process_group_helper", "rendezvous"
#: "True": no rank serves where a group meets, its launcher does
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class DefaultGroups:
    """Those that are made, from `begin` to `end`."""

    def __init__(self) -> None:
        self._replaced: list[Replaced] = []
        #: by size: how many this iteration has begun to make
        self._begun: Counter[int] = Counter()
        #: rank and world size of this iteration; and all ranks and world sizes of this call so far
        self._place = (0, 1)
        self._ranks: set[int] = set()
        self._sizes: set[int] = set()
        self._address, self._number = ("", 0), 0
        # the group that is made now meets at the iteration's store
        self._is_there = False
        # whoever has imported a replaced function during a call keeps it
        self._is_over = False
        # before the call
        self._agent_store: str | None = None

    def begin(self) -> None:
        """A call begins. In the environment are rank and world size that the process was started with."""
        module = getattr(dist, "distributed_c10d", None)
        self._is_over, self._agent_store = False, os.environ.get(AGENT_STORE)
        if not self._replaced:
            replaced = ((MAKER, self._make), (RENDEZVOUS, self._meet))
            self._replaced = [Replaced(module, *each) for each in replaced if hasattr(module, each[0])]
        with contextlib.suppress(KeyError, ValueError):
            self._place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._ranks, self._sizes = {self._place[0]}, {self._place[1]}

    def begin_iteration(self, rank: int, world_size: int, address: tuple[str, int], number: int = 0) -> None:
        """With this rank and size, and a store that is new, at this host and port; the iteration of this number."""
        self._begun.clear()
        self._number, self._is_there = number, False
        self._ranks.add(rank)
        self._sizes.add(world_size)
        self._place, self._address = (rank, world_size), address

    def end(self) -> None:
        """The call is over."""
        self._is_over = True
        while self._replaced:
            self._replaced.pop().restore()

    def _check(self, rank: int, size: int) -> None:
        """Raises OptionError where they are from before. Any others may be those of a group of some of the ranks."""
        is_of_others = size > 1 and (rank, size) != self._place  # a group of this process alone waits for nobody
        if is_of_others and rank in self._ranks and size in self._sizes:
            raise OptionError(
                f"rank={rank}, world_size={size} were passed to init_process_group(), but this iteration has rank "
                f"{self._place[0]} of {self._place[1]}: read RANK and WORLD_SIZE again in the function, or leave both "
                "arguments away"
            )

    def _meet(self, original: Method, url: Any, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Any:
        given = _address_in(url)
        if given is None or self._is_over:
            return original(url, rank, world_size, **kwargs)
        place = _place_in(url, rank, world_size)
        if not (is_beside := dist.is_initialized()):
            self._check(*place)
        if is_beside or place != self._place:
            met = original(url, rank, world_size, **kwargs)
            return met if given == self._address else self._elsewhere(met)
        if given != self._address:
            once(
                log.info,
                "init_process_group() was told to meet at %s:%s: the ranks of each iteration meet at its own store "
                "instead, so neither MASTER_ADDR and MASTER_PORT nor init_method= are needed in the function",
                *given,
            )
        # also where it is named by ``tcp://``: since 2.14 torch is a client at MASTER_ADDR:MASTER_PORT alone
        meet_at(*self._address)
        return self._noted(original("env://", *place, **kwargs))

    def _elsewhere(self, met: Iterator[Any]) -> Iterator[Any]:
        """As without this library, also as to who serves there."""
        ours = {AGENT_STORE: os.environ.get(AGENT_STORE)}
        put_back({AGENT_STORE: self._agent_store})
        try:
            found = next(met)
        finally:
            if not self._is_over:  # another thread's, which waited for longer than the call
                put_back(ours)
        yield found
        yield from met

    def _noted(self, met: Iterator[Any]) -> Iterator[Any]:
        for each in met:
            self._is_there = True
            yield each

    def _make(
        self, original: Method, size: int, rank: int, ranks: Any, backend: Any, store: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if len(ranks) > 0 or self._is_over or dist.is_initialized():  # no default group: there is one, or no call
            return original(size, rank, ranks, backend, store, *args, **kwargs)
        self._check(rank, size)
        earlier = self._begun[size]
        self._begun[size] += 1
        is_there, self._is_there = self._is_there, False
        if not is_there and (rank, size) == self._place and self._address[1] and size > 1:
            store = dist.distributed_c10d.PrefixStore(f"iteration_{self._number}_{self._address[1]}", store)
        if earlier:
            store = dist.distributed_c10d.PrefixStore(f"again_{earlier}", store)
        made = original(size, rank, ranks, backend, store, *args, **kwargs)
        _fill_in_ranks(made[0])
        return made


def _address_in(url: Any) -> tuple[str, int] | None:
    """Of a store on a host; None: it is met in another way, or torch is to say what is wrong."""
    with contextlib.suppress(KeyError, ValueError, TypeError):
        parts = urlsplit(url)
        if parts.scheme == "env":
            return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if parts.scheme == "tcp" and parts.hostname and parts.port and not parts.query:
            return parts.hostname, parts.port
    return None


def _place_in(url: Any, rank: int, world_size: int) -> tuple[int, int]:
    """Rank and world size of a group, as torch finds them; -1: torch is to say that it is missing."""
    given = [rank, world_size]
    for at, name in enumerate(("RANK", "WORLD_SIZE")):
        with contextlib.suppress(KeyError, ValueError):
            if given[at] == -1 and urlsplit(url).scheme == "env":
                given[at] = int(os.environ[name])
    return given[0], given[1]


def _fill_in_ranks(group: Any) -> None:
    for device in getattr(group, "_device_types", ()):
        with contextlib.suppress(RuntimeError, AttributeError, TypeError):  # a backend of another kind
            options = groups.backend_of(group, device).options
            if options.global_ranks_in_group == []:
                options.global_ranks_in_group = list(range(group.size()))


#: one per process, like torch's default group; `call.parts` begins and ends it
default_groups = DefaultGroups()
