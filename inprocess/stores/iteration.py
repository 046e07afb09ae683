"""The iterations' own stores, for whoever serves them. Imports torch with the first one."""

from __future__ import annotations

from typing import Any

from inprocess.protocol import verbs
from inprocess.stores.driver import execute

__all__ = ["IterationServers"]


class IterationServers:
    """Those in use, and one made ahead. Only one thread calls it.

    Args:
        host: in the addresses that are published; "@" stands for the host of the base store.
        base: the host by which others know this one: decides where to listen for "@".
        bind: listen on this local address only, for "@"; empty: as ``base`` says.
    """

    def __init__(self, host: str, base: str, bind: str) -> None:
        self._host = host
        # an address that is published as such is the only one that anybody uses
        self._where = (base, bind) if host == "@" else (host, host)
        self._spare: Any = None
        self._servers: dict[int, Any] = {}

    @property
    def serving(self) -> bool:
        return bool(self._servers)

    def offer(self, iteration: int, connection: Any) -> None:
        """Publish a server for this iteration, unless somebody else has done so or it is interrupted already."""
        if iteration in self._servers:  # published while the iteration before was being aborted
            return
        self._spare = self._spare or self._new()
        address = f"{self._host}:{self._spare.port}"
        if execute(verbs.publish_rendezvous(iteration, address), connection) == address:
            self._servers[iteration], self._spare = self._spare, self._new()

    def close_before(self, iteration: int) -> None:
        """Shut the servers of older iterations down. Torch does that when the last reference goes."""
        self._servers = {number: server for number, server in self._servers.items() if number >= iteration}

    def _new(self) -> Any:
        from inprocess.stores.serving import serve  # noqa: PLC0415

        return serve(self._where[0], 0, self._where[1])
