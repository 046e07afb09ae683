"""Stores: ``TCPStore``, ``FileStore``, ``PrefixStore`` and ``EtcdStore``. The code is in `inprocess.stores`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from inprocess.stores.addresses import await_name
from inprocess.stores.connecting import connect
from inprocess.stores.connections import own_address
from inprocess.stores.driver import execute
from inprocess.stores.serving import listen, serve
from inprocess.stores.spec import JobIdentity, StoreSpec
from inprocess.stores.tcp import BarrierError, BarrierTimeout, FileStore, PrefixStore, StoreMixin, TCPStore

#: older names
Seat, drive = JobIdentity, execute

__all__ = [
    "BarrierError",
    "BarrierTimeout",
    "EtcdStore",
    "FileStore",
    "JobIdentity",
    "PrefixStore",
    "Seat",
    "StoreMixin",
    "StoreSpec",
    "TCPStore",
    "await_name",
    "connect",
    "drive",
    "execute",
    "listen",
    "own_address",
    "serve",
]

if TYPE_CHECKING:
    from inprocess.etcd.store import EtcdStore
else:

    def __getattr__(name: str) -> Any:
        if name == "EtcdStore":  # few use it, and the core imports nothing of it
            return importlib.import_module("inprocess.etcd_store").EtcdStore  # where monitor processes import it
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
