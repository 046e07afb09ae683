"""Which store the ranks agree through, from the options; nothing is started."""

from __future__ import annotations

import datetime
import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from inprocess import Wrapper
from inprocess.call import agents, base_store, job
from inprocess.call.base_store import store_spec
from inprocess.call.job import Job
from inprocess.call.launch_variables import Launch
from inprocess.exception import OptionError, TimeoutError
from inprocess.options import Options
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import FIRST_JOINER, JoinMode
from inprocess.store import FileStore, JobIdentity, StoreSpec, TCPStore
from inprocess.stores import addresses
from inprocess.system import procfs


def a_launch(agent_store: bool = False, host: str = "10.0.0.1", port: int = 29500) -> Launch:
    return Launch(rank=0, world_size=2, host=host, port=port, agent_store=agent_store, attempt="0")


def a_job(agent_store: bool = False, calls: int = 2, slot: int = 0, outside: bool = False) -> Job:
    launch = a_launch(agent_store)
    return Job(launch, (0, 1), slot, 2, calls, outside=outside)


def spec(agent_store: bool = False, calls: int = 2, **options: Any) -> StoreSpec:
    return store_spec(Options.build(**options), a_job(agent_store, calls))


@pytest.mark.parametrize("factory", [None, TCPStore])
def test_tcp_store(factory: Any) -> None:
    assert spec(store_factory=factory) == spec()
    assert (spec().host, spec().port, spec().prefix) == ("10.0.0.1", 29500, "inprocess/0/2")
    other = spec(store_kwargs={"host_name": "10.0.0.2", "port": "1234"})
    assert (other.host, other.port) == ("10.0.0.2", 1234)
    with pytest.raises(OptionError, match="TCPStore has no argument 'hostname'"):
        spec(store_kwargs={"hostname": "10.0.0.2"})


@pytest.mark.parametrize(("agent_store", "standbys"), [(False, 2), (True, 0)])
def test_a_job_of_one_rank_has_an_arbiter(agent_store: bool, standbys: int) -> None:
    """It may grow, and the monitor is told once: without one it would serve on where the others have moved."""
    half = agents.Agents.__new__(agents.Agents)  # all that the monitor's configuration needs
    half._options, half._job = Options.build(), Job(a_launch(agent_store), (0,), 0, 1)
    half._membership, half._spec = half._job.membership(), store_spec(half._options, half._job)
    assert half._monitor_config().standby_stores == standbys


# --- where MASTER_ADDR and MASTER_PORT are not needed --------------------------------------------------------------


def unset(**options: Any) -> StoreSpec:
    """Of a process that has RANK and WORLD_SIZE alone."""
    return store_spec(Options.build(**options), Job(a_launch(host="", port=0), (0, 1), 0, 2))


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


LIMIT = datetime.timedelta(seconds=3)


@pytest.mark.usefixtures("no_variables")
@pytest.mark.parametrize(
    ("kwargs", "host"),
    [
        ({"host_name": "10.0.0.2", "port": 1234, "timeout": LIMIT}, "10.0.0.2"),
        ({"port": 1234, "timeout": LIMIT}, "127.0.0.1"),
        ({"host_name": None, "port": "1234"}, "127.0.0.1"),
    ],
)
def test_store_kwargs_in_place_of_variables(kwargs: dict[str, Any], host: str) -> None:
    found = unset(store_kwargs=kwargs)
    assert (found.host, found.port) == (host, 1234)


@pytest.mark.usefixtures("no_variables")
@pytest.mark.parametrize(
    ("kwargs", "name"),
    [({}, "MASTER_ADDR"), ({"timeout": LIMIT}, "MASTER_ADDR"), ({"host_name": "10.0.0.2"}, "MASTER_PORT")],
)
def test_what_nobody_says_is_an_error(kwargs: dict[str, Any], name: str) -> None:
    with pytest.raises(OptionError, match=f"variable {name} is not set.*store_kwargs="):
        unset(store_kwargs=kwargs)


@pytest.mark.usefixtures("no_variables")
def test_each_variable_stands_in_for_what_is_left_out() -> None:
    assert (spec(store_kwargs={"port": 1}).host, spec(store_kwargs={"host_name": "h"}).port) == ("10.0.0.1", 29500)


@pytest.mark.parametrize("options", [{"store_kwargs": {"port": 1234}}, {"store_factory": FileStore}])
def test_ranks_on_several_hosts_need_an_address(no_variables: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    no_variables.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(OptionError) as caught:
        unset(**options)
    assert next(iter(options)) in str(caught.value)
    assert "LOCAL_WORLD_SIZE=1 with WORLD_SIZE=2" in str(caught.value)
    assert "Set MASTER_ADDR" in str(caught.value)


@pytest.mark.parametrize("port", [0, 65536, -1, True, "first", 1.0, ""])
def test_a_port_that_is_none(port: object) -> None:
    with pytest.raises(OptionError, match=f"store_kwargs: port={port!r} is no port: pass a number"):
        spec(store_kwargs={"port": port})


@pytest.mark.parametrize("host", ["", " ", 5, b"h"])
def test_a_host_that_is_none(host: object) -> None:
    with pytest.raises(OptionError, match=f"store_kwargs: host_name={host!r} is no name: pass a name"):
        spec(store_kwargs={"host_name": host})


@pytest.mark.usefixtures("no_variables")
def test_a_store_of_the_users_and_no_address(caplog: Any) -> None:
    """The others find this host as they find the store, or are on it."""
    assert unset(store_factory=FileStore, store_kwargs={"host_name": "10.0.0.2"}).host == "10.0.0.2"
    assert not caplog.records
    assert unset(store_factory=FileStore).host == "127.0.0.1"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(OptionError, match="MASTER_ADDR is not set"):
        unset(store_factory=Outliving, store_kwargs={"founds": 1})


# --- stores of the user's ------------------------------------------------------------------------------------------


def test_only_a_server_of_ours_is_told_from_the_one_of_the_call_before() -> None:
    assert spec().stale_key.startswith("inprocess/0/1/")
    assert not spec(calls=1).stale_key
    assert not spec(agent_store=True).stale_key
    assert spec(agent_store=True, store_kwargs={"port": 1234}).stale_key


def test_another_store_class() -> None:
    found = spec(store_factory=FileStore, store_kwargs={"file_name": "/shared/store"})
    assert (found.factory, found.kwargs) == ("inprocess.store:FileStore", {"file_name": "/shared/store"})
    assert StoreSpec.from_json(found.to_json()) == found
    with pytest.raises(OptionError, match="must be a class or function at the top level"):
        spec(store_factory=lambda: None)


class Refused(Exception):
    """Of the user's own."""


def refuse(**kwargs: Any) -> None:
    raise Refused(kwargs)


@pytest.fixture
def as_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of one, in a process that has made no call yet."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job, "_jobs", {})


@pytest.mark.usefixtures("as_launched")
@pytest.mark.parametrize("local", [False, True])
def test_what_the_constructor_raises_is_what_the_call_raises(local: bool) -> None:
    """Also where something else is wrong: it is local, or has an argument that does not reach the monitor."""
    raised: list[Exception] = []

    class Local:
        def __init__(self, **kwargs: Any) -> None:
            raised.append(Refused(kwargs))
            raise raised[0]

    kwargs = {"url": "there", "timeout": LIMIT}
    wrapped = Wrapper(store_factory=Local if local else refuse, store_kwargs=kwargs)(lambda: None)
    with pytest.raises(Refused) as caught:
        wrapped()
    assert caught.value.args == (kwargs,)
    assert not local or caught.value is raised[0]
    (known,) = job._jobs.values()
    assert known.calls == 0


@pytest.mark.usefixtures("as_launched")
@pytest.mark.parametrize(
    "place", ["call.agents.Board.create", "call.agents.ProgressWatchdog", "call.loop.CallWrapper", "call.loop.Starting"]
)
def test_a_call_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str) -> None:
    """Where descriptors run out, say; the program may try again."""
    monkeypatch.setattr(f"inprocess.{place}", lambda *args, **kwargs: refuse())
    wrapped = Wrapper(run_dir=str(tmp_path))(lambda: None)
    before = sorted(os.listdir("/proc/self/fd")), procfs.caught_signals()
    for _ in range(2):
        with pytest.raises(Refused):
            wrapped()
    assert (sorted(os.listdir("/proc/self/fd")), procfs.caught_signals()) == before


@pytest.mark.usefixtures("as_launched")
def test_a_local_factory_that_works_cannot_be_imported() -> None:
    made = []

    def local(path: str) -> FileStore:
        made.append(path)
        return FileStore(path)

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/store"
        with pytest.raises(OptionError, match=r"store_factory=<function .*local.* must be .* Move it to a module"):
            Wrapper(store_factory=local, store_kwargs={"path": path})(lambda: None)()
    assert made == [path]


@pytest.mark.usefixtures("as_launched")
def test_a_factory_that_makes_no_store() -> None:
    with pytest.raises(OptionError, match=r"store_factory=<built-in function print> returned None, which is no store"):
        Wrapper(store_factory=print)(lambda: None)()


@pytest.mark.usefixtures("as_launched")
def test_a_constructor_that_does_not_return() -> None:
    end, ended = threading.Event(), threading.Event()

    def hangs() -> None:
        end.wait()
        ended.set()

    limits = {"soft_timeout": 0.01, "hard_timeout": 0.02, "heartbeat_timeout": 0.03, "barrier_timeout": 0.04}
    limits |= {f"{name}_interval": 0.001 for name in ("monitor_thread", "monitor_process", "heartbeat")}
    try:
        with pytest.raises(TimeoutError, match=r"store_factory=.*hangs.* within barrier_timeout=0\.04s: check"):
            Wrapper(store_factory=hangs, **limits, progress_watchdog_interval=0.001)(lambda: None)()
    finally:
        end.set()
        assert ended.wait(10)


def test_the_store_that_was_tried_is_the_one_of_the_main_thread(tmp_path: Path) -> None:
    """One that is served where it is made first, in this process, say, must not go."""
    kwargs = {"file_name": str(tmp_path / "store")}
    tried = base_store.try_factory(Options.build(store_factory=FileStore, store_kwargs=kwargs))
    half = agents.Agents.__new__(agents.Agents)  # all that `connect` needs
    half._store, half._tried = None, tried
    half._spec = StoreSpec(factory="no.module:to_import", prefix="call")
    for _ in range(2):
        half.connect(1.0)
    half._store.set("key", "value")
    assert tried.get("call/key") == b"value"


@pytest.mark.parametrize("factory", [None, TCPStore, type("Entered", (), {"inprocess_enter": None})])
def test_stores_that_are_not_tried(factory: Any) -> None:
    """Nobody serves ours yet, and one that outlives jobs is asked for its arguments first."""
    assert base_store.try_factory(Options.build(store_factory=factory, store_kwargs={"port": 1})) is None


class Outliving:
    """A store that outlives jobs, so it has to tell them apart."""

    @classmethod
    def inprocess_enter(cls, kwargs: dict[str, Any], seat: JobIdentity, timeout: float) -> tuple[dict[str, Any], bool]:
        seen = [seat.rank, seat.me, seat.attempt, seat.entry.value, list(seat.members()), seat.last()[0], timeout]
        return kwargs | {"seat": seen}, bool(kwargs["founds"])


def test_a_store_is_asked_for_the_arguments_of_this_job() -> None:
    found = spec(store_factory=Outliving, store_kwargs={"url": "there", "founds": 1}, barrier_timeout=100)
    rank, me, attempt, *rest = found.kwargs["seat"]
    assert (found.kwargs["url"], rank, attempt, rest) == ("there", 0, "0", ["either", [0, 1], "", 100.0])
    assert me.startswith("pid ")


def test_a_store_says_who_comes_too_late() -> None:
    """By the slot that it has; in the next call it begins with the others, if it was let in."""
    job = a_job(slot=1)
    found = store_spec(Options.build(store_factory=Outliving, store_kwargs={"founds": 0}), job)
    assert found.kwargs["seat"][0] == 1
    assert job.outside and job.entry is JoinMode.GROW
    job.leave(job.membership())
    assert job.outside and job.last == ("", ())  # it never had a ticket
    joined = Membership(FIRST_JOINER + 1, (0, FIRST_JOINER + 1), slots={FIRST_JOINER + 1: 1})
    job.leave(joined)
    assert not job.outside
    assert (job.members, job.last[0]) == ((0, 1), f"2.{FIRST_JOINER + 1}")
    assert job.last[1] == ("2.0", job.last[0])


def test_who_let_the_job_grow_begins_the_next_call_with_the_others() -> None:
    launch = Launch(2, 3, "10.0.0.1", 29500, agent_store=False, attempt="0", entry=JoinMode.GROW)
    assert [Job(launch, (0, 1, 2), 2, 3, calls).entry for calls in (1, 2)] == [JoinMode.GROW, JoinMode.EITHER]


@pytest.mark.parametrize(
    ("key", "value"),
    [("timeout", datetime.timedelta(seconds=3)), ("path", Path("/shared/store")), ("more", {"key": [{1}]})],
)
def test_arguments_that_json_cannot_carry(key: str, value: object) -> None:
    with pytest.raises(OptionError) as caught:
        spec(store_factory=FileStore, store_kwargs={"prefix": "a", key: value})
    assert f"store_kwargs: {key}={value!r} is not JSON-serializable" in str(caught.value)
    assert "pass a string, a number" in str(caught.value)


# --- a name that does not resolve yet -----------------------------------------------------------------------------


class Names:
    """Resolves nothing before that moment of a clock that only waiting moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, known_at: float) -> None:
        self.now, self.lookups, self._known_at = 1000.0, 0, 1000.0 + known_at
        monkeypatch.setattr(addresses, "lookup", self.lookup)
        monkeypatch.setattr(addresses, "sleep_with_progress", self.wait)
        monkeypatch.setattr(addresses.clock, "monotonic", lambda: self.now)

    def lookup(self, host: str, port: int) -> list[Any]:
        self.lookups += 1
        if self.now < self._known_at:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return []

    def wait(self, seconds: float) -> None:
        assert 0 <= seconds <= addresses.NAME_PAUSE[1]
        self.now += max(seconds, 0.001)


def test_a_name_is_looked_up_until_it_is_known(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    names = Names(monkeypatch, known_at=30.0)
    addresses.await_name("rank0.job", 120.0)
    assert 1030.0 <= names.now <= 1032.0 and names.lookups > 5
    assert len([record for record in caplog.records if "does not resolve yet" in record.getMessage()]) == 1


def test_a_name_that_is_never_known(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, known_at=1e9)
    with pytest.raises(TimeoutError, match=r"MASTER_ADDR='rank0.job' does not resolve .* within 120 s: .*Set it to"):
        addresses.await_name("rank0.job", 120.0)
    assert 1120.0 <= names.now <= 1122.0


def test_a_call_that_cannot_begin_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has the same keys; the other ranks wait there."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "rank0.job", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    Names(monkeypatch, known_at=1e9)
    monkeypatch.setattr(job, "_jobs", {})
    wrapped = Wrapper()(lambda: None)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="does not resolve"):
            wrapped()
    (known,) = job._jobs.values()
    assert known.calls == 0
