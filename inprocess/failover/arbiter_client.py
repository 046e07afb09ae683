"""A training process's connections to the arbiters, which are in the monitors of the standbys (``arbiter_server``).

What is decided is in `inprocess.failover.rules`. Both ends exchange JSON objects, one per line; a contact lies idle
until the store is lost. It tells by its end that the training process has ended: so it has no limit of silence, and
forked children close their copies.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inprocess.exception import RestartError
from inprocess.failover.rules import ENDED, MAX_MESSAGE_BYTES
from inprocess.protocol.messages import Verdict, Vote, dump
from inprocess.protocol.parsing import load_verdict
from inprocess.stores.addresses import lookup
from inprocess.system import clock
from inprocess.system.descriptors import milliseconds
from inprocess.system.interpreter import SLICE, join_with_progress
from inprocess.system.json_lines import Lines
from inprocess.system.logs import get_logger

__all__ = ["ArbiterClient", "ArbiterClients", "Door"]

log = get_logger("inprocess.failover")
#: how long making a contact may take, how long an arbiter may take to answer before the next one is asked, and how
#: long to take in that the job is completed, before a rank waits much longer (seconds)
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S, KNOW = 5.0, 2.0, 10.0
#: host, port and key of an arbiter
Door = tuple[str, int, str]
#: where the arbiter of a member is for us, from how it is published; None where it has none
Find = Callable[[int, str], Door | None]


class ArbiterClients:
    """A training process's connections to the standbys, in the order in which they are asked.

    Args:
        server: the member that serves the store. It is never asked, but has to know who has ended.
        find: see `Find`.
        host: the contact at which this process has voted before, and which serves the store now.
    """

    def __init__(self, server: int, find: Find, host: ArbiterClient | None = None) -> None:
        self._server, self._find, self._host = server, find, host
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if host is not None:
            host.stop = self._stop  # that of the call's former contacts is closed by now
        #: set when nobody needs a contact any more
        self.closing = threading.Event()
        self._thread: threading.Thread | None = None
        #: what was published when contacts were made last
        self._published: dict[int, str] = {}
        #: those of the members that were to be met last that have one; replaced, not changed
        self._met: dict[int, ArbiterClient] = {}
        # protects the fields below
        self._lock = threading.Lock()
        #: by where it is. One that nobody asks any more is kept: its end would tell that this process has ended
        self._contacts: dict[Door, ArbiterClient] = {}
        #: in the order in which they are asked
        self._order: list[Door] = []
        #: whether there is a contact to each of those that are to stand by
        self._complete = True
        _open.add(self)

    @property
    def some(self) -> bool:
        """Whether there is anybody to ask. Waits for contacts that are being made."""
        self.are_made(CONNECT_TIMEOUT_S)
        return bool(self._asked())

    def are_made(self, seconds: float) -> bool:
        """Wait for contacts that are being made. Whether all have been tried."""
        return self._thread is None or join_with_progress(self._thread, seconds)

    def _asked(self) -> list[ArbiterClient]:
        with self._lock:
            return [self._contacts[where] for where in self._order if where in self._contacts]

    def have_met(self, members: Sequence[int]) -> bool:
        """Whether these are the members that were to be met last, and each has a contact still: it is where it was."""
        met = self._met
        return list(met) == list(members) and self.are_made(0) and not any(each.has_ended() for each in met.values())

    def make(self, member: int, published: Mapping[int, str]) -> None:
        """Connect to these, where that has not been done, in a thread of its own: one may not answer.

        Args:
            member: this one.
            published: member -> where its arbiter is, empty where that is not known; in the order in which they are
                asked.
        """
        if published == self._published and self._has_all():
            return  # one that had no arbiter still has none
        self._published = dict(published)
        self._met = {}
        arguments = (self._thread, member, self._published)
        self._thread = threading.Thread(target=self._make, args=arguments, name="inprocess-contacts", daemon=True)
        self._thread.start()

    def _has_all(self) -> bool:
        return self.are_made(0) and self._complete and not any(contact.has_ended() for contact in self._asked())

    def _make(self, before: threading.Thread | None, member: int, published: dict[int, str]) -> None:
        if before is not None:
            before.join()
        found = {other: self._meet(member, other, address) for other, address in published.items()}
        met = {other: where for other, (where, _) in found.items() if where is not None}
        found.pop(self._server, None)
        standing = {other: where for other, where in met.items() if other in found}
        with self._lock:
            self._met = {other: self._contacts[where] for other, where in met.items() if where in self._contacts}
            self._order, self._complete = list(standing.values()), all(certain for _, certain in found.values())
        log.info("standing by for the host of the store: members %s", list(standing))

    def _meet(self, member: int, other: int, published: str) -> tuple[Door | None, bool]:
        """Where this one is, and whether that is certain; None: it is no standby, has ended, or cannot be reached."""
        with contextlib.suppress(RestartError, OSError):
            where = self._find(other, published)
            if where is None:
                return None, True
            contact = self._contact(where, member)
            return (where if contact.is_made else None), contact.is_made or contact.ended
        return None, False

    def _contact(self, where: Door, member: int) -> ArbiterClient:
        """The one that there is, or a new one, which may not be made."""
        known = self._contacts.get(where)
        if known is not None and not known.has_ended():
            return known
        contact = ArbiterClient(*where, stop=self._stop)
        contact.connect(member)
        with self._lock:
            if known is not None:
                self._contacts.pop(where).socket.close()
            if contact.is_made and not self.closing.is_set():
                self._contacts[where] = contact
            else:
                contact.socket.close()
        return contact

    def vote(self, vote: Vote, seconds: float) -> tuple[Verdict, ArbiterClient] | None:
        """Ask the arbiters, one after the other, until one has decided; the verdict, and who made it. None: none of
        them answers."""
        for contact in self._asked():
            if contact.ask({"ping": 1}, ANSWER_TIMEOUT_S) != {"ok": True}:
                continue
            self._turn_away(contact)
            answer = contact.ask({"vote": dump(vote)}, seconds)
            if answer is not None:
                return load_verdict(str(answer.get("verdict")), "the verdict of an arbiter"), contact
            if not contact.ended:  # it may count this vote yet
                return None
        return None

    def _turn_away(self, asked: ArbiterClient) -> None:
        """Tell all others that this process votes here. First: what becomes of it then says nothing to them."""
        for contact in self._everybody():
            if contact is not asked:
                contact.say({"elsewhere": 1}, ANSWER_TIMEOUT_S)

    def say_completed(self, iteration: int) -> bool | None:
        """Tell all arbiters that this iteration is completed. False: one of them goes on without this process. None:
        one of those that stand by now may not know it. True: all of these do.

        One that stood by before is told as well, and not waited for: the end of this process, which it sees after that,
        is not to let anybody go on there who has voted there since.
        """
        known = self.are_made(CONNECT_TIMEOUT_S) and self._complete
        asked = self._asked()
        for contact in self._before(asked):
            contact.say({"completed": iteration}, ANSWER_TIMEOUT_S)
        for contact in asked:
            answer = contact.ask({"completed": iteration}, KNOW)
            if answer is not None and answer != {"ok": True}:
                return False
            known = known and (answer is not None or contact.ended)
        return True if known else None

    def _before(self, asked: list[ArbiterClient]) -> list[ArbiterClient]:
        with self._lock:
            return [contact for contact in self._contacts.values() if contact not in asked]

    def keep(self, contact: ArbiterClient) -> None:
        """This one is not closed: its end tells the new host of the store that this process has ended."""
        with self._lock:
            self._contacts = {where: other for where, other in self._contacts.items() if other is not contact}

    def close(self) -> None:
        """More than once is fine."""
        with self._lock:
            if self.closing.is_set():
                return
            self.closing.set()
        os.eventfd_write(self._stop, 1)
        if self._thread is not None:
            self._thread.join()
        self._forget()
        os.close(self._stop)

    def _everybody(self) -> list[ArbiterClient]:
        return [*self._contacts.values(), *([self._host] if self._host is not None else [])]

    def _forget(self) -> None:
        for contact in self._everybody():
            contact.socket.close()
        self._contacts, self._host = {}, None


class ArbiterClient:
    """A connection to one arbiter.

    Args:
        host, port: a numeric address.
        key: which the arbiter wants to hear, see `ArbiterServer`.
        stop: a descriptor; whatever is going on here ends when it can be read.
    """

    def __init__(self, host: str, port: int, key: str, stop: int) -> None:
        self.host, self.port, self._key = host, port, key
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        #: the arbiter knows who is here
        self.is_made = False
        #: the other end has certainly ended
        self.ended = False
        self.stop, self._lines = stop, Lines(MAX_MESSAGE_BYTES)
        #: of the last message. An answer has that of its question, so one that comes too late is for no later question
        self._number = 0

    def connect(self, member: int) -> None:
        """Sets `is_made`, or `ended`, or neither where it does not answer."""
        with contextlib.suppress(OSError):
            error = self.socket.connect_ex(lookup(self.host, self.port)[0][2])
            if error == errno.EINPROGRESS:
                if not self._ready(select.POLLOUT, CONNECT_TIMEOUT_S):
                    return
                error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self.ended = error in ENDED
            hello = {"hello": member, "key": self._key}
            self.is_made = not error and self.ask(hello, CONNECT_TIMEOUT_S) == {"ok": True}

    def has_ended(self) -> bool:
        """Whether the other end has closed it; it says nothing without being asked."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Send a line and wait for its answer; None where none comes in time, or the other end has ended."""
        until = clock.monotonic() + seconds
        try:
            self._send(message, until)
            while (left := until - clock.monotonic()) > 0:
                if not self._ready(select.POLLIN, min(left, SLICE)):
                    continue
                data = self.socket.recv(1 << 16)
                self.ended = not data
                for answer in self._lines.take(data):
                    if answer.pop("n", self._number) == self._number:  # it is sent away without a number
                        return answer
                if self.ended:
                    return None
        except TimeoutError:
            return None
        except OSError as error:
            self.ended = error.errno in ENDED
        return None

    def say(self, message: dict[str, Any], seconds: float) -> None:
        """Send a line; an answer to it is not waited for."""
        with contextlib.suppress(OSError):
            self._send(message, clock.monotonic() + seconds)

    def _send(self, message: dict[str, Any], until: float) -> None:
        self._number += 1
        data = json.dumps({**message, "n": self._number}).encode() + b"\n"
        while data:
            if not self._ready(select.POLLOUT, max(0.0, until - clock.monotonic())):
                raise TimeoutError
            data = data[self.socket.send(data, socket.MSG_NOSIGNAL) :]

    def _ready(self, what: int, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self.socket, what)
        poll.register(self.stop, select.POLLIN)
        ready = dict(poll.poll(milliseconds(seconds)))
        if self.stop in ready:
            raise OSError("the call has ended")
        return bool(ready)


#: a forked child must not hold a contact open when its parent has ended
_open: weakref.WeakSet[ArbiterClients] = weakref.WeakSet()


def _close_in_child() -> None:
    for contacts in list(_open):
        contacts._forget()


os.register_at_fork(after_in_child=_close_in_child)
