"""What is particular to the store in an etcd cluster: servers that go, keys that expire, who may come in."""

from __future__ import annotations

import concurrent.futures
import http.client
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inprocess.etcd import job as etcd_job
from inprocess.etcd.cluster import Expired, range_of
from inprocess.etcd.gateway import Gateway, Refused
from inprocess.etcd_store import EtcdStore
from inprocess.exception import OptionError, StoreLost
from inprocess.protocol.messages import JoinMode
from inprocess.protocol.ops import Add, Claim, Set, Verb, Wait
from inprocess.stores import driver
from inprocess.stores import tcp as store
from inprocess.stores.connections import cut
from inprocess.stores.spec import JobIdentity
from tests.harness.etcd import ETCD, MISSING, EtcdCluster

pytestmark = pytest.mark.skipif(not ETCD, reason=MISSING)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., EtcdCluster]]:
    """Starts a cluster that the test may break."""
    started: list[EtcdCluster] = []

    def start(*args: Any, **kwargs: Any) -> EtcdCluster:
        started.append(EtcdCluster(tmp_path, *args, **kwargs))
        return started[-1]

    yield start
    for cluster in started:
        cluster.close()


@pytest.fixture
def make(shared: EtcdCluster, tmp_path: Path) -> Callable[..., EtcdStore]:
    """A connection to a namespace of the test's own."""
    return lambda **more: EtcdStore(**{"endpoints": shared.endpoints, "namespace": tmp_path.name, "timeout": 20} | more)


def execute(op: Any, connection: Any) -> Any:
    def verb() -> Verb[Any]:
        return (yield op)

    return driver.execute(verb(), connection)


# --- servers that go ----------------------------------------------------------------------------------------------


def test_a_server_that_goes_away(start: Callable[..., EtcdCluster]) -> None:
    """Operations fail with StoreLost, also one that waits."""
    cluster = start()
    first, second = (EtcdStore(cluster.endpoints, "job", patience=0.4) for _ in range(2))
    execute(Set("a", "1"), first)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(execute, Wait("never"), first)
        execute(Set("b", "1"), second)
        cluster.kill()
        with pytest.raises(StoreLost, match=r"'never'.*no endpoint of etcd answers"):
            waiting.result(20)
    for op in (Claim("a", "2"), Add("n", 1), Wait("never", 60.0)):
        with pytest.raises(StoreLost, match="no endpoint of etcd answers"):
            execute(op, second)


def test_a_server_that_stands_still(start: Callable[..., EtcdCluster]) -> None:
    """No answer is no end of a wait: that would be taken for a key that nobody has set."""
    cluster = start()
    connection = EtcdStore(cluster.endpoints, "job", patience=0.4, ttl=3)
    execute(Set("a", "1"), connection)
    cluster.signal(signal.SIGSTOP)
    try:
        for op in (Set("a", "2"), Wait("never", 60.0)):
            with pytest.raises(StoreLost, match="no endpoint of etcd answers"):
                execute(op, connection)
    finally:
        cluster.signal(signal.SIGCONT)


def test_the_next_endpoint_is_used(start: Callable[..., EtcdCluster]) -> None:
    """Of three members each is lost in turn and comes back; who waits, waits on."""
    cluster = start(3)
    connections = [EtcdStore(cluster.endpoints, "job") for _ in range(3)]
    for number, connection in enumerate(connections):
        connection._cluster._current = number
        execute(Set("a", "0"), connection)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(execute, Wait("end"), connection) for connection in connections]
        writer = EtcdStore(cluster.endpoints, "job")
        for member in range(3):
            cluster.kill(member)
            assert execute(Add("n", 1), writer) == member + 1
            cluster.start(member)
        execute(Set("end", "1"), writer)
        assert [each.result(20) for each in waiting] == [b"1"] * 3


def test_several_endpoints_in_one_text(shared: EtcdCluster, tmp_path: Path) -> None:
    """As they stand in an environment variable; nobody listens at the first one."""
    address = shared.endpoints[0].removeprefix("http://")
    connection = EtcdStore(f"127.0.0.1:1, {address}", tmp_path.name)
    connection._cluster._current = 0
    connection.set("a", "1")
    assert connection.get("a") == b"1"


def lost_after(make: Callable[..., EtcdStore], error: BaseException) -> tuple[EtcdStore, list[Any]]:
    """A connection, and what is lost next: called with each operation after it was carried out, before it fails."""
    connection, lose = make(), []
    (client,) = connection._cluster._members
    send = client.post

    def post(*args: Any, **kwargs: Any) -> Any:
        answer = send(*args, **kwargs)
        if lose:
            lose.pop()()
            raise error
        return answer

    client.post = post
    return connection, lose


LOST = {
    "reset": lambda: ConnectionResetError("the connection was reset"),
    "cut short": lambda: http.client.IncompleteRead(b"{"),
    "stopping": lambda: Refused(
        '{"error":"etcdserver: server stopped","code":14,"message":"etcdserver: server stopped"}'
    ),
    "a proxy's": lambda: Refused("<html><h1>502 Bad Gateway</h1></html>", 502),
}


@pytest.mark.parametrize("amount", [1, 10])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("how", LOST)
def test_an_answer_that_is_lost(make: Callable[..., EtcdStore], how: str, times: int, amount: int) -> None:
    """The endpoint dies after it has carried an operation out: sent again, it is carried out once."""
    connection, lose = lost_after(make, LOST[how]())
    other = make()
    assert connection.add("n", 1) == 1
    lose += [lambda: other.add("n", amount)] * times
    assert connection.add("n", 1) == 2
    lose += [lambda: other.add("n", amount)] * times
    assert connection.compare_set("key", "", "mine") == b"mine"
    assert connection.add("n", 0) == 2 + 2 * times * amount
    before = connection.add("m", 7)
    lose.append(lambda: None)
    assert (before, connection.add("n", 3), connection.add("n", 1)) == (
        7,
        5 + 2 * times * amount,
        6 + 2 * times * amount,
    )


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("amount", [1, 10])
def test_after_an_addition_that_was_given_up(make: Callable[..., EtcdStore], amount: int, is_there: bool) -> None:
    """It was carried out, and its connection knows of no answer: the next addition is one of its own."""
    connection, lose = lost_after(make, LOST["reset"]())
    connection.add("n", amount)
    if is_there:
        make().add("m", 1)
    transact, connection._cluster.patience = connection._cluster.transact, 0.0

    def transacts(*args: Any) -> Any:
        lose.extend([lambda: None] if args[0] else [])  # the one that adds
        return transact(*args)

    connection._cluster.transact = transacts  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no endpoint of etcd answers"):
        connection.add("n", amount)
    connection._cluster.transact, connection._cluster.patience = transact, 20.0  # type: ignore[method-assign]
    assert connection.add("m", amount) == amount + is_there
    assert [connection.add("m", 0), connection.add("n", 0)] == [amount + is_there, 2 * amount]


def test_the_answer_to_a_new_generation_is_lost(make: Callable[..., EtcdStore]) -> None:
    """Sent again, it finds its own: it must not be ended as one that came too late, others may be in it already."""
    connection, lose = lost_after(make, LOST["reset"]())
    lease = connection._cluster.grant(20)
    connection._cluster.grant = lambda ttl: lease  # type: ignore[method-assign]
    standing: list[str] = []
    generations, transact = connection._generations, connection._cluster.transact

    def transacts(*args: Any) -> Any:
        if args[0]:  # the one that makes it
            lose.append(lambda: standing.append(make()._generations.standing()))
        return transact(*args)

    connection._cluster.transact = transacts  # type: ignore[method-assign]
    assert generations.current() == lease
    assert standing == [lease]


def await_refusals(connection: EtcdStore, count: int) -> threading.Event:
    """Set once this connection was refused so often."""
    came, left = threading.Event(), [count]
    give_up = connection._cluster._give_up_at

    def noticed(deadline: float, error: Any) -> None:
        left[0] -= 1
        if left[0] <= 0:
            came.set()
        give_up(deadline, error)

    connection._cluster._give_up_at = noticed  # type: ignore[method-assign]
    return came


@pytest.mark.parametrize("members", [1, 3])
def test_the_whole_cluster_starts_again(start: Callable[..., EtcdCluster], members: int) -> None:
    """Within ``patience``, on its data: each operation is carried out once, who waits waits on, the lease stands."""
    cluster = start(members)
    connections = [EtcdStore(cluster.endpoints, "job", patience=60, ttl=20) for _ in range(6)]
    waits, *others = connections
    execute(Add("n", 1), waits)
    for connection in others:
        execute(Claim("who", str(id(connection))), connection)
    refused = [await_refusals(connection, 2 * members) for connection in connections]
    with ThreadPoolExecutor(len(connections)) as pool:
        waiting = pool.submit(execute, Wait("end", 120.0), waits)
        cluster.kill_all()
        doing = [pool.submit(execute, Add("n", 1), connection) for connection in others[:-1]]
        claiming = pool.submit(execute, Claim("key", "mine"), others[-1])
        assert all(event.wait(60) for event in refused)
        assert not any(each.done() for each in (waiting, *doing, claiming))
        cluster.start_all()
        assert sorted(each.result(60) for each in doing) == [2, 3, 4, 5]
        assert claiming.result(60) == b"mine"
        execute(Set("end", "1"), others[0])
        assert waiting.result(60) == b"1"
        assert execute(Add("n", 0), waits) == 5


def test_beyond_patience_it_is_a_clear_error(start: Callable[..., EtcdCluster]) -> None:
    cluster = start()
    connection = EtcdStore(cluster.endpoints, "job", patience=0.4)
    execute(Set("a", "1"), connection)
    cluster.kill()
    begun = time.monotonic()
    with pytest.raises(StoreLost, match=r"no endpoint of etcd answers \(.*within 0.4 s \(patience\).*refused"):
        execute(Set("a", "2"), connection)
    assert time.monotonic() - begun >= 0.4


def test_a_waiting_thread_is_cut_off(make: Callable[..., EtcdStore]) -> None:
    connection = make()
    connection.set("a", "1")
    watching = threading.Event()
    send = connection._cluster._first_event

    def noticed(*told: Any) -> Any:
        watching.set()
        return send(*told)

    connection._cluster._first_event = noticed  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(execute, Wait("never"), store.PrefixStore("call", connection))
        assert watching.wait(20)
        cut(store.PrefixStore("call", connection))
        with pytest.raises(StoreLost, match="was cut"):
            waiting.result(20)


# --- many at once -------------------------------------------------------------------------------------------------


def test_those_who_count_at_once_do_not_disturb_each_other(make: Callable[..., EtcdStore]) -> None:
    """One transaction each: of many ranks that arrive at once none has to try again."""
    connections, sent = [make() for _ in range(8)], []
    for connection in connections:
        connection.set("there", "1")
        send = connection._cluster._send

        def sends(*args: Any, send: Any = send) -> Any:
            sent.append(args)
            return send(*args)

        connection._cluster._send = sends  # type: ignore[method-assign]
    with ThreadPoolExecutor(len(connections)) as pool:
        counted = list(pool.map(lambda each: [each.add("n", 1) for _ in range(10)], connections))
    assert sorted(number for each in counted for number in each) == list(range(1, 81))
    assert len(sent) == 80


def test_a_count_is_a_number_like_any_other(make: Callable[..., EtcdStore]) -> None:
    """However it was made: it is read, waited for, compared, set, added to and deleted."""
    connection = make()
    assert [connection.add("n", 1) for _ in range(3)] == [1, 2, 3]
    assert connection.get("n") == b"3"
    assert connection.multi_get(["n"]) == [b"3"]
    assert connection.inprocess_read("n") == b"3"
    assert connection.compare_set("n", "2", "9") == b"3"
    assert connection.compare_set("n", "3", "9") == b"9"
    assert [connection.add("n", 1), connection.add("n", -4), connection.add("n", 1)] == [10, 6, 7]
    assert connection.delete_key("n")
    assert [connection.add("n", 1), connection.add("n", 5)] == [1, 6]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(make().get, "later")
        connection.add("later", 1)
        assert waiting.result(20) == b"1"


def overtaken(connection: EtcdStore, write: Callable[[], Any]) -> list[dict[str, Any]]:
    """The watches of this connection, before each of which somebody writes."""
    (member,) = connection._cluster._members
    stream, requests = member.stream, []

    def streams(path: str, body: Any, *more: Any) -> Any:
        requests.append(body["create_request"])
        write()
        return stream(path, body, *more)

    member.stream = streams  # type: ignore[method-assign]
    return requests


def test_what_is_written_between_the_look_and_the_watch(make: Callable[..., EtcdStore]) -> None:
    """The key itself is found at once. The watch begins now: etcd serves those that begin in the past only ten times a
    second, which a restart would wait for."""
    connection, other = make(), make()
    requests = overtaken(connection, lambda: other.set("key", "1"))
    assert connection.get("key") == b"1"
    assert len(requests) == 1
    assert "start_revision" not in requests[0]


def test_a_watch_that_a_write_overtakes_while_it_begins(make: Callable[..., EtcdStore]) -> None:
    """etcd counts it among those that begin in the past. Until it has caught up the key is looked for."""
    connection, other = make(), make()
    other.set("noise", "1")

    class Silent:
        looks = 0

        def comes_within(self, seconds: float) -> bool:
            self.looks += 1
            if self.looks == 2:
                other.set("key", "1")
            return False

    silent: Any = Silent()
    found = connection._cluster._read_again(connection._place("key"), 1, silent)
    assert found is not None
    assert (found.value, silent.looks) == (b"1", 2)


def test_a_connection_that_the_server_has_closed_is_made_anew(start: Callable[..., EtcdCluster]) -> None:
    """Before the next question, which is asked once."""
    cluster = start()
    connection = EtcdStore(cluster.endpoints, "job", patience=20)
    connection.set("a", "1")
    cluster.kill()
    cluster.start(0)
    connection._cluster.patience = 0.0
    connection.set("a", "2")
    assert connection.get("a") == b"2"


# --- keys that expire ---------------------------------------------------------------------------------------------


def test_keys_expire_when_nobody_uses_them(make: Callable[..., EtcdStore]) -> None:
    connection, watcher = make(ttl=3), make(ttl=3)
    connection.set("a", "1")
    job = range_of(watcher._generations.job)
    while (done := watcher._cluster.transact([], [job])).answers[0] is not None:
        watcher._cluster.watch_below(watcher._generations.job, done.revision, 20.0)
    with pytest.raises(Expired, match="expired"):
        connection.set("a", "2")
    assert watcher.inprocess_read("a") is None  # a generation of its own


def test_a_wait_keeps_the_keys(make: Callable[..., EtcdStore], monkeypatch: pytest.MonkeyPatch) -> None:
    connection = make(ttl=3, timeout=1.2)
    connection.set("a", "1")
    kept: list[str] = []
    renew = connection._cluster.renew
    monkeypatch.setattr(connection._cluster, "renew", lambda lease: kept.append(lease) or renew(lease))
    with pytest.raises(RuntimeError, match="wait timeout"):
        connection.get("never")
    assert kept == [connection._lease]


# --- who comes in -------------------------------------------------------------------------------------------------


class Members:
    """What the wrapper does at the beginning of a call, and at the end of a process, for processes of any name."""

    def __init__(self, namespace: str, endpoints: list[str]) -> None:
        self.kwargs = {"endpoints": endpoints, "namespace": namespace, "ttl": 20}

    def come(
        self,
        rank: int,
        name: str,
        entry: JoinMode = JoinMode.FOUND,
        members: tuple[int, ...] = (0, 1),
        timeout: float = 20.0,
    ) -> tuple[dict[str, Any], bool]:
        seat = self.seat(rank, name, entry, members)
        return EtcdStore.inprocess_enter(self.kwargs, seat, timeout)

    def begin(self, names: str) -> EtcdStore:
        """A job of processes of these names, one letter each."""
        members = tuple(range(len(names)))
        with ThreadPoolExecutor(len(names)) as pool:
            found = [pool.submit(self.come, rank, name, members=members) for rank, name in enumerate(names)]
            (kwargs, founds), *others = [each.result(20) for each in found]
        assert founds and all(other == (kwargs, True) for other in others)
        return EtcdStore(**kwargs)

    def seat(
        self,
        rank: int,
        name: str,
        entry: JoinMode,
        members: tuple[int, ...],
        last: tuple[str, tuple[str, ...]] = ("", ()),
    ) -> JobIdentity:
        return JobIdentity(rank, name, "run.0", entry, lambda: members, lambda: last)

    def leave(self, connection: EtcdStore, name: str, everybody: tuple[str, ...]) -> None:
        seat = self.seat(0, name, JoinMode.FOUND, (), (name, everybody))
        generations = EtcdStore(**self.kwargs)._generations.of("run.0")
        etcd_job._leave(lambda: generations, connection._lease, seat)


@pytest.fixture
def members(tmp_path: Path, shared: EtcdCluster, monkeypatch: pytest.MonkeyPatch) -> Members:
    monkeypatch.setattr(etcd_job, "atexit", SimpleNamespace(register=lambda *args: None))
    monkeypatch.setattr(etcd_job, "_inside", {})
    return Members(tmp_path.name, shared.endpoints)


def noted(monkeypatch: pytest.MonkeyPatch, name: str) -> threading.Semaphore:
    """Released whenever a process comes to this method of `Entrance`."""
    waits, method = threading.Semaphore(0), getattr(etcd_job.Entrance, name)

    def telling(*args: Any) -> Any:
        waits.release()
        return method(*args)

    monkeypatch.setattr(etcd_job.Entrance, name, telling)
    return waits


def test_the_ranks_come_into_one_generation(members: Members) -> None:
    job = members.begin("ab")
    assert members.come(0, "a") == members.come(1, "b")  # the next call
    assert members.come(0, "a")[0]["generation"] == job._generation


def test_a_job_that_ended_leaves_nothing(members: Members) -> None:
    """The last one to leave deletes everything. Who is dead is not waited for; who joined is, also where none of those
    that founded the job are left."""
    job = members.begin("abc")
    members.leave(job, "1.0", ("1.0", "1.joined"))
    job.set("a", "1")  # still there
    members.leave(job, "1.1", ("1.0", "1.1", "1.2"))  # left early; knows of one that died since
    members.leave(job, "", ())  # was never let in
    job.set("a", "2")
    members.leave(job, "1.joined", ("1.0", "1.joined"))
    with pytest.raises(Expired):
        job.set("a", "3")


def test_a_job_that_was_killed_is_waited_for(members: Members) -> None:
    """Whatever its processes are said to be; and half of it, too: a process of the next job that finds its seat free
    must not keep what is left alive."""
    members.kwargs["ttl"] = 3
    job = members.begin("ab")
    job.set("key", "of the first job")
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(members.come, 1, "d", JoinMode.REPLACE)
        kwargs, founds = members.come(0, "c")
        assert other.result(20) == (kwargs, founds) == (kwargs, True)
    assert kwargs["generation"] != job._generation
    assert EtcdStore(**kwargs).inprocess_read("key") is None


def test_calls_that_lie_far_apart(members: Members) -> None:
    """Nobody used the keys between two calls of the same processes, so the second has a generation of its own."""
    first = members.begin("ab")
    first._generations.end(first._lease)
    assert members.begin("ab")._generation != first._generation


def test_a_process_leaves_the_last_generation_alone(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there were in its life; and a child that it has forked leaves none."""
    at_exit: list[Callable[[], None]] = []
    left: list[str] = []
    monkeypatch.setattr(etcd_job, "atexit", SimpleNamespace(register=at_exit.append))
    monkeypatch.setattr(etcd_job, "_leave", lambda generations, generation, seat: left.append(generation))
    for _ in range(3):
        job = members.begin("a")
        members.come(0, "a", members=(0,))  # the next call, in the same one
        job._generations.end(job._lease)
    (leave,) = at_exit
    pid = os.getpid()
    for pid_now in (pid + 1, pid):
        monkeypatch.setattr(etcd_job.os, "getpid", lambda pid_now=pid_now: pid_now)
        leave()
    assert left == [job._lease]


def test_a_job_that_was_killed_while_it_began(members: Members) -> None:
    members.kwargs["ttl"] = 3
    with pytest.raises(etcd_job.TimeoutError, match=r"initial ranks \[1\] have not come"):
        members.come(0, "a", timeout=0.5)
    members.begin("cd")


def test_a_generation_that_ends_between_two_looks_names_only_who_is_missing(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the process itself, whose entry has just gone with the others."""
    looks: list[str] = []
    entries = etcd_job.Generations.entries

    def look(generations: etcd_job.Generations, generation: str, name: str) -> dict[str, str]:
        looks.append(generation)
        if len(looks) > 1:
            generations.end(generation)
        return entries(generations, generation, name)

    monkeypatch.setattr(etcd_job.Generations, "entries", look)
    with pytest.raises(etcd_job.TimeoutError, match=r"initial ranks \[1\] have not come"):
        members.come(0, "a", timeout=etcd_job.MAX_WATCH_S + 0.2)
    assert len(looks) > 1  # on a busy machine time is over then; otherwise there is a new generation, and another look


def test_a_job_that_runs_is_not_joined_by_another_one(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the name of the job, and nobody says that it is of it: told at the first sign of life."""
    waits = noted(monkeypatch, "_tell_that_it_waits")
    job = members.begin("ab")
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(members.come, 1, "c")
        assert waits.acquire(timeout=20)
        job.add("beat", 1)
        with pytest.raises(OptionError, match=r"RANK=1 has no part in it.*INPROCESS_RESTART=1"):
            joining.result(20)


@pytest.mark.parametrize("entry", [JoinMode.EITHER, JoinMode.REPLACE, JoinMode.GROW])
def test_a_job_that_runs_is_joined(members: Members, monkeypatch: pytest.MonkeyPatch, entry: JoinMode) -> None:
    """At a sign of life: its processes may all be dead."""
    waits = noted(monkeypatch, "_tell_that_it_waits")
    job = members.begin("ab")
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(members.come, 2 if entry is JoinMode.GROW else 1, "c", entry)
        assert waits.acquire(timeout=20)
        with pytest.raises(concurrent.futures.TimeoutError):
            joining.result(0.2)
        job.add("beat", 1)
        kwargs, founds = joining.result(20)
        assert (kwargs["generation"], founds) == (job._generation, False)
    # it was let in: the next call begins with it, and nobody can show it that the job lives
    assert members.come(1, "c", JoinMode.REPLACE) == (kwargs, True)
    # it was not
    assert members.come(1, "c", JoinMode.GROW) == (kwargs, False)


def test_who_lets_a_job_grow_waits_for_it(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(etcd_job.TimeoutError, match=r"no job .* runs in etcd that RANK=2 could join"):
        members.come(2, "c", JoinMode.GROW, timeout=0.2)
    assert not EtcdStore(**members.kwargs)._generations.of("run.0").standing()
    waits = noted(monkeypatch, "_tell_that_it_waits")
    with ThreadPoolExecutor(1) as pool:
        growing = pool.submit(members.come, 2, "c", JoinMode.GROW)
        assert waits.acquire(timeout=20)
        job = members.begin("ab")
        while not concurrent.futures.wait([growing], 0.05).done:
            job.add("beat", 1)
        assert growing.result()[0]["generation"] == job._generation


def test_a_process_that_died_before_the_job_began_is_replaced(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: the keys need not expire. The one that it replaces, should it live, joins later."""
    waits = noted(monkeypatch, "_all")
    with ThreadPoolExecutor(3) as pool:
        replaced = pool.submit(members.come, 0, "a", JoinMode.EITHER)
        assert waits.acquire(timeout=20)
        generation = EtcdStore(**members.kwargs)._generations.of("run.0").standing()
        replacing = pool.submit(members.come, 0, "b", JoinMode.REPLACE)
        assert waits.acquire(timeout=20)
        kwargs, _ = members.come(1, "c")
        assert replacing.result(20) == (kwargs, True)
        assert kwargs["generation"] == f"run.0/{generation}"
        job = EtcdStore(**kwargs)
        while not concurrent.futures.wait([replaced], 0.05).done:
            job.add("beat", 1)
        assert replaced.result() == (kwargs, False)


def test_two_processes_with_one_rank(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job that has not begun."""
    waits = noted(monkeypatch, "_all")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(members.come, 0, "a", timeout=1.0)
        assert waits.acquire(timeout=20)
        with pytest.raises(
            etcd_job.TimeoutError, match=r"RANK=0 of the job .* is taken by a, .* neither ran nor ended"
        ):
            members.come(0, "b", timeout=0.5)
        with pytest.raises(etcd_job.TimeoutError):
            first.result(20)


# --- authentication, TLS, options ---------------------------------------------------------------------------------


def enable_users(cluster: EtcdCluster) -> Gateway:
    client = EtcdStore(cluster.endpoints)._cluster._members[0]
    for path, body in (
        ("user/add", {"name": "root", "password": "secret"}),
        ("role/add", {"name": "root"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("enable", {}),
    ):
        client.post(f"/auth/{path}", body)
    return client


def openssl(*words: str) -> None:
    try:
        subprocess.run(["openssl", *words], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no program openssl on PATH")


def test_user_and_password(start: Callable[..., EtcdCluster]) -> None:
    """Tokens are forgotten when the server starts again."""
    cluster = start()
    enable_users(cluster)
    with pytest.raises(RuntimeError, match=r"etcd refuses it: .*user name is empty"):
        EtcdStore(cluster.endpoints).set("a", "1")
    with pytest.raises(RuntimeError, match="does not let user 'root' in"):
        EtcdStore(cluster.endpoints, user="root", password="wrong").set("a", "1")
    known = EtcdStore(cluster.endpoints, user="root", password="secret")
    known.set("a", "1")
    cluster.kill()
    cluster.start(0)
    known.set("a", "2")
    assert known.get("a") == b"2"


def test_a_token_that_names_a_revision(start: Callable[..., EtcdCluster], tmp_path: Path) -> None:
    """A JSON web token is of no use any more when any user or role has changed."""
    private, public = str(tmp_path / "private.pem"), str(tmp_path / "public.pem")
    openssl("genrsa", "-traditional", "-out", private, "2048")
    openssl("rsa", "-in", private, "-pubout", "-out", public)
    cluster = start(options=[f"--auth-token=jwt,pub-key={public},priv-key={private},sign-method=RS256,ttl=10m"])
    client = enable_users(cluster)
    known = EtcdStore(cluster.endpoints, user="root", password="secret")
    known.set("a", "1")
    client.token = client.post("/auth/authenticate", {"name": "root", "password": "secret"})["token"]
    client.post("/auth/user/add", {"name": "other", "password": "secret"})
    known.set("a", "2")
    assert known.get("a") == b"2"


def test_certificates(start: Callable[..., EtcdCluster], tmp_path: Path) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    words = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1"]
    openssl("req", *words, "-out", cert, "-keyout", key)
    files = [f"--cert-file={cert}", f"--key-file={key}", f"--trusted-ca-file={cert}", "--client-cert-auth"]
    cluster = start(scheme="https", options=files)
    mine = EtcdStore(cluster.endpoints, ca_cert=cert, cert=cert, key=key)
    mine.set("a", "1")
    assert mine.get("a") == b"1"
    for wrong in ({}, {"ca_cert": cert}):
        with pytest.raises(RuntimeError, match="no endpoint of etcd answers"):
            EtcdStore(cluster.endpoints, patience=0.4, **wrong).set("a", "2")

    # files that are replaced while the job runs, one after the other
    files = {"cert": tmp_path / "mine.pem", "key": tmp_path / "mine.key"}
    openssl("req", *words, "-out", str(files["cert"]), "-keyout", str(files["key"]))
    renewed = EtcdStore(cluster.endpoints, patience=0.4, ca_cert=cert, **{name: str(files[name]) for name in files})
    for name, new in (("key", key), ("cert", cert)):
        with pytest.raises(RuntimeError, match="no endpoint of etcd answers"):
            renewed.set("a", "2")
        files[name].write_bytes(Path(new).read_bytes())
    renewed._cluster.patience = 20.0
    renewed.set("a", "2")
    assert mine.get("a") == b"2"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"endpoints": "ftp://10.0.0.1"}, "endpoints='ftp"),
        ({"endpoints": "10.0.0.1:http"}, "must be addresses"),
        ({"endpoints": "http://a:1,http://b:99999"}, "with ports from 1 to 65535, and 'http://b:99999' is none"),
        ({"endpoints": []}, "endpoints is empty"),
        ({"endpoints": [3]}, "must be addresses"),
        ({"endpoints": [b"http://10.0.0.1"]}, "must be addresses"),
        ({"endpoints": None}, "must be addresses"),
        ({"endpoints": 5}, "must be addresses"),
        ({"endpoints": "http://10.0.0.1:2379/etcd"}, "without a path"),
        ({"endpoints": "http://10.0.0.1:2379?a=b"}, "without a path"),
        ({"endpoints": "http://me:secret@10.0.0.1"}, "user=... and password="),
        ({"user": "me"}, "user='me' and password"),
        ({"password": "secret"}, "user='' and password"),
        ({"patience": "10"}, "patience='10'"),
        ({"patience": None}, "patience=None"),
        ({"patience": 0}, "patience=0"),
        ({"timeout": "300"}, "timeout='300'"),
        ({"endpoints": "10.0.0.1:2379", "ca_cert": "/etc/ca.pem"}, "no address of endpoints='10.0.0.1:2379' begins so"),
        ({"cert": "/etc/cert.pem", "key": "/etc/key.pem"}, "are for https"),
        ({"ttl": 2}, "ttl=2"),
        ({"namespace": ""}, "namespace=''"),
        ({"endpoints": "https://10.0.0.1", "ca_cert": "/nowhere"}, "ca_cert='/nowhere'"),
    ],
    ids=str,
)
def test_wrong_arguments(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says) as refusal:
        EtcdStore(**wrong)
    assert "secret" not in str(refusal.value)


def test_a_slash_behind_an_address_is_no_path() -> None:
    (member,) = EtcdStore("http://10.0.0.1:2379/")._cluster._members
    assert member.name == "http://10.0.0.1:2379"
