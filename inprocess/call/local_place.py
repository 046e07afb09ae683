"""This process's place among the active ranks of its host, without holes, in each iteration."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from inprocess.call.participant import Participant
from inprocess.protocol import verbs
from inprocess.system.logs import get_logger, once

__all__ = ["LocalPlace", "host_name"]

log = get_logger("inprocess")


class LocalPlace:
    """Of one call over one store. Main thread; in the phases JOIN and START."""

    def __init__(self) -> None:
        self._host = host_name(os.environ)
        #: what is known of the host: number -> member, and with which members of the job it was asked for
        self._neighbors: dict[int, int] = {}
        self._asked_with: frozenset[int] = frozenset()
        #: whether this process was not the first of its host in the iteration before
        self._was_behind = False

    def register(self, participant: Participant) -> None:
        """Once, before the first start round."""
        participant.do(verbs.register_on_host(self._host, participant.membership.member))

    def find(self, participant: Participant) -> tuple[int, int]:
        """(local rank, number of active ranks on this host) of an active rank, once the start round has said go.

        One operation of the store, none where all members are on this host or no other one; after somebody has joined
        two more.
        """
        iteration, known = participant.membership.iteration, participant.membership.known
        if known != self._asked_with:
            self._neighbors = participant.do(verbs.find_neighbors(iteration, self._host, self._neighbors))
            self._asked_with = known
        own, size = participant.state.active_rank, participant.state.active_world_size
        assert own is not None
        place = participant.do(
            verbs.place_on_host(iteration, participant.membership, self._neighbors.values(), own, size)
        )
        number = os.environ.get("LOCAL_RANK", "0")
        if place[0] == 0 and self._was_behind and number != "0":
            once(
                log.warning,
                "rank %d is the first of its host now, and its LOCAL_RANK is %s: a program that saves or logs where "
                "LOCAL_RANK is 0 no longer does. Ask for RANK == 0, or for INPROCESS_LOCAL_RANK == 0",
                *(own, number),
            )
        self._was_behind = place[0] > 0
        return place


def host_name(environ: Mapping[str, str]) -> str:
    """What the processes of one host, and of one node of the launcher, have in common. A pod is a host of its own."""
    node = environ.get("GROUP_RANK", "").strip()
    return f"{socket.gethostname()}.{node if node.isascii() and node.isdigit() else ''}"
