"""What the protocol asks of a store, on each one: the simulator's dict, torch's own, and one in an etcd cluster.

The simulator proves the protocol over its dict; these tests carry that over to the real ones.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.call.job import Job
from inprocess.call.launch_variables import Launch
from inprocess.exception import StoreLost, TimeoutError
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import Arrival, ArrivalKind
from inprocess.protocol.ops import Add, Claim, Delete, Exist, Now, Read, ReadAll, Set, Verb, Wait
from inprocess.store import EtcdStore
from inprocess.stores import connecting as connector
from inprocess.stores import driver, raw, serving
from inprocess.stores import tcp as store
from inprocess.stores.connecting import ATTEMPT_TIMEOUT_S, _listens, connect_to
from inprocess.stores.spec import StoreSpec
from inprocess.system import names
from tests.harness import etcd
from tests.sim.engine import SimStore

#: does one operation, or a verb, over one connection
Do = Callable[[Any], Any]


def one(op: Any) -> Verb[Any]:
    """An operation as a verb."""
    return (yield op)


class Simulated:
    """The simulator's store without latency; a wait blocks its thread on a condition."""

    def __init__(self) -> None:
        self._store, self._changed = SimStore(), threading.Condition()

    def __call__(self, verb: Any) -> Any:
        verb = verb if hasattr(verb, "send") else one(verb)
        answer = None
        while True:
            try:
                op = verb.send(answer)
            except StopIteration as end:
                return end.value
            with self._changed:
                answer = self._wait(op) if isinstance(op, Wait) else self._store.execute(op)
                self._changed.notify_all()

    def _wait(self, op: Wait) -> bytes | None:
        self._changed.wait_for(lambda: op.key in self._store.data, op.timeout)
        return self._store.data.get(op.key)


class Driving:
    """The library's own driver over a torch store. pytest keeps fixtures for long, so ``close`` drops the store."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __call__(self, verb: Any) -> Any:
        return driver.execute(verb if hasattr(verb, "send") else one(verb), self._connection)

    def close(self) -> None:
        self._connection = None


class Tcp:
    """A TCPStore server, and clients of it."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._server = prefix, serving.serve("127.0.0.1", 0)
        self.clients: list[Driving] = []

    def __call__(self) -> Driving:
        connection = store.TCPStore("127.0.0.1", self._server.port, timeout=timedelta(seconds=20))
        self.clients.append(Driving(store.PrefixStore(self._prefix, connection) if self._prefix else connection))
        return self.clients[-1]

    def close(self) -> None:
        """Server last."""
        for client in self.clients:
            client.close()
        self.lose()

    def lose(self) -> None:
        """The server goes away."""
        self._server = None


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[etcd.EtcdCluster | None]:
    """One for all tests, each of which has a namespace of its own; None where etcd is not installed."""
    if not etcd.ETCD:
        yield None
        return
    cluster = etcd.EtcdCluster(tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.close()


class Etcd:
    """Connections to one namespace."""

    def __init__(self, cluster: etcd.EtcdCluster | None, namespace: str, prefix: str) -> None:
        if cluster is None:
            pytest.skip(etcd.MISSING)
        self._prefix, self._arguments = prefix, {"endpoints": cluster.endpoints, "namespace": namespace, "timeout": 20}
        self.clients: list[Driving] = []

    def __call__(self) -> Driving:
        connection: Any = EtcdStore(**self._arguments)
        self.clients.append(Driving(store.PrefixStore(self._prefix, connection) if self._prefix else connection))
        return self.clients[-1]

    def close(self) -> None:
        for client in self.clients:
            client.close()


@pytest.fixture(
    params=["simulated", "tcp", "tcp prefixed", "tcp without libuv", "hash", "file", "etcd", "etcd prefixed"]
)
def connect(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: etcd.EtcdCluster | None
) -> Iterator[Callable[[], Do]]:
    """Makes connections to one fresh store."""
    if request.param == "simulated":
        simulated = Simulated()
        yield lambda: simulated
    elif request.param == "hash":
        shared = HashStore()
        yield lambda: Driving(shared)
    elif request.param == "file":
        yield lambda: Driving(store.FileStore(str(tmp_path / "store"), timeout=timedelta(seconds=20)))
    elif request.param.startswith("etcd"):
        stores = Etcd(cluster, tmp_path.name, prefix="call/3" if request.param == "etcd prefixed" else "")
        yield stores
        stores.close()
    else:
        if request.param == "tcp without libuv":
            monkeypatch.setenv("USE_LIBUV", "0")
        tcp = Tcp(prefix="" if request.param == "tcp" else "call/3")
        yield tcp
        tcp.close()


@pytest.fixture
def do(connect: Callable[[], Do]) -> Do:
    return connect()


@pytest.fixture
def others() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_absent_key(do: Do) -> None:
    assert do(Read("a")) is None
    assert not do(Exist(("a",)))


def test_set_and_read(do: Do) -> None:
    do(Set("a", "one"))
    do(Set("a", "two"))
    assert do(Read("a")) == b"two"
    assert do(Exist(("a",)))


def test_text_beyond_ascii(do: Do) -> None:
    do(Set("a", '{"message":"größer ☃"}'))
    assert do(Read("a")).decode() == '{"message":"größer ☃"}'


def test_reading_writes_nothing(do: Do) -> None:
    do(Read("a"))
    assert do(Claim("a", "mine")) == b"mine"


def test_add_counts_from_zero_and_reads_with_zero(do: Do) -> None:
    assert [do(Add("n", 0)), do(Add("n", 1)), do(Add("n", 2)), do(Add("n", 0))] == [0, 1, 3, 3]


def test_first_claim_stands(do: Do) -> None:
    assert [do(Claim("a", "mine")), do(Claim("a", "yours")), do(Read("a"))] == [b"mine"] * 3


def test_claim_instead_of_a_value(do: Do) -> None:
    """Only the one who knows what stands there may replace it."""
    do(Claim("a", "1"))
    assert do(Claim("a", "3", instead="2")) == b"1"
    assert do(Claim("a", "2", instead="1")) == b"2"
    assert do(Claim("a", "4", instead="1")) == b"2"
    do(Claim("absent", "2", instead="1"))
    assert do(Read("absent")) is None


def test_exist_means_all(do: Do) -> None:
    do(Set("a", "1"))
    assert not do(Exist(("a", "b")))
    do(Set("b", "2"))
    assert do(Exist(("a", "b")))


def test_read_all_keeps_the_order(do: Do) -> None:
    keys = tuple(f"k{number}" for number in (3, 1, 2))
    for key in keys:
        do(Set(key, key))
    assert [bytes(value) for value in do(ReadAll(keys))] == [b"k3", b"k1", b"k2"]


def test_deleted_key_can_be_claimed_again(do: Do) -> None:
    do(Set("a", "1"))
    do(Delete("a"))
    do(Delete("never there"))
    assert do(Read("a")) is None
    assert do(Claim("a", "2")) == b"2"


def test_wait_for_what_is_there(do: Do) -> None:
    do(Set("a", "1"))
    assert do(Wait("a")) == b"1"


def test_wait_that_times_out(do: Do) -> None:
    assert do(Wait("a", 0.05)) is None


def test_wait_is_woken(connect: Callable[[], Do], others: ThreadPoolExecutor) -> None:
    """By a set and by a claim, over another connection."""
    for number, op in enumerate((Set("k0", "v"), Claim("k1", "v"))):
        waiting = others.submit(connect(), Wait(f"k{number}", 10.0))
        connect()(op)
        assert waiting.result(10) == b"v"


def test_reading_wakes_nobody_who_waits(connect: Callable[[], Do], others: ThreadPoolExecutor) -> None:
    """Neither a read nor a look: torch's server wakes whoever waits at a compare-and-set that changes nothing."""
    reader, waiter = connect(), connect()
    waiting = others.submit(waiter, Wait("k", 10.0))
    for _ in range(50):
        assert reader(Read("k")) is None
        assert reader(Exist(("k",))) is False
    assert not waiting.done()
    reader(Claim("k", "v"))
    assert waiting.result(10) == b"v"


def test_one_claim_wins(connect: Callable[[], Do], others: ThreadPoolExecutor) -> None:
    """Of eight at once: all of them read the same answer."""
    doers = [connect() for _ in range(8)]
    for round_ in range(5):
        answers = list(others.map(lambda n, r=round_: doers[n](Claim(f"c{r}", f"value {n}")), range(8)))
        assert len(set(answers)) == 1


def test_no_count_is_lost(connect: Callable[[], Do], others: ThreadPoolExecutor) -> None:
    doers = [connect() for _ in range(8)]
    answers = list(others.map(lambda n: [doers[n](Add("n", 1)) for _ in range(10)], range(8)))
    assert sorted(number for each in answers for number in each) == list(range(1, 81))


def test_a_whole_iteration(connect: Callable[[], Do], others: ThreadPoolExecutor) -> None:
    """Four members join, start, one raises, and they agree on the next roster."""

    def live(member: int) -> tuple[bool, bool, tuple[int, ...]]:
        do, membership = connect(), Membership.founder(member, range(4), 4)
        do(verbs.join(membership, f"process {member}"))
        membership.apply(do(verbs.await_next(-1)))
        do(verbs.start_round(membership, Arrival(ArrivalKind.RANK, member, 4, 4, member)))
        start = do(verbs.await_start(0))
        if member == 2:
            record = InterruptionRecord(2, Interruption.EXCEPTION)
            do(verbs.interrupt(0, record))
        outcome = do(verbs.await_outcome(0))
        kind = ArrivalKind.LEFT if member == 2 else ArrivalKind.ALIVE
        do(verbs.end_round(membership, Arrival(kind, member, 4)))
        membership.apply(do(verbs.await_next(0)))
        return start.go, outcome.completed, membership.roster

    assert list(others.map(live, range(4))) == [(True, False, (0, 1, 3))] * 4


def test_now() -> None:
    connection = HashStore()
    assert driver.execute(one(Now()), connection) <= driver.execute(one(Now()), connection)


def refusing_port() -> socket.socket:
    """A port that is taken, and where nobody listens."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    return bound


def test_connection_that_nobody_waits_for_any_more_is_given_up() -> None:
    """A restart interrupts the main thread while it connects to a server that has gone; torch would go on trying."""

    def interrupt(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with refusing_port() as bound, pytest.raises(InterruptedError):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            connect_to("127.0.0.1", bound.getsockname()[1], 60.0)
        for thread in [thread for thread in threading.enumerate() if thread.name == "inprocess-connect"]:
            thread.join()  # it may have ended already
    finally:
        signal.signal(signal.SIGALRM, before)


def test_server_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes up when the first attempts are over."""
    monkeypatch.setattr(connector, "ATTEMPT_TIMEOUT_S", 0.05)
    served: list[Any] = []
    with refusing_port() as bound:
        port = bound.getsockname()[1]
    timer = threading.Timer(0.5, lambda: served.append(serving.serve("127.0.0.1", port)))
    timer.start()
    connection = connect_to("127.0.0.1", port, 60.0)
    connection.set("key", "value")
    assert connection.get("key") == b"value"
    timer.join()


def test_server_that_goes_away() -> None:
    """Operations fail with StoreLost, also one that waits."""
    tcp = Tcp(prefix="")
    first, second = tcp(), tcp()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first, Wait("never"))
        second(Set("a", "1"))
        tcp.lose()
        with pytest.raises(StoreLost, match="'never'"):
            waiting.result(20)
    with pytest.raises(StoreLost, match="Claim"):
        second(Claim("a", "2"))
    with pytest.raises(StoreLost, match="'never'"):
        second(Wait("never", 60.0))
    tcp.close()


def test_connecting_to_a_server_that_went_away_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor that is just connecting when its job ends must not stay for barrier_timeout."""
    connecting, stopped = threading.Event(), threading.Event()

    listens = _listens

    def noticed(*args: Any) -> bool:
        connecting.set()
        return listens(*args)

    monkeypatch.setattr(connector, "_listens", noticed)
    with refusing_port() as nobody, ThreadPoolExecutor(1) as pool:
        trying = pool.submit(connect_to, "127.0.0.1", nobody.getsockname()[1], 100.0, stopped)
        assert connecting.wait(20)
        stopped.set()
        with pytest.raises(StoreLost, match="gave up"):
            trying.result(20)


# --- what ours have more than torch's ---------------------------------------------------------------------------------


@pytest.mark.parametrize("theirs", [dist.Store, dist.TCPStore, dist.FileStore, dist.PrefixStore])
def test_torch_has_no_methods_of_our_names(theirs: type) -> None:
    """Its stores grow methods; one of ours that hid one of theirs would be called in its place."""
    ours = [name for name in vars(store.StoreMixin) if not name.startswith("__")]
    assert ours
    assert not [name for name in ours if hasattr(theirs, name)]


@pytest.mark.parametrize("kind", ["tcp", "prefix", "file"])
def test_methods_of_our_own(kind: str, tmp_path: Path) -> None:
    server = serving.serve("127.0.0.1", 0)
    own: Any = store.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=20))
    if kind == "prefix":
        own = store.PrefixStore("call/3", own)
    elif kind == "file":
        own = store.FileStore(str(tmp_path / "store"))
    assert own.inprocess_read("key") is None
    assert own.inprocess_claim("key", "first") == b"first"
    assert own.inprocess_claim("key", "second") == b"first"
    assert own.inprocess_read("key") == own.get("key") == b"first"
    del own  # before its server


class Dictionary(dist.Store):
    """A store of a user's own, written in Python."""

    def __init__(self) -> None:
        super().__init__()
        self._data: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._data[key] = value

    def get(self, key: str) -> bytes:
        return self._data[key]


def test_a_store_written_in_python_below_a_prefix() -> None:
    """torch's own view would keep an empty shell of it."""
    spec = StoreSpec(factory=f"{__name__}:Dictionary", prefix="call/3/")
    connection = connector.connect(spec, 1.0)
    connection.set("key", "value")
    assert connection.get("key") == b"value"


def test_the_server_of_the_call_before_is_told_from_ones_own() -> None:
    """By a key that the call before has written itself."""
    server = serving.serve("127.0.0.1", 0)
    launch = Launch(rank=0, world_size=1, host="localhost", port=server.port, agent_store=False, attempt="0")
    before, now = (Job(launch, (0,), 0, 1, calls) for calls in (1, 2))

    def connect(job: Job) -> Any:
        return connector.connect(StoreSpec(port=server.port, prefix=job.prefix, stale_key=job.stale_key), 0.2)

    assert not driver.execute(verbs.has_begun(), connect(now))
    connect(before).set(verbs.JOINED_KEY, "it has begun")
    with pytest.raises(TimeoutError, match="the server of the call before is still there"):
        connect(now)
    assert driver.execute(verbs.has_begun(), connect(before))


def test_what_is_said_of_a_store_has_no_passwords() -> None:
    spec = StoreSpec(factory="package:name", kwargs={"endpoints": "host", "password": "secret"})
    assert str(spec) == "package:name(endpoints, password)"


# --- torch's server without libuv ---------------------------------------------------------------------------------


def test_a_claim_whose_owner_died_before_it_woke_anybody_is_found(
    monkeypatch: pytest.MonkeyPatch, others: ThreadPoolExecutor
) -> None:
    monkeypatch.setenv("USE_LIBUV", "0")
    monkeypatch.setattr(driver, "POLL_INTERVAL_S", 0.05)
    server = serving.serve("127.0.0.1", 0)
    first, second = (store.TCPStore("127.0.0.1", server.port) for _ in range(2))
    waiting = others.submit(driver.execute, one(Wait("key", 10.0)), first)
    assert second.compare_set("key", "", "v") == b"v"
    assert waiting.result(5) == b"v"
    del first, second, waiting  # before their server


def test_torch_built_without_libuv(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses to make a store that asks for libuv; the first refusal is remembered."""
    asked = []

    class WithoutLibuv(dist.TCPStore):
        def __init__(self, *args: Any, use_libuv: bool, **kwargs: Any) -> None:
            asked.append(use_libuv)
            if use_libuv:
                raise RuntimeError("use_libuv was requested but PyTorch was build without libuv support")
            super().__init__(*args, use_libuv=use_libuv, **kwargs)

    monkeypatch.delenv("USE_LIBUV", raising=False)
    monkeypatch.setattr(raw, "_built_with_libuv", True)
    monkeypatch.setattr(serving, "_TCPStore", WithoutLibuv)
    server = serving.serve("127.0.0.1", 0)
    assert not store.TCPStore("127.0.0.1", server.port).libuvBackend
    serving.serve("127.0.0.1", 0)
    assert asked == [True, False, False]


def test_other_errors_are_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("USE_LIBUV", raising=False)
    monkeypatch.setattr(raw, "_built_with_libuv", True)

    def make(libuv: bool) -> None:
        raise RuntimeError("the port is taken")

    with pytest.raises(RuntimeError, match="the port is taken"):
        raw.with_libuv_or_without(make)
    assert raw._built_with_libuv


def test_a_lost_answer_of_a_name_server_costs_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks for the name of each peer; by default glibc asks again after 5 s, and a restart with a Tree took that.

    Only in the thread that connects: the program's own resolver stays as it is.
    """
    asked: list[tuple[int, int]] = []

    class Connecting:
        def __init__(self, *_: Any, **__: Any) -> None:
            asked.append((names.settings().patience, names.settings().attempts))

        def set_timeout(self, _: timedelta) -> None:
            pass

    monkeypatch.setattr(connector, "TCPStore", Connecting)
    before = bytes(names.settings())
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect_to("127.0.0.1", server.getsockname()[1], 60.0)
    assert asked in ([(1, 1)], [(1, 0)])  # the second where RES_OPTIONS says attempts:0
    assert bytes(names.settings()) == before
    assert ATTEMPT_TIMEOUT_S > names.PATIENCE * names.ATTEMPTS  # otherwise torch gives up, with a long message
