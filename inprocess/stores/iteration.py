"""The iterations' own stores, for whoever serves them. Imports torch with the first one."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from inprocess.exception import RestartError
from inprocess.protocol import verbs
from inprocess.stores.driver import execute
from inprocess.system import descriptors
from inprocess.system.errors import first_line
from inprocess.system.logs import get_logger, once

__all__ = ["IterationServers"]

log = get_logger("inprocess.monitor")


class IterationServers:
    """Those in use, and one made ahead: 1 ms of a processor. Only one thread changes them, but for `make_ahead`.

    Args:
        host: in the addresses that are published; "@" stands for the host of the base store.
        base: the host by which others know this one: decides where to listen for "@".
        bind: listen on this local address only, for "@"; empty: as ``base`` says.
    """

    def __init__(self, host: str, base: str, bind: str) -> None:
        self._host = host
        # an address that is published as such is the only one that anybody uses
        self._where = (base, bind) if host == "@" else (host, host)
        #: what that means here, looked up with the first server
        self._place: Any = None
        self._spare: deque[Any] = deque(maxlen=1)
        self._making = threading.Lock()
        self._servers: dict[int, Any] = {}

    @property
    def serving(self) -> bool:
        return bool(self._servers)

    @property
    def has_spare(self) -> bool:
        return bool(self._spare)

    def offer(self, iteration: int, connection: Any) -> None:
        """Publish a server for this iteration, unless somebody else has done so or it is interrupted already."""
        if iteration in self._servers:  # published while the iteration before was being aborted
            return
        server = self._spare.pop() if self._spare else self._new()
        address = f"{self._host}:{server.port}"
        if execute(verbs.publish_rendezvous(iteration, address), connection) == address:
            self._servers[iteration] = server
        else:
            self._spare.append(server)

    def close_before(self, iteration: int) -> None:
        """Shut the servers of older iterations down. Torch does that when the last reference goes."""
        self._servers = {number: server for number, server in self._servers.items() if number >= iteration}

    def make_ahead(self) -> None:
        """While the function runs: in a restart the ranks need the processors. In a thread of its own, as torch may
        take long. Nobody needs it yet: where it cannot be made, that is tried again."""
        if self._spare or not self._making.acquire(blocking=False):
            return
        try:
            self._spare.append(self._new())
        except (OSError, RuntimeError, RestartError) as error:  # torch's are RuntimeErrors
            why = descriptors.shortage(error) or first_line(error)
            once(log.warning, "no store can be made ahead of a restart: %s", why)
        finally:
            self._making.release()

    def _new(self) -> Any:
        from inprocess.stores import serving  # noqa: PLC0415

        self._place = self._place or serving.place_of(*self._where)
        return serving.serve_at(self._place)
