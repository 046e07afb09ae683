"""Each name of torch's own that the library uses is taken away once; what happens then is in docs/versions.md."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as bindings
from torch.distributed import distributed_c10d as c10d

from inprocess.abort import AbortTorchDistributed
from inprocess.call import start
from inprocess.collectives import gloo, groups, nccl, remembered
from inprocess.collectives.groups import unfinished
from inprocess.exception import OptionError, StoreLost
from inprocess.hardware.leftovers import Leftovers
from inprocess.protocol.ops import Verb, Wait
from inprocess.state import FrozenState
from inprocess.stores import driver, raw, serving
from inprocess.system import logs
from inprocess.tools import inject_fault
from tests.threads.groups import init

pytestmark = pytest.mark.usefixtures("excepthook")
STATE = FrozenState(rank=0, world_size=1, initial_rank=0, initial_world_size=1)
Patch = pytest.MonkeyPatch


# --- torch's groups -----------------------------------------------------------------------------------------------


def check_abort_and_again(caplog: pytest.LogCaptureFixture) -> None:
    """Groups are gone and can be made again, and the log says what is different."""
    logs.once.cache_clear()
    with caplog.at_level(logging.WARNING, "inprocess.collectives.groups"):
        for _ in range(2):
            AbortTorchDistributed()(STATE)
            assert not dist.is_initialized()
            assert not unfinished()
            init()
            dist.all_reduce(torch.ones(1))
    assert caplog.text.count("destroy_process_group()") == 1


def test_tables_under_another_name(group: None, monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(groups, "WORLD", "_no_such_tables")
    assert groups.current() == [dist.group.WORLD]
    check_abort_and_again(caplog)


def test_no_unregister_all_process_groups(group: None, monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delattr(bindings, "_unregister_all_process_groups")
    check_abort_and_again(caplog)


def test_torch_has_no_other_table() -> None:
    """One that is not cleared keeps every iteration's groups, as `pg_flight_recorder_hooks` of 2.15 did."""
    tables = {name for name, value in vars(type(c10d._world)).items() if isinstance(value, property)}
    assert tables - {"default_pg", "group_count", "pg_config_info"} <= set(groups._TABLES)


def test_a_table_that_is_missing(group: None, monkeypatch: Patch) -> None:
    """The others are cleared all the same."""
    monkeypatch.setattr(groups, "_TABLES", ("no_such_table", *groups._TABLES))
    AbortTorchDistributed()(STATE)
    assert not c10d._world.pg_map
    assert not unfinished()


def test_a_group_that_cannot_be_aborted(group: None, caplog: pytest.LogCaptureFixture) -> None:
    """It is forgotten all the same."""
    c10d._world.pg_names[object()] = "odd"  # type: ignore[index]
    with caplog.at_level(logging.WARNING, "inprocess.abort"):
        AbortTorchDistributed()(STATE)
    assert "no attribute 'abort'" in caplog.text
    assert not unfinished()


def test_no_flight_recorder(monkeypatch: Patch, tmp_path: Any) -> None:
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        monkeypatch.delattr(bindings, name, raising=False)
    nccl.dump_flight_record(tmp_path / "trace", of_nccl_alone=True)
    nccl.forget_flight_record()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", sorted(groups._MAKERS))
def test_the_functions_that_make_groups_have_these_names(name: str) -> None:
    """Where they have others, a wait for a peer that never connects ends at its own timeout."""
    assert inspect.unwrap(getattr(c10d, name)).__code__.co_filename.endswith("distributed_c10d.py")


def test_gloo_that_cannot_be_told_from_others(
    group: None, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither its threads nor its classes have the names we know: the log says so, once."""
    monkeypatch.setattr(gloo, "GLOO_THREAD", "no thread has this name")
    monkeypatch.setattr(gloo, "GLOO_CLASSES", b"no class")
    gloo._warn_of_timeouts.cache_clear()
    with caplog.at_level(logging.WARNING, "inprocess.collectives.gloo"):
        assert [gloo.shutdown_gloo_connections(), gloo.shutdown_gloo_connections()] == [0, 0]
    assert caplog.text.count("end at its own timeout") == 1
    assert torch.__version__ in caplog.text


# --- torch's stores -----------------------------------------------------------------------------------------------


class Strange:
    """A store with a timeout of 0.05 s, or a connection that breaks, in words of its own."""

    def __init__(self, broken: bool) -> None:
        self._broken = broken

    def set_timeout(self, timeout: object) -> None:
        pass

    def get(self, key: str) -> bytes:
        if not self._broken:
            time.sleep(0.05)
        raise RuntimeError("les mots ont changé")

    def check(self, keys: list[str]) -> bool:
        if self._broken:
            raise RuntimeError("les mots ont changé")
        return False


def wait(seconds: float) -> Verb[bytes | None]:
    return (yield Wait("key", seconds))


def test_a_timeout_in_other_words_is_told_by_the_clock() -> None:
    assert driver.execute(wait(0.05), Strange(broken=False)) is None


@pytest.mark.parametrize(("broken", "seconds"), [(True, 0.0), (False, 30.0)], ids=["no answer", "too early"])
def test_a_lost_store_in_other_words_is_no_timeout(broken: bool, seconds: float) -> None:
    with pytest.raises(StoreLost, match="les mots"):
        driver.execute(wait(seconds), Strange(broken))


def test_no_master_listen_fd(monkeypatch: Patch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise TypeError("__init__(): incompatible constructor arguments")

    monkeypatch.setattr(serving, "_TCPStore", refuse)
    with pytest.raises(OptionError, match=r"torch \d+\.\d+.* cannot serve a store"):
        serving.serve("127.0.0.1", 0)


def test_no_libuv_backend_to_ask_for() -> None:
    """Then it is taken for the newer server."""
    assert raw.uses_libuv(dist.HashStore())


def test_no_dist_error(monkeypatch: Patch) -> None:
    """A second copy of the module, made without it."""
    monkeypatch.delattr(dist, "DistError")
    spec = importlib.util.spec_from_file_location("inprocess_start_again", start.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, again)
    spec.loader.exec_module(again)
    assert again.DIST_ERROR is RuntimeError


@pytest.mark.parametrize("name", ["clear_redistribute_planner_cache", "_gen_transform_infos"])
def test_no_cache_of_meshes(monkeypatch: Patch, name: str) -> None:
    """The others are cleared."""
    from torch.distributed.tensor import _collective_utils, _redistribute

    cleared: list[bool] = []
    cache = type("Cache", (), {"cache_clear": lambda: cleared.append(True)})
    monkeypatch.setattr(_collective_utils, "MeshTopoInfo", type("Info", (), {"build_from_mesh": cache}))
    monkeypatch.delattr(_redistribute, name)
    remembered.forget(remembered.MESHES)
    assert cleared == [True]


# --- CUDA ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default_generators", "memory_allocated"])
def test_memory_that_cannot_be_asked_for(monkeypatch: Patch, name: str) -> None:
    """Nothing is collected, and nothing said."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", [object()], raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 40)
    asked = Leftovers()
    asked.enter()
    assert asked._ask() == 1 << 40
    monkeypatch.delattr(torch.cuda, name)
    asked.collect()
    asked.report(STATE)
    assert asked._ask() == 0


def test_no_cuda_sleep(monkeypatch: Patch) -> None:
    monkeypatch.delattr(torch.cuda, "_sleep")
    with pytest.raises(OptionError, match="choose another fault"):
        inject_fault._gpu_sleep()
