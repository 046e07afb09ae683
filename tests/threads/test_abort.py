"""The ladder goes on whatever becomes of a step; the hooks do nothing where nothing is to do, and can be repeated."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import logging
import os
import pickle
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from inprocess import abort
from inprocess.abort import (
    Abort,
    AbortPersistentCheckpointProcesses,
    AbortTorchDistributed,
    AbortTransformerEngine,
    Ladder,
    StepResult,
)
from inprocess.collectives import background
from inprocess.collectives.dead_groups import dead_groups
from inprocess.collectives.groups import unfinished
from inprocess.exception import OptionError
from inprocess.state import FrozenState
from tests.threads.groups import init, settle

pytestmark = pytest.mark.usefixtures("excepthook")
STATE = FrozenState(rank=0, world_size=1, initial_rank=0, initial_world_size=1)


# --- the ladder ---------------------------------------------------------------------------------------------------


def test_steps_run_in_order_and_errors_stop_nothing(caplog: pytest.LogCaptureFixture) -> None:
    order = []

    def fail() -> None:
        order.append("fail")
        raise ValueError("broken")

    def leave() -> None:
        order.append("leave")
        sys.exit(1)

    with caplog.at_level(logging.WARNING, "inprocess.abort"):
        results = Ladder([("a", fail), ("b", leave), ("c", lambda: order.append("last"))]).run()
    assert order == ["fail", "leave", "last"]
    assert [(result.name, result.error, result.hung) for result in results] == [
        ("a", "ValueError: broken", False),
        ("b", "SystemExit: 1", False),
        ("c", "", False),
    ]
    assert "step 'a' failed" in caplog.text


def test_step_that_hangs_is_left_to_itself(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abort, "RESERVE_S", 0.01)
    release, done = threading.Event(), []

    def hang() -> None:
        release.wait()

    ladder = Ladder([("hangs", hang), ("next", lambda: done.append("next")), ("last", hang)], deadline=0.1)
    with caplog.at_level(logging.WARNING, "inprocess.abort"):
        results = ladder.run()
    assert [result.hung for result in results] == [True, False, True]
    assert done == ["next"]
    assert "did not end in time" in results[0].error
    assert "step 'hangs' failed" in caplog.text
    release.set()
    settle()
    assert done == ["next"]  # the one that was left alone does not go on with the others


def test_steps_share_a_thread_until_one_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abort, "RESERVE_S", 0.01)
    release, threads = threading.Event(), {}

    def step(name: str) -> tuple[str, Callable[[], object]]:
        def act() -> None:
            threads[name] = threading.current_thread()
            if name == "hangs":
                release.wait()

        return name, act

    Ladder([step("first"), step("second"), [step("hangs"), step("beside")], step("last")], deadline=0.1).run()
    release.set()
    settle()
    assert threads["first"] is threads["second"] is threads["hangs"]
    assert threads["beside"] is threads["last"] is not threads["hangs"]
    assert not any(thread.is_alive() for thread in threads.values())


@pytest.mark.parametrize("most", [0, 1])
def test_steps_are_taken_also_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """In the calling one. Without the abort a healthy rank would be killed for it."""
    started: list[threading.Thread] = []

    def start(thread: threading.Thread, real: Callable[[threading.Thread], None] = threading.Thread.start) -> None:
        if len(started) == most:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    taken: list[str] = []
    rungs: list[Any] = [
        ("one", lambda: taken.append("one")),
        [("two", lambda: 1 / 0), ("three", lambda: taken.append("three"))],
    ]
    results = Ladder([*rungs, ("four", lambda: taken.append("four"))]).run()
    assert taken == ["one", "three", "four"]
    assert [(each.name, each.hung, bool(each.error)) for each in results] == [
        ("one", False, False),
        ("two", False, True),
        ("three", False, False),
        ("four", False, False),
    ]
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize("hook", [abort.AbortTorchDistributed, abort.AbortTransformerEngine])
def test_the_deadline_is_a_duration(hook: Any) -> None:
    assert hook(deadline=datetime.timedelta(seconds=5)).deadline == 5.0
    for wrong in (0, "5", -1, None):
        with pytest.raises(OptionError, match="deadline="):
            hook(deadline=wrong)


def test_ctrl_c_does_not_wait_for_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def interrupt(turn: object, limits: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(abort._Turn, "results", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Ladder([("hangs", release.wait)]).run()
    release.set()
    settle()


def test_no_steps() -> None:
    assert Ladder([]).run() == []


def test_result_of_a_step_with_an_unprintable_error() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError

    def fail() -> None:
        raise Unprintable

    (result,) = Ladder([("a", fail)]).run()
    assert "Unprintable" in result.error


# --- torch.distributed --------------------------------------------------------------------------------------------


def test_hooks_are_of_the_base_class() -> None:
    assert isinstance(AbortTorchDistributed(), Abort)
    assert isinstance(AbortTransformerEngine(), Abort)
    with pytest.raises(TypeError):
        Abort()  # type: ignore[abstract]


def test_nothing_to_do() -> None:
    assert AbortTorchDistributed()(STATE) is STATE
    assert not unfinished()


def test_torch_without_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    assert AbortTorchDistributed()(STATE) is STATE
    assert not unfinished()


def test_groups_are_gone_and_can_be_made_again(group: None) -> None:
    for _ in range(3):
        dist.new_group()
        dist.all_reduce(torch.ones(1))
        assert unfinished()
        AbortTorchDistributed()(STATE)
        assert not dist.is_initialized()
        assert not unfinished()
        AbortTorchDistributed()(STATE)  # the loop does so after the function was left
        init()
        assert dist.get_process_group_ranks(dist.group.WORLD) == [0]  # type: ignore[arg-type]


def test_a_group_that_was_in_the_making_meanwhile_goes_too(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is taken before the abort, its rows are entered after it: it was waiting for its peers."""
    c10d: Any = dist.distributed_c10d

    def store(*args: Any) -> Any:
        AbortTorchDistributed()(STATE)
        return dist.PrefixStore(*args)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(c10d, "PrefixStore", store)
        dist.new_group()
    assert not dist.is_initialized() and unfinished()
    AbortTorchDistributed()(STATE)
    assert not unfinished()
    init()
    dist.new_group()


def test_torch_has_no_tables_we_do_not_know(group: None) -> None:
    """Fails when a new version of torch keeps groups in another table."""
    dist.new_group()
    AbortTorchDistributed()(STATE)
    world = dist.distributed_c10d._world
    # the one left out is computed from the others, and needs a default group
    names = [name for name in dir(world) if not name.startswith("__") and name != "pg_config_info"]
    kept = {name: getattr(world, name) for name in names}
    assert not {name: value for name, value in kept.items() if value}


def test_ladder_is_quick(group: None) -> None:
    begin = time.perf_counter()
    AbortTorchDistributed()(STATE)
    seconds = time.perf_counter() - begin
    print(f"ladder: {seconds * 1e3:.2f} ms")
    assert seconds < 5  # a ceiling; 1 to 2 ms on an idle machine


def test_group_whose_abort_hangs_cannot_harm_the_next_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The abort of a broken group comes back when the next iteration has its own groups: these must stay."""
    release = threading.Event()
    monkeypatch.setattr(abort, "RESERVE_S", 0.01)
    monkeypatch.setattr(abort, "_abort_group", lambda *given: release.wait())
    init()
    AbortTorchDistributed(deadline=0.1)(STATE)
    assert not dist.is_initialized()
    init()
    release.set()
    settle()
    assert dist.is_initialized()
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def test_steps_of_a_rung_run_at_the_same_time(caplog: pytest.LogCaptureFixture) -> None:
    """Each of them waits for the other one, as the aborts of two NCCL groups do."""
    both = threading.Barrier(2, timeout=5)
    with caplog.at_level(logging.DEBUG, "inprocess.abort"):
        results = Ladder(
            [("before", lambda: None), [("a", both.wait), ("b", both.wait)], ("after", lambda: None)]
        ).run()
    assert [(result.name, result.error) for result in results] == [("before", ""), ("a", ""), ("b", ""), ("after", "")]
    assert "the step 'b' took" in caplog.text


def test_a_step_that_hangs_is_not_waited_for_by_the_others_of_its_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abort, "RESERVE_S", 0.01)
    release = threading.Event()

    def fail() -> None:
        raise ValueError("broken")

    results = Ladder([[("hangs", release.wait), ("fails", fail), ("works", lambda: None)]], deadline=0.1).run()
    assert [(result.hung, result.error) for result in results[1:]] == [(False, "ValueError: broken"), (False, "")]
    assert results[0].hung
    release.set()
    settle()


def test_all_groups_are_aborted_at_the_same_time(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One NCCL group's abort may wait for kernels of another group, which end when that one is aborted."""
    for _ in range(2):
        dist.new_group()
    meet = threading.Barrier(3, timeout=5)
    met: list[int] = []
    monkeypatch.setattr(dist.ProcessGroup, "abort", lambda group: met.append(meet.wait()))
    AbortTorchDistributed()(STATE)
    assert sorted(met) == [0, 1, 2]
    assert not unfinished()


def test_no_step_is_the_last_owner_of_a_group(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its destructor waits for Gloo's worker, which may want the interpreter lock."""
    ended: list[str] = []
    weakref.finalize(dist.group.WORLD, lambda: ended.append(threading.current_thread().name))
    monkeypatch.setattr(background, "run", lambda action: action())
    monkeypatch.setattr(dead_groups, "keep", functools.partial(_note_owner, dead_groups.keep, ended))
    AbortTorchDistributed()(STATE)
    assert ended == ["about to let go", "inprocess-abort", "let go"]


def _note_owner(let_go: Callable[[list[Any]], None], ended: list[str], found: list[Any]) -> None:
    ended.append("about to let go")
    let_go(found)
    ended.append("let go")


# --- flight recorder, TransformerEngine -----------------------------------------------------------------------------


def read_record(file: Path) -> Any:
    assert file.stat().st_mode & 0o777 == 0o600
    return pickle.loads(file.read_bytes())


def test_flight_record_is_written_where_the_user_wants_it(
    group: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "record_"))
    dist.all_reduce(torch.ones(1))
    AbortTorchDistributed()(STATE)
    assert "entries" in read_record(tmp_path / "record_0")


def test_each_restart_has_a_folder_for_its_flight_records(group: None, tmp_path: Path) -> None:
    for iteration in range(2):
        AbortTorchDistributed(flight_records=tmp_path)(dataclasses.replace(STATE, iteration=iteration))
        assert "entries" in read_record(tmp_path / f"iteration_{iteration}" / "rank_0")
        init()
    assert tmp_path.joinpath("iteration_1").stat().st_mode & 0o777 == 0o700


def test_flight_record_has_the_number_that_its_group_knows(group: None, tmp_path: Path) -> None:
    state = FrozenState(rank=3, world_size=4, initial_rank=5, initial_world_size=8, active_rank=2, active_world_size=3)
    AbortTorchDistributed(flight_records=tmp_path)(state)
    assert [file.name for file in tmp_path.glob("*/*")] == ["rank_2"]


def test_flight_record_follows_no_link(group: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "record_"))
    os.symlink(tmp_path / "elsewhere", tmp_path / "record_0")
    AbortTorchDistributed()(STATE)
    assert not (tmp_path / "elsewhere").exists()
    assert not dist.is_initialized()


def test_a_file_is_made_when_its_record_is_there(
    group: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system that hangs, and comes back an iteration later, gets the record of the iteration it belongs to."""

    def fail(**options: bool) -> bytes:
        raise RuntimeError("no record")

    bindings: Any = torch._C._distributed_c10d
    monkeypatch.setattr(bindings, "_dump_fr_trace", fail)
    with caplog.at_level(logging.WARNING, "inprocess.abort"):
        AbortTorchDistributed(flight_records=tmp_path)(STATE)
    assert "'flight recorder' failed" in caplog.text
    assert not list(tmp_path.iterdir())
    assert not unfinished()


@pytest.mark.parametrize("size, file", [("0", "record_"), ("100", "")])
def test_no_flight_record_unless_asked_for(
    group: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: str, file: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", size)
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", file)
    AbortTorchDistributed()(STATE)
    assert not list(tmp_path.iterdir())


def test_transformer_engine_is_used_only_where_the_program_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AbortTransformerEngine()(STATE) is STATE
    assert "transformer_engine.pytorch" not in sys.modules
    calls: list[str] = []
    engine: Any = types.ModuleType("transformer_engine.pytorch")
    engine.module = types.SimpleNamespace(base=types.SimpleNamespace(destroy_ub=lambda: calls.append("destroyed")))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    assert AbortTransformerEngine()(STATE) is STATE
    assert calls == ["destroyed"]


@pytest.mark.parametrize("module", ["fp8", "quantization"])
def test_the_group_in_transformer_engines_state_of_fp8_is_let_go(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module has another name in newer versions."""
    calls: list[str] = []
    engine: Any = types.ModuleType("transformer_engine.pytorch")
    engine.module = types.SimpleNamespace(base=types.SimpleNamespace(destroy_ub=lambda: calls.append("buffers")))
    low: Any = types.ModuleType(f"transformer_engine.pytorch.{module}")
    low.FP8GlobalStateManager = types.SimpleNamespace(reset=lambda: calls.append("fp8"))
    for each in (engine, low):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    AbortTransformerEngine()(STATE)
    assert calls == ["buffers", "fp8"]


def test_writers_of_the_other_librarys_checkpoints_are_ended_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AbortPersistentCheckpointProcesses()(STATE) is STATE
    calls: list[str] = []
    name = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"
    core: Any = types.ModuleType(name)
    core.abort_nvrx_checkpoint = lambda: calls.append("ended")
    monkeypatch.setitem(sys.modules, name, core)
    assert AbortPersistentCheckpointProcesses()(STATE) is STATE
    assert calls == ["ended"]


@pytest.mark.parametrize("named", ["first", "by name", "by the variable"])
def test_flight_records_under_the_other_librarys_name(
    named: str, group: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if named == "by the variable":
        monkeypatch.setenv("NVRX_FR_TRACE_PATH", str(tmp_path))
    make = {
        "first": lambda: AbortTorchDistributed(str(tmp_path)),
        "by name": lambda: AbortTorchDistributed(torch_fr_trace_path=str(tmp_path)),
        "by the variable": AbortTorchDistributed,
    }
    make[named]()(STATE)
    assert "entries" in read_record(tmp_path / f"iteration_{STATE.iteration}" / "rank_0")


def test_a_deadline_in_the_place_of_a_folder() -> None:
    with pytest.raises(OptionError, match=r"AbortTorchDistributed\(5.0\): the first .* pass deadline=5.0 by name"):
        AbortTorchDistributed(5.0)  # type: ignore[arg-type]


def test_step_result_reads_well() -> None:
    assert StepResult("a", 0.5) == StepResult("a", 0.5, "", False)
