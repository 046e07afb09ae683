"""An arbiter's desk and the contacts of training processes, over real sockets, without ranks."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from inprocess.exception import OptionError
from inprocess.failover import arbiter_client as arbiter
from inprocess.failover.arbiter_client import ArbiterClients
from inprocess.failover.arbiter_server import ArbiterServer
from inprocess.failover.client import FailoverClient
from inprocess.failover.rules import Arbiter
from inprocess.monitor.configuration import MonitorConfig
from inprocess.protocol.messages import FailoverOutcome, Verdict, Vote
from inprocess.stores.spec import StoreSpec
from inprocess.system import server as system_server
from inprocess.system.clock import monotonic

#: a ceiling, not a duration (seconds)
SOON = 20.0
PORT = 29500
KEY = "0123"
#: what a member says first
HELLO = b'{"hello": 1, "key": "0123", "n": 1}\n'


class Standby:
    """A desk, and what it has told its monitor."""

    def __init__(
        self,
        member: int = 2,
        serve: Callable[[Verdict], int] = lambda verdict: PORT,
        heard: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.where: tuple[str, int] = self.listener.getsockname()
        self.left: list[int] = []
        self.changed = threading.Event()
        self.arbiter = Arbiter(60.0, 60.0)
        self.server = ArbiterServer(
            self.listener, member, self.arbiter, heard, serve, self.left.append, self.changed.set
        )
        self.server.key = KEY
        self.server.start()

    def await_gone(self, *members: int) -> None:
        while self.server.gone != {*members}:
            assert self.changed.wait(SOON)
            self.changed.clear()

    def close(self) -> None:
        self.server.close()


@pytest.fixture
def standby() -> Iterator[Callable[..., Standby]]:
    made: list[Standby] = []

    def make(*args: Any, **kwargs: Any) -> Standby:
        made.append(Standby(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def contacts() -> Iterator[Callable[..., ArbiterClients]]:
    """The contacts of a member with some standbys, once they are made."""
    made: list[ArbiterClients] = []

    def make(member: int, *standbys: Standby, key: str = KEY, host: Standby | None = None) -> ArbiterClients:
        every = [*standbys, *([host] if host is not None else [])]
        where = {number: (*each.where, key) for number, each in enumerate(every, start=10)}
        server = 9 + len(every) if host is not None else -1
        made.append(ArbiterClients(server, lambda other, _: where[other]))
        made[-1].make(member, dict.fromkeys(where, "somewhere"))
        assert made[-1].some is bool(standbys) or key != KEY
        return made[-1]

    yield make
    for each in made:
        each.close()


def vote(slot: int, last: int = 2) -> Vote:
    return Vote(slot, 3, ((0, last),))


def in_threads(*actions: Callable[[], Any]) -> list[Any]:
    """What each of them answers, done at once."""
    answers: list[Any] = [None] * len(actions)

    def run(number: int) -> None:
        answers[number] = actions[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    return answers


def verdicts(answers: list[Any]) -> list[Verdict]:
    return [verdict for verdict, _ in answers]


def test_who_is_in_contact_need_not_be_looked_for(standby, contacts) -> None:
    """In most restarts nothing is read of where the arbiters are."""
    one, other = standby(), standby()
    mine = contacts(0, one, host=other)
    assert mine.have_met((10, 11))
    assert not mine.have_met((11, 10))
    assert not mine.have_met((10,))
    other.close()
    assert not mine.have_met((10, 11))


def test_a_restart_asks_the_store_for_no_arbiter_in_contact(standby, contacts) -> None:
    one, host = standby(), standby()
    config = MonitorConfig(member=10, roster=(10, 11), store="", store_host=11, standby_stores=1)
    client = FailoverClient(StoreSpec(), config, Mock(), moved=False, before=None)
    client._contacts.close()
    client._contacts = contacts(9, one, host=host)
    store, membership = Mock(**{"compare_set.return_value": b"-"}, underlying_store=None), config.membership()
    client.meet(membership, store)
    assert not store.mock_calls
    one.close()
    client.meet(membership, store)
    assert [call.args[0] for call in store.compare_set.mock_calls] == ["standby/10", "standby/11"]


def test_who_has_no_arbiter_is_looked_for_again(standby, contacts) -> None:
    """It may have one by the next iteration."""
    mine = contacts(0, standby())
    mine._find = lambda member, _: None
    mine.make(0, {10: "somewhere", 11: "-"})
    assert mine.are_made(SOON)
    assert not mine.have_met((10, 11))


def test_all_that_live_go_on(standby, contacts) -> None:
    one = standby()
    first, second, third = (contacts(member, one) for member in range(3))
    first.close()
    one.await_gone(0)
    one.server.lost()
    answers = in_threads(lambda: second.vote(vote(1), SOON), lambda: third.vote(vote(2), SOON))
    assert verdicts(answers) == [Verdict(FailoverOutcome.GO, ((1, 2),), 3, host=2, port=PORT)] * 2


def test_who_ends_after_its_vote_is_told_of(standby, contacts) -> None:
    one = standby()
    first, second = contacts(0, one), contacts(1, one)
    one.server.lost()
    in_threads(lambda: first.vote(vote(0, last=1), SOON), lambda: second.vote(vote(1, last=1), SOON))
    second.close()
    one.await_gone(1)
    assert one.left == [1]


def test_the_next_one_is_asked_where_the_first_has_ended(standby, contacts) -> None:
    gone, there = standby(), standby(member=1)
    mine = contacts(0, gone, there)
    gone.close()
    there.server.lost()
    verdict, contact = mine.vote(vote(0, last=0), SOON)
    assert (verdict.outcome, verdict.host, contact.port) == (FailoverOutcome.GO, 1, there.server.port)


def test_one_that_has_ended_is_forgotten(standby, contacts) -> None:
    """Whoever looks at it again must not find a closed socket."""
    gone, there = standby(), standby(member=1)
    asks = contacts(1, gone, there)
    gone.close()
    for again in ("once more", "and again"):
        asks.make(1, {10: again, 11: again})
        assert asks.are_made(SOON)
    assert [contact.port for contact in asks._asked()] == [there.where[1]]
    assert asks.say_completed(0)  # nobody goes on at the one that has ended


def test_the_others_are_told_who_votes_elsewhere(standby, contacts) -> None:
    """What becomes of it then says nothing there, neither to an arbiter nor to whoever serves the store."""
    one, other, host = standby(), standby(), standby(member=0)
    mine = contacts(1, one, other, host=host)
    one.server.lost()
    mine.vote(Vote(1, 3, ((1, 1),)), SOON)
    mine.close()
    for each in (other, host):
        while each.server.members:
            assert each.changed.wait(SOON)
            each.changed.clear()
        assert (each.server.elsewhere, each.server.gone) == ({1}, set())


def test_the_host_is_told_where_the_contacts_of_before_are_closed(standby, contacts) -> None:
    """The contact at which this process voted has stayed; the descriptor that would end a wait there has not:
    its number is another file's."""
    host, other = standby(member=1), standby(member=2)
    before = contacts(1, host)
    host.server.lost()
    _, contact = before.vote(Vote(1, 3, ((1, 1),)), SOON)
    before.keep(contact)
    before.close()
    where = {10: (*other.where, KEY)}
    with open(os.devnull), contextlib.closing(ArbiterClients(-1, lambda member, _: where[member], contact)) as mine:
        mine.make(1, dict.fromkeys(where, "somewhere"))
        assert mine.some
        other.server.lost()
        assert mine.vote(Vote(1, 4, ((1, 1),)), SOON) is not None
    while host.server.elsewhere != {1}:
        assert host.changed.wait(SOON)
        host.changed.clear()


def test_an_answer_that_comes_too_late_is_for_no_later_question(standby, contacts, monkeypatch) -> None:
    one = standby()
    mine = contacts(0, one)
    contact = mine._asked()[0]
    answers, late = one.server._answer, []
    monkeypatch.setattr(one.server, "_answer", lambda *said: late.append(said) is None)
    assert contact.ask({"ping": 1}, 0.05) is None
    monkeypatch.setattr(one.server, "_answer", lambda *said: all(answers(*each) for each in [*late, said]))
    one.server.lost()
    verdict, _ = mine.vote(vote(0, last=0), SOON)
    assert verdict.outcome is FailoverOutcome.GO


def test_who_was_given_up_is_not_waited_for(standby, contacts) -> None:
    """Its host may be cut off, and then its connection never ends."""
    one = standby()
    contacts(0, one)
    assert one.server.is_needed([0])
    assert not one.server.is_needed([1, 2])


def test_whoever_votes_elsewhere_is_not_waited_for(standby, contacts) -> None:
    one, other = standby(), standby(member=1)
    mine, cut_off = contacts(1, one, other), contacts(0, one, other)
    one.server.lost()
    mine.vote(Vote(1, 3, ((1, 1),)), SOON)
    while other.server.is_needed([0, 1]):
        assert other.changed.wait(SOON)
        other.changed.clear()
    assert one.server.is_needed([0, 1])
    cut_off.close()


def test_the_host_of_the_store_is_not_asked(standby, contacts) -> None:
    host, there = standby(member=0), standby(member=1)
    mine = contacts(0, there, host=host)
    there.close()
    assert mine.vote(vote(0), SOON) is None


def test_one_that_does_not_answer_is_passed_over(standby, contacts, monkeypatch) -> None:
    """It accepts a connection and says nothing more, as a host that stands still does."""
    monkeypatch.setattr(arbiter, "ANSWER_TIMEOUT_S", 0.05)
    silent, there = standby(), standby(member=1)
    mine = contacts(0, silent, there)
    monkeypatch.setattr(silent.server, "_answer", lambda peer, message: True)
    there.server.lost()
    verdict, _ = mine.vote(vote(0, last=0), SOON)
    assert verdict.host == 1


def test_one_that_may_count_the_vote_yet_is_the_last_that_is_asked(standby, contacts) -> None:
    """Otherwise two jobs could come of it."""
    waits, there = standby(), standby(member=1)
    mine = contacts(0, waits, there)
    there.server.lost()
    assert mine.vote(vote(0, last=0), 0.1) is None
    assert there.arbiter.votes == {}


def test_completed(standby, contacts) -> None:
    one = standby()
    first, second = contacts(0, one), contacts(1, one)
    assert first.say_completed(3) is True
    first.close()
    one.server.lost()
    verdict, _ = second.vote(vote(1, last=1), SOON)
    assert (verdict.outcome, verdict.iteration) == (FailoverOutcome.COMPLETED, 3)


def test_completed_where_one_has_ended_before_a_contact_was_made(standby, contacts) -> None:
    ended, there = standby(), standby()
    ended.close()
    assert contacts(0, ended, there).say_completed(3) is True


def test_completed_where_one_cannot_be_reached() -> None:
    """An unreachable network does not say that nobody goes on there."""
    mine = ArbiterClients(-1, lambda other, _: ("255.255.255.255", 9, KEY))
    mine.make(0, {10: "somewhere"})
    assert mine.say_completed(3) is None
    mine.close()


def test_completed_where_not_everybody_can_be_told(standby, contacts, monkeypatch) -> None:
    monkeypatch.setattr(arbiter, "KNOW", 0.05)
    ended, silent, there = standby(), standby(), standby()
    first, second = contacts(0, ended, there), contacts(1, silent, there)
    ended.close()
    monkeypatch.setattr(silent.server, "_answer", lambda peer, message: True)
    assert first.say_completed(3) is True
    assert second.say_completed(3) is None
    assert there.arbiter.completed == {0, 1}


def test_too_late_to_be_completed(standby, contacts) -> None:
    one = standby()
    first, second = contacts(0, one), contacts(1, one)
    one.server.lost()
    in_threads(lambda: first.vote(vote(0, last=1), SOON), lambda: second.vote(vote(1, last=1), SOON))
    assert first.say_completed(3) is False


@pytest.mark.parametrize("kind", [OptionError, OSError, RuntimeError])
def test_a_host_that_cannot_serve_refuses(standby, contacts, kind: type[Exception]) -> None:
    def serve(verdict: Verdict) -> int:
        raise kind("no port is left")

    one = standby(serve=serve)
    mine = contacts(0, one)
    one.server.lost()
    verdict, _ = mine.vote(vote(0, last=0), SOON)
    assert verdict.outcome is FailoverOutcome.REFUSED and "no port is left" in verdict.reason


def test_members_of_another_call_are_sent_away(standby, contacts) -> None:
    one = standby()
    assert not contacts(0, one, key="another").some
    assert one.server.gone == set()


@pytest.mark.parametrize(
    "lines",
    [
        b"no json\n",
        b'{"vote": "{}"}\n',
        b'{"hello": "x", "key": "0123", "n": 1}\n',
        b'{"hello": 0, "key": "0123", "n": 1}\n{"vote": "{\\"slot\\": -1}", "n": 2}\n',
        b'{"hello": 0, "key": "0123", "n": 1}\n{"vote": 3, "n": 2}\n',
        b"[" * 10000 + b"\n",
        b"\xff" * 70000,
    ],
)
def test_what_is_none_of_ours_ends_nothing_but_itself(standby, contacts, lines: bytes) -> None:
    one = standby()
    with socket.create_connection(one.where) as stranger:
        stranger.sendall(lines)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(SOON)
        while stranger.recv(1 << 16):
            pass
    mine = contacts(1, one)
    one.server.lost()
    verdict, _ = mine.vote(Vote(1, 3, ((1, 1),)), SOON)
    assert verdict.outcome is FailoverOutcome.GO


def test_who_is_sent_away_may_live(standby, contacts) -> None:
    """A member whose connection breaks, or that says what nobody understands, has not ended."""
    one = standby()
    with socket.create_connection(one.where) as odd:
        odd.sendall(b'{"hello": 0, "key": "0123", "n": 1}\n{"vote": "?", "n": 2}\n')
        odd.settimeout(SOON)
        while odd.recv(1 << 16):
            pass
    assert one.changed.wait(SOON)
    assert one.server.met
    assert one.server.gone == set()


def test_a_standby_that_says_something_else_is_passed_over(standby, contacts, monkeypatch) -> None:
    odd, there = standby(), standby(member=1)
    mine = contacts(0, odd, there)
    monkeypatch.setattr(odd.server, "_settle", lambda: None)
    monkeypatch.setattr(
        odd.server,
        "_answer",
        lambda peer, message: odd.server._tell(peer, message["n"], verdict={"outcome": "none"}) or True,
    )
    there.server.lost()
    verdict, _ = mine.vote(vote(0, last=0), SOON)
    assert verdict.host == 1


def test_who_stood_by_before_is_told_of_the_completion(standby, contacts) -> None:
    """It is not waited for: it may stand still."""
    before, now = standby(), standby()
    mine = contacts(0, before)
    mine._find = lambda member, published: (*now.where, KEY)
    mine.make(0, {11: "elsewhere"})
    assert mine.some
    goes_on, answer = threading.Event(), before.server._answer
    before.server._answer = lambda peer, message: goes_on.wait(SOON) and answer(peer, message)
    assert mine.say_completed(7) is True
    mine.close()
    before.changed.clear()
    goes_on.set()
    assert before.changed.wait(SOON)
    assert (before.server.gone, before.arbiter.completed, before.arbiter.last) == (set(), {0}, 7)


@pytest.mark.parametrize("heard", [True, False])
def test_a_standby_that_stood_still_does_not_go_on_alone(standby, contacts, heard: bool) -> None:
    """The others have ended when it wakes up: whether they had completed without it, it cannot know."""
    one = standby(heard=lambda: monotonic() - (59.0 if heard else 61.0))
    first, second = contacts(0, one), contacts(2, one)
    one.changed.clear()
    first.close()
    assert one.changed.wait(SOON)
    assert one.server.gone == ({0} if heard else set())
    second.close()


def test_a_forked_child_does_not_keep_its_parent_alive(standby, contacts) -> None:
    """A worker of a DataLoader that is still there when the training process has ended."""
    one = standby()
    mine = contacts(0, one)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        mine.close()
        one.await_gone(0)
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


def test_contacts_are_made_once(standby, contacts) -> None:
    one = standby()
    mine = contacts(0, one)
    mine.make(0, {10: "somewhere"})
    assert mine.some
    assert len(one.server.clients) == 1


def test_the_end_of_a_call_does_not_wait_for_a_host_that_does_not_answer() -> None:
    """Its queue of connections is full, and drops what else comes."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        mine = ArbiterClients(-1, lambda other, _: (*full.getsockname(), KEY))
        mine.make(0, {10: "somewhere"})
        mine.close()
        for filler in fillers:
            filler.close()
    assert not mine.some


# --- strangers, and members that do not read ---------------------------------------------------------------------


def hello(one: Standby, line: bytes = HELLO) -> socket.socket:
    """A connection over which this has been said."""
    made = socket.create_connection(one.where, SOON)
    made.sendall(line)
    return made


def answer(connection: socket.socket) -> bytes:
    connection.settimeout(SOON)
    return connection.recv(1 << 16)


def test_who_asks_without_end_and_takes_no_answer_keeps_nobody_waiting(standby, contacts) -> None:
    """A second for each of them, before."""
    one = standby()
    with contextlib.ExitStack() as stack:
        for number in range(10):
            full = stack.enter_context(hello(one, b'{"hello": %d, "key": "0123", "n": 1}\n' % (10 + number)))
            full.setblocking(False)
            with contextlib.suppress(BlockingIOError, ConnectionError):  # nothing more goes in, or it is sent away
                while True:
                    full.send(b'{"ping": 1, "n": 2}\n' * 5000)
        begin = monotonic()
        assert contacts(1, one).some
        assert monotonic() - begin < 5.0


def test_one_connection_is_one_member(standby) -> None:
    """Half a million hellos in six seconds, before; each was kept."""
    one = standby()
    with hello(one, HELLO + b'{"hello": 2, "key": "0123", "n": 1}\n') as twice:
        while answer(twice):
            pass
    assert one.arbiter.gone == set() and one.server.members == []


@pytest.mark.parametrize(
    "line",
    [b'{"hello": 1, "call": "call", "n": 1}', b'{"hello": 1, "key": "\xc3\xa9", "n": 1}', b'{"ping": 1, "n": 1}'],
)
def test_who_does_not_know_the_key_is_no_member(standby, line: bytes) -> None:
    one = standby()
    with hello(one, line + b"\n") as stranger:
        assert answer(stranger) == b""
    assert not one.server.met


@pytest.mark.parametrize("member", [-1, 1 << 24])
def test_a_member_that_cannot_be(standby, member: int) -> None:
    one = standby()
    with hello(one, b'{"hello": %d, "key": "0123", "n": 1}\n' % member) as stranger:
        assert answer(stranger) == b""


def test_strangers_crowd_out_nobody(standby, contacts, monkeypatch) -> None:
    """The oldest one goes, and members stay: those that were there, and those that come."""
    monkeypatch.setattr(system_server, "STRANGERS", 8)
    one = standby()
    with hello(one) as before, contextlib.ExitStack() as stack:
        assert answer(before) == b'{"ok": true, "n": 1}\n'
        strangers = [stack.enter_context(socket.create_connection(one.where, SOON)) for _ in range(30)]
        mine = contacts(2, one)
        assert mine.some
        before.sendall(b'{"ping": 1, "n": 2}\n')
        assert answer(before) == b'{"ok": true, "n": 2}\n'
        assert [answer(each) for each in strangers[:22]] == [b'{"ok": false}\n'] * 22
        # the contact is a stranger, too, until the server has read who it is: it may have taken the place of one more
        assert len(one.server.clients) in (7 + 2, 8 + 2)


def test_a_stranger_has_little_time_and_a_member_has_all(standby, monkeypatch) -> None:
    monkeypatch.setattr(system_server, "STRANGER_S", 0.05)
    one = standby()
    with hello(one) as member, socket.create_connection(one.where, SOON) as stranger:
        assert answer(member) == b'{"ok": true, "n": 1}\n'
        assert answer(stranger) == b'{"ok": false}\n'
        member.sendall(b'{"ping": 1, "n": 2}\n')
        assert answer(member) == b'{"ok": true, "n": 2}\n'


def test_an_arbiter_that_refuses_a_member_has_not_ended() -> None:
    """It may be asked again; whoever takes it for ended returns without having told it."""
    stop = os.eventfd(0)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        contact = arbiter.ArbiterClient(*busy.getsockname(), KEY, stop)
        connecting = threading.Thread(target=contact.connect, args=(1,))
        connecting.start()
        with busy.accept()[0] as accepted:
            accepted.sendall(b'{"ok": false}\n')
        connecting.join(SOON)
    assert (contact.is_made, contact.ended) == (False, False)
    contact.socket.close()
    os.close(stop)


# --- no descriptor left -------------------------------------------------------------------------------------------


class Exhausted:
    """A listener whose accept() fails so often before it works."""

    def __init__(self, listener: socket.socket, number: int, times: int) -> None:
        self._listener, self._number, self.calls, self._times = listener, number, 0, times
        self.fileno, self.getsockname, self.close = listener.fileno, listener.getsockname, listener.close
        self.setblocking = listener.setblocking

    def accept(self) -> Any:
        self.calls += 1
        if self.calls <= self._times:
            raise OSError(self._number, os.strerror(self._number))
        return self._listener.accept()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_accept_is_tried_again_after_a_pause(standby, monkeypatch, caplog, number: int) -> None:
    """Not at once: the connection stays in the queue. Its member comes in as soon as a descriptor is free."""
    monkeypatch.setattr(system_server, "EXHAUSTED_PAUSE_S", 0.05)
    made = standby()
    made.server.close()
    listener = Exhausted(socket.create_server(("127.0.0.1", 0)), number, times=3)
    told = (made.left.append, made.changed.set)
    desk = ArbiterServer(listener, 2, made.arbiter, lambda: None, lambda verdict: PORT, *told)
    desk.key = KEY
    desk.start()
    begun = monotonic()
    with socket.create_connection(listener.getsockname(), SOON) as member:
        member.sendall(HELLO)
        member.settimeout(SOON)
        assert member.recv(100) == b'{"ok": true, "n": 1}\n'
    took = monotonic() - begun
    desk.close()
    assert listener.calls == 4
    assert took >= 3 * 0.05
    (line,) = [record.getMessage() for record in caplog.records if "cannot reach this standby" in record.getMessage()]
    assert os.strerror(number) in line or "RLIMIT_NOFILE" in line or "fs.file-max" in line


def test_a_real_limit_of_descriptors(standby, monkeypatch, caplog) -> None:
    """The limit is that of this process, so it is lowered below what is open for as long as the desk needs one more."""
    monkeypatch.setattr(system_server, "EXHAUSTED_PAUSE_S", 0.02)
    told = threading.Event()
    monkeypatch.setattr(arbiter.log, "error", functools.partial(_then, arbiter.log.error, told))
    made = standby()
    with socket.socket() as member:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(member.fileno())  # the lowest free one
        os.close(lowest)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            member.connect(made.where)
            member.sendall(HELLO)
            assert told.wait(SOON)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        member.settimeout(SOON)
        assert member.recv(100) == b'{"ok": true, "n": 1}\n'
    (line,) = [record.getMessage() for record in caplog.records if "cannot reach this standby" in record.getMessage()]
    assert f"of {lowest} descriptors open (RLIMIT_NOFILE" in line and "ulimit -n" in line


def _then(function: Callable[..., None], event: threading.Event, *args: Any) -> None:
    function(*args)
    event.set()
