"""Classes of stores that users may name: torch's own with two methods more.

Any other torch Store with ``set, get, add, compare_set, wait, check, multi_get, delete_key, set_timeout`` works too.
``EtcdStore`` is in `inprocess.etcd.store`.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed  # noqa: F401  (registers the module below; a stub in the monitor process)
from torch._C._distributed_c10d import FileStore as _FileStore
from torch._C._distributed_c10d import PrefixStore as _PrefixStore
from torch._C._distributed_c10d import TCPStore as _TCPStore

from inprocess.exception import TimeoutError
from inprocess.protocol.ops import Claim
from inprocess.stores.raw import claim, read, with_libuv_or_without

__all__ = ["BarrierError", "BarrierTimeout", "FileStore", "PrefixStore", "StoreMixin", "TCPStore"]


class StoreMixin:
    """What the library adds to torch's stores. Method names are our own: torch's Store grows methods of its own."""

    __module__ = "inprocess.store"  # where users import it

    def inprocess_read(self, key: str) -> bytes | None:
        """What ``key`` holds, or None where it is absent; never waits."""
        return read(self, key)

    def inprocess_claim(self, key: str, value: str) -> bytes:
        """Write ``value`` where ``key`` is absent; returns what it holds afterwards."""
        return claim(self, Claim(key, value))


#: the established API's words for what is raised where the other ranks do not come in time
BarrierError = BarrierTimeout = TimeoutError


class TCPStore(StoreMixin, _TCPStore):
    """A client of a torch TCPStore server, which the process with ``RANK`` 0 becomes where nobody has the port yet.

    A Wrapper that is given this class needs no such server: its own lives in a monitor process.

    Args:
        host_name: default: the environment variable ``MASTER_ADDR``.
        port: default: ``MASTER_PORT``.
        world_size: number of clients, with `wait_for_workers`; default: ``WORLD_SIZE``.
        timeout: for operations that wait; default 300 s.
        wait_for_workers: return once all clients are there; default False, as whoever needs a key waits for it.
        multi_tenant: several servers in this process may share the port; default False.
        use_libuv: the kind of server; default True, and False where torch was built without libuv.
        is_master: serve as well; default: as above.
    """

    __module__ = "inprocess.store"  # where users import it

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        timeout: timedelta = timedelta(seconds=300),
        wait_for_workers: bool = False,
        multi_tenant: bool = False,
        use_libuv: bool = True,
        *,
        is_master: bool | None = None,
    ) -> None:
        host = os.environ["MASTER_ADDR"] if host_name is None else host_name
        number = int(os.environ["MASTER_PORT"]) if port is None else port
        if world_size is None and wait_for_workers:
            world_size = int(os.environ["WORLD_SIZE"])
        make = functools.partial(super().__init__, host, number, world_size, timeout=timeout, multi_tenant=multi_tenant)

        def connect(serves: bool) -> None:
            with_libuv_or_without(
                lambda libuv: make(is_master=serves, wait_for_workers=wait_for_workers, use_libuv=libuv and use_libuv)
            )

        if is_master is not None or os.environ.get("RANK") != "0":
            connect(bool(is_master))
            return
        try:
            connect(True)
        except RuntimeError:  # somebody else serves there
            connect(False)


class FileStore(StoreMixin, _FileStore):
    """A store in one file on a file system that all ranks share. Slow (it polls); for where no port may be opened.

    Args:
        file_name: the file; a fresh one for each job.
        world_size: number of processes, the last of which removes the file; default: it stays.
        timeout: for operations that wait; default 300 s.
    """

    __module__ = "inprocess.store"  # where users import it

    def __init__(self, file_name: str, world_size: int = -1, timeout: timedelta = timedelta(seconds=300)) -> None:
        super().__init__(file_name, world_size)
        self.set_timeout(timeout)


class PrefixStore(StoreMixin, _PrefixStore):
    """A view of another store in which each key has a prefix: a text, or the number of an iteration."""

    __module__ = "inprocess.store"  # where users import it

    def __init__(self, prefix: str | int, store: Any) -> None:
        super().__init__(str(prefix), store)
        # torch keeps the part of it that is C++; of a class that is written in Python that is nothing
        self._kept = store


# --- the two kinds of TCPStore servers ----------------------------------------------------------------------------

# torch has two, with libuv and without. The second is served where the environment variable USE_LIBUV is 0, torch's own
# switch, and where torch was built without libuv (Debian's). Its compare_set wakes nobody who waits for the key, so the
# one whose value was taken sets it once more; and since it may die in between, who waits looks again now and then.
