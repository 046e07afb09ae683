"""The arbiter of a standby: members come, vote, and are told where the job continues. Runs in the monitor process."""

from __future__ import annotations

import dataclasses
import hmac
import json
import secrets
import socket
from collections.abc import Callable, Collection
from typing import Any

from inprocess.exception import BadMessage, RestartError
from inprocess.failover.rules import ENDED, MAX_HELLO_BYTES, MAX_MESSAGE_BYTES, MAX_UNANSWERED, Arbiter
from inprocess.protocol.messages import MAX_RANKS, FailoverOutcome, Verdict, dump
from inprocess.protocol.parsing import load_vote
from inprocess.system import clock
from inprocess.system.json_lines import Lines, send_now
from inprocess.system.logs import get_logger
from inprocess.system.server import Client, Server

__all__ = ["ArbiterServer"]

log = get_logger("inprocess.failover")


class _Peer(Client):
    """A connection to an arbiter."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.lines = Lines(MAX_HELLO_BYTES)
        self.member: int | None = None
        #: once it has voted
        self.slot: int | None = None
        #: the number of its question where the job goes on; None: it does not wait for the answer
        self.waits: int | None = None


class ArbiterServer(Server[_Peer]):
    """The arbiter of one standby, and its connections. Everything but `lost` and the properties runs in its thread.

    Args:
        listener: where members come.
        slot: of the member whose monitor this is.
        arbiter: decides.
        heard: when the last heartbeat of this standby that got through in time was begun (s); None: it has no lease.
        serve: starts the store with which the job goes on; returns its port.
        left: told the slot of a member that voted here, and has ended.
        changed: called when `is_needed` may have changed, or the job goes on here.
    """

    def __init__(
        self,
        listener: socket.socket,
        slot: int,
        arbiter: Arbiter,
        heard: Callable[[], float | None],
        serve: Callable[[Verdict], int],
        left: Callable[[int], None],
        changed: Callable[[], None],
    ) -> None:
        super().__init__(listener, "inprocess-arbiter", _Peer)
        #: members of this call find it in the store; nobody else is listened to
        self.key = secrets.token_hex(16)
        self._slot, self._arbiter = slot, arbiter
        self._heard, self._serve, self._left, self._changed = heard, serve, left, changed
        self._lost = self._refused = False

    @property
    def gone(self) -> set[int]:
        """Members that have certainly ended."""
        return set(self._arbiter.gone)

    @property
    def elsewhere(self) -> set[int]:
        """Members that have voted at another arbiter."""
        return set(self._arbiter.elsewhere)

    @property
    def met(self) -> bool:
        """Whether any member has come."""
        return self._arbiter.met

    @property
    def members(self) -> list[int]:
        """Those that are connected."""
        return [peer.member for peer in list(self.clients) if peer.member is not None]

    def is_needed(self, roster: Collection[int]) -> bool:
        """Whether a member that is connected may learn anything here, or uses what is served here."""
        return self._arbiter.is_needed(self.members, roster)

    def lost(self) -> None:
        """The store is lost; from any thread."""
        self._lost = True
        self.wake()

    def turn(self) -> None:
        if self._lost:
            self._arbiter.lost(clock.monotonic())
        self._settle()

    def turn_at(self) -> float:
        return self._arbiter.wake_at()

    def hear(self, peer: _Peer, data: bytes) -> bool:
        try:
            if data.count(b"\n") <= MAX_UNANSWERED:
                return all(self._answer(peer, message) for message in peer.lines.take(data))
        except BadMessage as error:
            log.debug("a contact is closed: %s", error)
        return False

    def refuse(self, peer: _Peer) -> None:
        """Otherwise a member that stood still would think that this process has ended."""
        send_now(peer.socket, {"ok": False})

    def say(self, text: str) -> None:
        log.error("ranks cannot reach this standby: %s", text)

    def _answer(self, peer: _Peer, message: dict[str, Any]) -> bool:
        match message:
            case {"hello": int(member), "key": str(key), "n": int(number)} if peer.member is None:
                return self._welcome(peer, member, key, number)
            case _ if peer.member is None:
                return False
            case {"ping": _, "n": int(number)}:
                self._tell(peer, number, ok=True)
            case {"vote": str(text), "n": int(number)}:
                vote = load_vote(text, "a vote")
                self._arbiter.vote(peer.member, vote, clock.monotonic())
                peer.slot, peer.waits = vote.slot, number
            case {"elsewhere": _}:
                self._arbiter.turn_away(peer.member)
                self._changed()
            case {"completed": int(iteration), "n": int(number)}:
                self._tell(peer, number, ok=self._arbiter.complete(peer.member, iteration))
            case _:
                return False
        return True

    def _welcome(self, peer: _Peer, member: int, key: str, number: int) -> bool:
        if not (0 <= member < MAX_RANKS and hmac.compare_digest(key.encode(errors="replace"), self.key.encode())):
            return False
        peer.member, peer.lines = member, Lines(MAX_MESSAGE_BYTES)
        self.know(peer)
        self._arbiter.meet(member)
        self._tell(peer, number, ok=True)
        return True

    def _tell(self, peer: _Peer, number: int, **message: Any) -> None:
        """Answer the question with that number."""
        self.tell(peer, [json.dumps({**message, "n": number}).encode() + b"\n"])

    def left(self, peer: _Peer) -> None:
        if peer.member is not None and peer.member not in self.members:
            ended = peer.end == 0 or peer.end in ENDED
            self._arbiter.leave(peer.member, clock.monotonic(), self._heard(), ended)
            if peer.slot is not None:
                self._left(peer.slot)
        self._changed()

    def _settle(self) -> None:
        """Tell those that wait, once there is a verdict."""
        verdict = self._arbiter.decide(clock.monotonic())
        if verdict is None:
            return
        if verdict.outcome is FailoverOutcome.GO and not verdict.port:
            verdict = self._arbiter.verdict = self._go(verdict)
            self._changed()
        for peer in self.clients:
            if peer.waits is not None:
                self._tell(peer, peer.waits, verdict=dump(verdict))
                peer.waits = None
        if verdict.outcome is FailoverOutcome.REFUSED and not self._refused:
            self._refused = True
            self._changed()

    def _go(self, verdict: Verdict) -> Verdict:
        try:
            return dataclasses.replace(verdict, host=self._slot, port=self._serve(verdict))
        except (RestartError, OSError, RuntimeError) as error:  # no port, no descriptor, no thread for torch's server
            return Verdict(FailoverOutcome.REFUSED, reason=f"initial rank {self._slot} cannot serve a store: {error}")
