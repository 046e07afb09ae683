"""The ladder goes on whatever becomes of a step; the hooks do nothing where nothing is to do, and can be repeated."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from inprocess import abort
from inprocess.abort import Abort, AbortTorchDistributed, AbortTransformerEngine, Ladder, StepResult, unfinished
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
    monkeypatch.setattr(abort, "RESERVE", 0.01)
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
    monkeypatch.setattr(abort, "RESERVE", 0.01)
    monkeypatch.setattr(abort, "_abort_group", lambda group: release.wait())
    init()
    AbortTorchDistributed(deadline=0.1)(STATE)
    assert not dist.is_initialized()
    init()
    release.set()
    settle()
    assert dist.is_initialized()
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def test_all_groups_in_one_coalesced_abort() -> None:
    calls = []

    class Backend:
        def _group_start(self) -> None:
            calls.append("start")

        def _group_end(self) -> None:
            calls.append("end")

    class Group:
        def __init__(self, name: str, backend: Backend | None, fails: bool = False) -> None:
            self.name, self.backend, self.fails = name, backend, fails

        def _get_backend(self, device: torch.device) -> Backend:
            if self.backend is None:
                raise RuntimeError(f"no backend for {device}")
            return self.backend

        def abort(self) -> None:
            calls.append(self.name)
            if self.fails:
                raise RuntimeError("broken")

    abort._abort_groups([Group("gloo", None), Group("tp", Backend()), Group("world", Backend())])
    assert calls == ["start", "gloo", "tp", "world", "end"]
    calls.clear()
    with pytest.raises(RuntimeError, match="broken"):
        abort._abort_groups([Group("tp", Backend(), fails=True)])
    assert calls == ["start", "tp", "end"]


def test_older_torch_aborts_the_backend() -> None:
    calls = []

    class Backend:
        def _abort(self) -> None:
            calls.append("abort")

    class Group:
        def _get_backend(self, device: torch.device) -> Backend:
            return Backend()

    abort._abort_groups([Group()])
    assert calls == ["abort"]


# --- flight recorder, TransformerEngine -----------------------------------------------------------------------------


def test_flight_record_is_written_where_the_user_wants_it(
    group: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "record_"))
    bindings: Any = torch._C._distributed_c10d
    monkeypatch.setattr(bindings, "_dump_nccl_trace", lambda: b"trace", raising=False)
    AbortTorchDistributed()(STATE)
    record = tmp_path / "record_0"
    assert record.read_bytes() == b"trace"
    assert record.stat().st_mode & 0o777 == 0o600


def test_flight_record_follows_no_link(group: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "100")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "record_"))
    bindings: Any = torch._C._distributed_c10d
    monkeypatch.setattr(bindings, "_dump_nccl_trace", lambda: b"trace", raising=False)
    os.symlink(tmp_path / "elsewhere", tmp_path / "record_0")
    AbortTorchDistributed()(STATE)
    assert not (tmp_path / "elsewhere").exists()
    assert not dist.is_initialized()


@pytest.mark.parametrize("size, file", [("0", "record_"), ("100", ""), ("", "record_")])
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


def test_step_result_reads_well() -> None:
    assert StepResult("a", 0.5) == StepResult("a", 0.5, "", False)
