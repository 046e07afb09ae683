"""All other parsers of what comes from elsewhere: they answer, or raise the error that they document."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inprocess.attribution import Interruption, InterruptionRecord, summary
from inprocess.call import launch_variables
from inprocess.exception import InternalError, OptionError
from inprocess.monitor import files as monitor_files
from inprocess.monitor import pidfile
from inprocess.monitor.board import Board
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.policy import Timeouts, View, decide, wake_at
from inprocess.rank_assignment import Layer, RankAssignmentCtx, Tree
from inprocess.rank_assignment.gather import gather
from inprocess.state import State
from inprocess.store import StoreSpec
from inprocess.system import strict_json
from inprocess.system.json_lines import MAX_LINE_BYTES, Lines
from inprocess.wait_daemon import wait_daemon

from . import hostile
from .hostile import fuzz

configs = st.builds(
    MonitorConfig,
    member=hostile.numbers,
    roster=hostile.ascending,
    known=hostile.ascending,
    slots=hostile.ascending,
    rank=hostile.numbers,
    me=st.text(max_size=20),
    identified=st.booleans(),
    store=st.text(max_size=20),
    logfile=st.none() | st.text(max_size=20),
    soft_timeout=st.floats(0, 1e9),
    sys_path=st.lists(st.text(max_size=9)).map(tuple),
)
specs = st.builds(
    StoreSpec,
    factory=st.sampled_from(("", "inprocess.store:FileStore")),
    kwargs=st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=5)),
    host=st.text(max_size=9),
    port=st.integers(0, 65535),
    prefix=st.text(max_size=9),
)


@fuzz
@given(hostile.anything)
def test_json(raw: bytes) -> None:
    with contextlib.suppress(ValueError):
        repr(strict_json.parse(raw))


@pytest.mark.parametrize("raw", ["[NaN]", "[Infinity]", '{"a":1,"a":1}', "[" * 9 + "]" * 9, "9" * 5000, "[1", b"\xff"])
def test_json_that_is_refused(raw: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        strict_json.parse(raw)


@fuzz
@given(configs)
def test_config_comes_back(config: MonitorConfig) -> None:
    assert MonitorConfig.from_json(config.to_json()) == config


def test_a_path_that_is_not_utf_8_comes_back() -> None:
    path = os.fsdecode(b"/data/\xff")
    config = MonitorConfig(member=0, roster=(0,), store="", run_dir=path, logfile=path, sys_path=(path,))
    assert MonitorConfig.from_json(config.to_json()) == config
    assert strict_json.parse(json.dumps([path])) == [r"/data/\udcff"]


@fuzz
@given(hostile.anything | hostile.damaged(configs.map(lambda config: config.to_json().encode())))
def test_config(raw: bytes) -> None:
    with contextlib.suppress(ValueError, TypeError):
        MonitorConfig.from_json(raw)


@fuzz
@given(specs)
def test_store_spec_comes_back(spec: StoreSpec) -> None:
    assert StoreSpec.from_json(spec.to_json()) == spec


@fuzz
@given(hostile.anything | hostile.damaged(specs.map(lambda spec: spec.to_json().encode())))
def test_store_spec(raw: bytes) -> None:
    """It is parsed, never imported, here; and what is not module:name is refused."""
    with contextlib.suppress(ValueError, TypeError):
        StoreSpec.from_json(raw.decode(errors="replace"))


@pytest.mark.parametrize("factory", ["os", "os:system -c", "os:path.join", ":", "a:b:c", 7])
def test_a_factory_that_is_no_name_is_refused(factory: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        StoreSpec.from_json(json.dumps({"factory": factory}))


@fuzz
@given(st.lists(hostile.anything | st.sampled_from((b"\n", b'{"bye":"left"}\n', b"x" * 2 * MAX_LINE_BYTES))))
def test_lines(pieces: list[bytes]) -> None:
    """Whatever was in the stream before, a line that comes after a line break is understood."""
    lines = Lines()
    for piece in pieces:
        assert all(isinstance(message, dict) for message in lines.take(piece))
    assert lines.take(b'\n{"bye":"left"}\n')[-1:] == [{"bye": "left"}]


@fuzz
@given(hostile.anything.map(lambda raw: raw.decode(errors="replace")) | hostile.json_values, st.text())
def test_record_from_a_dictionary(value: object, text: str) -> None:
    good = InterruptionRecord(0, Interruption.EXCEPTION, message=text)
    assert InterruptionRecord.from_dict(good.to_dict()) == good
    for data in (value, {"rank": value, "interruption": "exception"}, {"rank": 0, "interruption": value}):
        with contextlib.suppress(ValueError):
            record = InterruptionRecord.from_dict(data)
            assert str(record).isprintable() and summary([record, good]).isprintable()


class Fixed:
    """A store in which each key holds the same."""

    def __init__(self, value: bytes) -> None:
        self.value = value

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes:
        return self.value

    def add(self, key: str, amount: int) -> int:
        return 1


gathered = st.just({"0": "a", "1": "b"}).map(lambda value: json.dumps(value).encode())


@fuzz
@given(hostile.anything | hostile.damaged(gathered) | hostile.altered(gathered))
def test_gather(raw: bytes) -> None:
    with contextlib.suppress(InternalError):
        found = gather(Fixed(raw), "name", 0, 2, (), "a")
        assert found.keys() == {0, 1} and all(isinstance(value, str) for value in found.values())


said = st.tuples(st.lists(st.text(max_size=3), max_size=2), st.none() | st.integers(), st.integers(), st.booleans())
told = st.dictionaries(st.integers(0, 3).map(str), st.tuples(st.lists(st.text(max_size=3)), st.integers()))


@fuzz
@given(said.map(json.dumps) | st.text(), told.map(lambda each: json.dumps(each).encode()) | hostile.anything)
def test_tree(other: str, dead: bytes) -> None:
    """What another rank says of itself, and of the dead."""

    class Told(Fixed):
        def get(self, key: str) -> bytes:
            both = {"0": json.dumps([["root"], 0, 3, False]), "1": other}
            return dead if key.endswith("dead") else json.dumps(both).encode()

    state = State(rank=0, world_size=3, initial_rank=0, initial_world_size=3, active_rank=0, active_world_size=3)
    with contextlib.suppress(InternalError, OptionError):
        result = Tree([Layer()])(RankAssignmentCtx(state, Told(b""), {2})).state
        assert 0 <= result.rank < result.world_size <= 3


@fuzz
@given(
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 20), min_size=10, max_size=10),
    st.integers(0, 1 << 62),
)
def test_board(slots: list[int], now: int) -> None:
    """Any memory is a snapshot, and the rules have an answer to it."""
    board = Board.create()
    try:
        for index, value in enumerate(slots):  # all up to RANK; after it LEFT, with which no rule applies
            board.slots[index] = value
        seen = board.snapshot()
        view = View(0, Timeouts.of(60.0, 90.0, 30.0), lease_until=seen.progress)
        wake_at(seen, view)
        assert len(decide(now, seen, view)) <= 2
    finally:
        board.close()


names = st.sampled_from(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))


@fuzz
@given(st.dictionaries(names, st.text(max_size=8) | st.integers().map(str) | st.sampled_from(("²", "٣", "+1", "1_0"))))
def test_environment(variables: dict[str, str]) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234", **variables}
    with contextlib.suppress(OptionError):
        launch = launch_variables.read(env)
        assert 0 <= launch.rank < launch.world_size and 0 <= launch.port < 65536


@fuzz
@given(raw=hostile.anything | st.integers(-5, 5).map(lambda number: str((1 << 22) + number).encode()))
def test_pid_file(raw: bytes, tmp_path_factory: Any) -> None:
    """For the command, and for the monitor that finds it in its way."""
    path = str(tmp_path_factory.getbasetemp() / "fuzzed.pid")
    with open(path, "wb") as file:
        file.write(raw)
    try:
        with contextlib.suppress(OSError):
            assert "has ended already" in wait_daemon(path)
        with contextlib.suppress(OSError):
            monitor_files.write_pidfile(path, os.getpid())
            assert pidfile.read(path) == os.getpid()
    finally:
        os.unlink(path)


def test_a_full_disk_leaves_no_empty_pid_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError):
            monitor_files.write_pidfile(str(tmp_path / "pid"), os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("spec", "full"),
    [
        (StoreSpec(), False),
        (StoreSpec(factory="inprocess.store:FileStore"), False),
        (StoreSpec(factory="inprocess.etcd_store:EtcdStore"), False),
        (StoreSpec(factory="inprocess.store_of_mine:Store"), True),
        (StoreSpec(factory="mine:Store", kwargs={"like": "inprocess.store:FileStore", "of": {"factory": ""}}), True),
    ],
)
def test_a_store_class_of_the_user_may_need_all_of_torch(spec: StoreSpec, full: bool) -> None:
    """Whatever its arguments are."""
    assert MonitorConfig(member=0, roster=(0,), store=spec.to_json()).needs_full_torch is full


@pytest.mark.parametrize(("barrier", "grace"), [(120.0, 5.0), (92.0, 0.5)])
def test_a_rank_that_hangs_is_gone_before_the_others_give_up(barrier: float, grace: float) -> None:
    config = MonitorConfig(member=0, roster=(0,), store="", hard_timeout=90.0, barrier_timeout=barrier)
    assert config.grace == grace
