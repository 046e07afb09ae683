"""What can be said of NCCL without a GPU: the environment, which groups use it, CUDA graphs, what torch remembers."""

from __future__ import annotations

import logging
import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from inprocess import nccl
from inprocess.environment import Borrowed
from inprocess.held import Held

Patch = pytest.MonkeyPatch
HANDLING, RETHROW, HEARTBEAT = nccl.HANDLING, nccl.RETHROW, nccl.HEARTBEAT
BY_TORCHRUN = {HANDLING: "1", "TORCHELASTIC_RUN_ID": "job"}


# --- the environment ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "hard_timeout", "found"),
    [
        ({}, 90, {HANDLING: "0", RETHROW: "0"}),
        (BY_TORCHRUN, 90, {HANDLING: "0", RETHROW: "0"}),
        (BY_TORCHRUN | {HANDLING: "3"}, 90, {RETHROW: "0"}),
        ({HANDLING: "1"}, 90, {RETHROW: "0"}),
        ({HANDLING: "2", RETHROW: "1"}, 90, {}),
        ({HANDLING: "0", RETHROW: "0"}, 240, {}),
        ({HANDLING: "0", RETHROW: "0"}, 241, {HEARTBEAT: "482"}),
        ({HANDLING: "0", RETHROW: "0", HEARTBEAT: "60"}, 1000, {}),
    ],
)
def test_settings(environ: dict[str, str], hard_timeout: float, found: dict[str, str]) -> None:
    assert nccl.settings(environ, hard_timeout) == found


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, []),
        (BY_TORCHRUN, []),
        ({HANDLING: "0", RETHROW: "0"}, []),
        ({HANDLING: "2"}, []),
        ({HANDLING: "1"}, [HANDLING]),
        (BY_TORCHRUN | {HANDLING: "3"}, [HANDLING]),
        ({RETHROW: "True"}, [RETHROW]),
        ({"TORCH_NCCL_DESYNC_DEBUG": "1"}, ["TORCH_NCCL_DESYNC_DEBUG"]),
        ({"TORCH_NCCL_DESYNC_DEBUG": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO"}, []),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, ["TORCH_DISTRIBUTED_DEBUG"]),
        ({HEARTBEAT: "90"}, [HEARTBEAT]),
        ({HEARTBEAT: "91"}, []),
        ({HEARTBEAT: "90", nccl.MONITORING: "0"}, []),
        ({HEARTBEAT: "soon"}, []),
    ],
)
def test_objections(environ: dict[str, str], names: list[str]) -> None:
    """Each names the variable, its value, what it does and the remedy."""
    found = nccl.objections(environ, 90)
    assert [each.partition("=")[0] for each in found] == names
    for text in found:
        assert f"={environ[text.partition('=')[0]]}" in text
        assert "unset it" in text or "raise it" in text


def test_what_was_set_is_put_back(monkeypatch: Patch) -> None:
    monkeypatch.setenv(HANDLING, "1")
    monkeypatch.delenv(RETHROW, raising=False)
    borrowed = Borrowed({HANDLING: "0", RETHROW: "0"})
    assert os.environ[HANDLING] == "1"
    borrowed.show(0, 1, "localhost", 1)
    assert (os.environ[HANDLING], os.environ[RETHROW]) == ("0", "0")
    borrowed.restore()
    assert os.environ[HANDLING] == "1"
    assert RETHROW not in os.environ


@pytest.mark.parametrize(("aloud", "levels"), [(True, ["WARNING", "INFO"]), (False, ["DEBUG", "DEBUG"])])
def test_advice_is_given_once(
    monkeypatch: Patch, caplog: pytest.LogCaptureFixture, aloud: bool, levels: list[str]
) -> None:
    monkeypatch.setattr(nccl, "_told", [])
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    monkeypatch.setenv(RETHROW, "1")
    with caplog.at_level(logging.DEBUG, "inprocess.nccl"):
        monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
        nccl.advise(90, aloud)
        assert not caplog.records
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        for _ in range(2):
            nccl.advise(90, aloud)
    assert [record.levelname for record in caplog.records] == levels
    assert "NCCL_NVLS_ENABLE" in caplog.records[1].message


def test_no_hint_where_the_user_has_decided() -> None:
    assert not nccl.hints({"NCCL_NVLS_ENABLE": "1"})


# --- groups -------------------------------------------------------------------------------------------------------


class Nccl:
    """torch's class of this name."""


def group_with(backend: Any) -> Any:
    def get_backend(device: torch.device) -> Any:
        assert device.type == "cuda"
        if backend is None:
            raise RuntimeError("no backend for cuda")
        return backend

    return types.SimpleNamespace(_get_backend=get_backend)


@pytest.mark.parametrize(
    ("backend", "used"),
    [(Nccl(), True), (types.SimpleNamespace(wrapped_pg=Nccl()), True), (None, False), (object(), False)],
    ids=["NCCL", "in the wrapper for debugging", "none on the GPU", "another one"],
)
def test_who_uses_nccl(monkeypatch: Patch, backend: Any, used: bool) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert nccl.is_used_by(group_with(backend)) is used
    assert not nccl.is_used_by(object())
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert not nccl.is_used_by(group_with(backend))


# --- CUDA graphs --------------------------------------------------------------------------------------------------

SOURCE = """
class CUDAGraph:
    def __init__(self, gpu=None):
        self.gpu, self.resets = gpu, 0

    def replay(self):
        self.gpu.busy.acquire()  # in C, as a launch

    def reset(self):
        self.resets += 1
"""


@pytest.fixture
def graphs(monkeypatch: Patch) -> Iterator[Any]:
    """torch.cuda.graphs, with a class of graphs that needs no GPU."""
    module: Any = types.ModuleType("torch.cuda.graphs")
    exec(compile(SOURCE, "torch/cuda/graphs.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "torch.cuda.graphs", module)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    yield module


def until_replaying() -> None:
    while not nccl._is_replaying():
        os.sched_yield()


def test_graphs_are_reset_and_refuse_to_be_replayed(graphs: Any) -> None:
    class Odd:
        """Says that it is a graph, and breaks when it is asked anything."""

        @property
        def __class__(self) -> Any:  # type: ignore[override]
            raise ValueError

    class Traced(graphs.CUDAGraph):  # type: ignore[misc]
        pass

    odd, found = Odd(), [graphs.CUDAGraph(), Traced()]
    assert nccl.reset_graphs() == 2
    assert [graph.resets for graph in found] == [1, 1]
    with pytest.raises(RuntimeError, match="capture it anew"):
        found[0].replay()
    del odd


def test_a_graph_that_is_being_replayed_is_waited_for(graphs: Any, monkeypatch: Patch) -> None:
    """Destroying it under a launch would end the process."""
    gpu = types.SimpleNamespace(busy=threading.Lock())
    gpu.busy.acquire()
    graph = graphs.CUDAGraph(gpu)
    thread = threading.Thread(target=graph.replay)
    thread.start()
    until_replaying()
    # the first look finds it at work, and lets it end
    monkeypatch.setattr(nccl, "LOOK", 0)
    looks: list[int] = []
    is_replaying = nccl._is_replaying

    def look() -> bool:
        looks.append(graph.resets)
        found = is_replaying()
        if found and gpu.busy.locked():
            gpu.busy.release()
        return found

    monkeypatch.setattr(nccl, "_is_replaying", look)
    assert nccl.reset_graphs() == 1
    assert len(looks) > 1
    assert set(looks) == {0}
    thread.join()


def test_a_replay_that_does_not_end(graphs: Any, monkeypatch: Patch) -> None:
    gpu = types.SimpleNamespace(busy=threading.Lock())
    gpu.busy.acquire()
    graph = graphs.CUDAGraph(gpu)
    thread = threading.Thread(target=graph.replay)
    thread.start()
    until_replaying()
    monkeypatch.setattr(nccl, "REPLAYING", 0.01)
    with pytest.raises(TimeoutError, match="no graph was reset"):
        nccl.reset_graphs()
    assert graph.resets == 0
    gpu.busy.release()
    thread.join()


def test_no_graphs_without_cuda(graphs: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    graph = graphs.CUDAGraph()
    assert nccl.reset_graphs() == 0
    assert graph.resets == 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delattr(graphs, "CUDAGraph")
    assert nccl.reset_graphs() == 0


# --- what torch remembers -----------------------------------------------------------------------------------------


@pytest.fixture
def memory(monkeypatch: Patch) -> Any:
    """Symmetric memory and the compiler, as a program that uses them has imported them."""
    symmetric: Any = types.ModuleType("torch.distributed._symmetric_memory")
    symmetric._group_name_to_store = {"0": object()}
    symmetric._group_name_to_workspace_tensor = {"0": object()}
    trees: Any = types.ModuleType("torch._inductor.cudagraph_trees")
    trees.resets = 0

    def reset_cudagraph_trees() -> None:
        trees.resets += 1
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    trees.reset_cudagraph_trees = reset_cudagraph_trees
    monkeypatch.setitem(sys.modules, symmetric.__name__, symmetric)
    monkeypatch.setitem(sys.modules, trees.__name__, trees)
    return types.SimpleNamespace(symmetric=symmetric, trees=trees)


def test_what_an_abort_made_useless_is_forgotten_once_the_function_is_left(memory: Any) -> None:
    held = Held()
    held.begin()
    held.groups([])
    assert memory.symmetric._group_name_to_store
    held.begin()
    assert not memory.symmetric._group_name_to_store
    assert not memory.symmetric._group_name_to_workspace_tensor
    assert memory.trees.resets == 1
    held.end()
    assert memory.trees.resets == 1


def test_a_call_without_an_abort_takes_nothing_from_the_program(memory: Any) -> None:
    held = Held()
    held.begin()
    held.end()
    assert memory.symmetric._group_name_to_store
    assert memory.trees.resets == 0


def test_the_names_are_torchs() -> None:
    """Where torch has others, symmetric memory of an iteration before is taken for this one's."""
    from torch.distributed import _symmetric_memory

    assert _symmetric_memory._group_name_to_store == {}
    assert _symmetric_memory._group_name_to_workspace_tensor == {}
