"""The arbiter of a standby: members come, vote, and are told where the job continues. Runs in the monitor process."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import select
import socket
import threading
from collections.abc import Callable, Collection
from typing import Any

from inprocess.exception import BadMessage, RestartError
from inprocess.failover.rules import ENDED, MAX_MESSAGE_BYTES, Arbiter
from inprocess.protocol.messages import FailoverOutcome, Verdict, dump
from inprocess.protocol.parsing import load_vote
from inprocess.system import clock, descriptors
from inprocess.system.json_lines import Lines
from inprocess.system.logs import get_logger

__all__ = ["ArbiterServer", "EXHAUSTED_PAUSE_S"]

log = get_logger("inprocess.failover")
#: how long a member may take to read an answer (seconds)
TAKE = 1.0
#: for how long nobody is accepted after descriptors ran out (seconds): a connection stays in the queue, and accept()
#: would fail again at once
EXHAUSTED_PAUSE_S = 0.5


class ArbiterServer(threading.Thread):
    """The arbiter of one standby, and its connections. Everything but `lost` and the properties runs in its thread.

    Args:
        listener: where members come.
        call: tells the members of this call from others.
        slot: of the member whose monitor this is.
        arbiter: decides.
        heard: when the last heartbeat of this standby that got through in time was begun (s); None: it has no lease.
        serve: starts the store with which the job goes on; answers its port.
        left: told the slot of a member that voted here, and has ended.
        changed: called when `is_needed` may have changed, or the job goes on here.
    """

    def __init__(
        self,
        listener: socket.socket,
        call: str,
        slot: int,
        arbiter: Arbiter,
        heard: Callable[[], float | None],
        serve: Callable[[Verdict], int],
        left: Callable[[int], None],
        changed: Callable[[], None],
    ) -> None:
        super().__init__(name="arbiter", daemon=True)
        self._listener, self._call, self._slot, self._arbiter = listener, call, slot, arbiter
        self._heard, self._serve, self._left, self._changed = heard, serve, left, changed
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._peers: dict[int, _Peer] = {}
        self._lost = self._closed = self._refused = False
        #: when the listener is looked at again; infinite while it is
        self._open_at = math.inf
        self._told = False

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

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
        return bool(self._arbiter.met)

    @property
    def idle(self) -> bool:
        """No member is connected, or the job does not go on here."""
        return not self._peers or self._refused

    def is_needed(self, roster: Collection[int]) -> bool:
        """Whether a member that is connected may learn anything here, or uses what is served here."""
        members = [peer.member for peer in list(self._peers.values())]
        return self._arbiter.is_needed([member for member in members if member is not None], roster)

    def lost(self) -> None:
        """The store is lost; from any thread."""
        self._lost = True
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread and all connections, as the end of the process would. More than once is fine."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._wake, 1)
        self.join()
        os.close(self._wake)

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        while not self._closed:
            wait = min(self._arbiter.wake_at(), self._open_at) - clock.monotonic()
            for fd, _ in poll.poll(None if math.isinf(wait) else max(0.0, wait * 1e3)):
                self._on_ready(fd, poll)
            if clock.monotonic() >= self._open_at:
                self._open_at = math.inf
                poll.register(self._listener, select.POLLIN)
            if self._lost:
                self._arbiter.lost(clock.monotonic())
            self._settle()
        for peer in self._peers.values():
            peer.socket.close()
        self._listener.close()

    def _on_ready(self, fd: int, poll: select.poll) -> None:
        if fd == self._wake:
            os.eventfd_read(self._wake)
        elif fd == self._listener.fileno():
            self._accept(poll)
        elif not self._hear(self._peers[fd]):
            poll.unregister(fd)
            self._drop(self._peers.pop(fd))

    def _accept(self, poll: select.poll) -> None:
        try:
            peer = _Peer(self._listener.accept()[0])
        except OSError as error:  # it has gone again, unless there are too many
            if error.errno in descriptors.EXHAUSTED:
                poll.unregister(self._listener)
                self._open_at = clock.monotonic() + EXHAUSTED_PAUSE_S
                self._tell(error)
            return
        self._peers[peer.socket.fileno()] = peer
        poll.register(peer.socket, select.POLLIN)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            log.error("ranks cannot reach this standby: %s", descriptors.shortage(error) or error)

    def _hear(self, peer: _Peer) -> bool:
        """Take in what it says; False where it has ended, or is none of ours."""
        try:
            data = peer.socket.recv(1 << 16)
            peer.ended = not data
            return bool(data) and all(self._answer(peer, message) for message in peer.lines.take(data))
        except OSError as error:
            peer.ended = error.errno in ENDED
        except BadMessage as error:
            log.debug("a contact is closed: %s", error)
        return False

    def _answer(self, peer: _Peer, message: dict[str, Any]) -> bool:
        match message:
            case {"hello": int(member), "call": self._call}:
                peer.member = member
                self._arbiter.meet(member)
                return peer.tell(ok=True)
            case {"ping": _}:
                return peer.tell(ok=True)
            case {"vote": str(text)} if peer.member is not None:
                vote = load_vote(text, "a vote")
                self._arbiter.vote(peer.member, vote, clock.monotonic())
                peer.slot, peer.waits = vote.slot, True
                return True
            case {"elsewhere": _} if peer.member is not None:
                self._arbiter.turn_away(peer.member)
                self._changed()
                return True
            case {"completed": int(iteration)} if peer.member is not None:
                return peer.tell(ok=self._arbiter.complete(peer.member, iteration))
        return False

    def _drop(self, peer: _Peer) -> None:
        peer.socket.close()
        twice = any(other.member == peer.member for other in self._peers.values())
        if peer.member is not None and not twice:
            self._arbiter.leave(peer.member, clock.monotonic(), self._heard(), peer.ended)
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
        for peer in [peer for peer in self._peers.values() if peer.waits]:
            peer.waits = False
            peer.tell(verdict=dump(verdict))
        if verdict.outcome is FailoverOutcome.REFUSED and not self._refused:
            self._refused = True
            self._changed()

    def _go(self, verdict: Verdict) -> Verdict:
        try:
            return dataclasses.replace(verdict, host=self._slot, port=self._serve(verdict))
        except RestartError as error:
            return Verdict(FailoverOutcome.REFUSED, reason=f"initial rank {self._slot} cannot serve a store: {error}")


class _Peer:
    """A connection to an arbiter."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(TAKE)
        self.socket, self.lines = connection, Lines(MAX_MESSAGE_BYTES)
        self.member: int | None = None
        #: once it has voted
        self.slot: int | None = None
        self.waits = False
        #: the process has certainly ended
        self.ended = False

    def tell(self, **message: Any) -> bool:
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False  # it has ended, which is seen in its turn
        return True
