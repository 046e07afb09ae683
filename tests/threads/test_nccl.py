"""What can be said of NCCL without a GPU: the environment, which groups use it, CUDA graphs, what torch remembers."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from inprocess import abort
from inprocess.abort import AbortTorchDistributed
from inprocess.collectives import nccl
from inprocess.collectives.dead_groups import DeadGroups
from inprocess.collectives.remembered import Remembered
from inprocess.collectives.results import Results
from inprocess.state import FrozenState
from inprocess.system.environment import Borrowed, Place
from inprocess.system.heap import heap
from tests.threads import groups

Patch = pytest.MonkeyPatch
HANDLING, RETHROW, MONITORING = nccl.HANDLING, nccl.RETHROW, nccl.MONITORING
DUMPS = (nccl.DUMP, nccl.DUMP_WAIT, nccl.FR_DUMP, nccl.FR_DUMP_WAIT)
ALL = {name: "0" for name in (HANDLING, RETHROW, MONITORING, *DUMPS)} | nccl.NCCLS
BY_TORCHRUN = {HANDLING: "1", "TORCHELASTIC_RUN_ID": "job"}


# --- the environment ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "left"),
    [
        ({}, []),
        (BY_TORCHRUN, []),
        (BY_TORCHRUN | {HANDLING: "3"}, [HANDLING]),
        ({HANDLING: "1"}, [HANDLING]),
        ({"NCCL_ASYNC_ERROR_HANDLING": "2"}, [HANDLING]),
        ({HANDLING: "2", RETHROW: "1", nccl.DUMP: "1"}, [HANDLING, RETHROW, nccl.DUMP, nccl.FR_DUMP]),
        ({MONITORING: "1", nccl.DUMP_WAIT: "1000"}, [MONITORING, nccl.DUMP_WAIT, nccl.FR_DUMP_WAIT]),
        ({nccl.FR_DUMP: "1"}, [nccl.FR_DUMP]),
        ({"NCCL_SOCKET_RETRY_CNT": "34", "NCCL_RAS_ENABLE": "1"}, ["NCCL_SOCKET_RETRY_CNT", "NCCL_RAS_ENABLE"]),
    ],
)
def test_settings(environ: dict[str, str], left: list[str]) -> None:
    """All but what the user has set; what torchrun sets is not the user's."""
    assert nccl.settings(environ) == {name: value for name, value in ALL.items() if name not in left}


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, []),
        (BY_TORCHRUN, []),
        (ALL, []),
        ({HANDLING: "2"}, []),
        ({HANDLING: "1"}, [HANDLING]),
        ({"NCCL_ASYNC_ERROR_HANDLING": "3"}, ["NCCL_ASYNC_ERROR_HANDLING"]),
        (BY_TORCHRUN | {HANDLING: "3"}, [HANDLING]),
        ({RETHROW: "True"}, [RETHROW]),
        ({nccl.TEARDOWN: "1"}, [nccl.TEARDOWN]),
        ({nccl.TEARDOWN: "0"}, []),
        ({"TORCH_NCCL_DESYNC_DEBUG": "1"}, ["TORCH_NCCL_DESYNC_DEBUG"]),
        ({"NCCL_DESYNC_DEBUG": "1"}, ["NCCL_DESYNC_DEBUG"]),
        ({"TORCH_NCCL_DESYNC_DEBUG": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO"}, []),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, ["TORCH_DISTRIBUTED_DEBUG"]),
        ({MONITORING: "1"}, [MONITORING]),
        ({MONITORING: "0"}, []),
    ],
)
def test_objections(environ: dict[str, str], names: list[str]) -> None:
    """Each names the variable, its value, what it does and the remedy."""
    found = nccl.objections(environ)
    assert [each.partition("=")[0] for each in found] == names
    for text in found:
        assert f"={environ[text.partition('=')[0]]}" in text
        assert "unset it" in text


def test_what_was_set_is_put_back(monkeypatch: Patch) -> None:
    monkeypatch.setenv(HANDLING, "1")
    monkeypatch.delenv(RETHROW, raising=False)
    borrowed = Borrowed({HANDLING: "0", RETHROW: "0"})
    assert os.environ[HANDLING] == "1"
    borrowed.show(Place(0, 1, 0, 1), "localhost", 1)
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
    with caplog.at_level(logging.DEBUG, "inprocess.collectives.nccl"):
        monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
        nccl.advise(aloud)
        assert not caplog.records
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        for _ in range(2):
            nccl.advise(aloud)
    assert [record.levelname for record in caplog.records] == levels
    assert "NCCL_NVLS_ENABLE" in caplog.records[1].message


def test_no_hint_where_the_user_has_decided() -> None:
    assert not nccl.hints({"NCCL_NVLS_ENABLE": "1"})


# --- groups -------------------------------------------------------------------------------------------------------


class Nccl:
    """torch's ProcessGroupNCCL; what all of its classes over NCCL have, and what only this one has."""

    perform_nocolor_split = _group_start = None


class Nccl2:
    """As of torch 2.15, where it is what "nccl" makes; no subclass of the other one."""

    perform_nocolor_split = None


def group_with(backend: Any) -> Any:
    def get_backend(device: torch.device) -> Any:
        assert device.type == "cuda"
        if backend is None:
            raise RuntimeError("no backend for cuda")
        return backend

    return types.SimpleNamespace(_get_backend=get_backend)


@pytest.mark.parametrize(
    ("backend", "used"),
    [
        (Nccl(), True),
        (Nccl2(), True),
        (types.SimpleNamespace(wrapped_pg=Nccl2()), True),
        (None, False),
        (object(), False),
    ],
    ids=["NCCL", "nccl2", "in the wrapper for debugging", "none on the GPU", "another one"],
)
def test_who_uses_nccl(monkeypatch: Patch, backend: Any, used: bool) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert nccl.is_used_by(group_with(backend)) is used
    assert nccl.is_recorded_by_itself(group_with(backend)) is isinstance(backend, Nccl)
    assert not nccl.is_used_by(object())
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert not nccl.is_used_by(group_with(backend))


def test_torchs_own_classes() -> None:
    """Where torch has them: all, and Gloo is none of them."""
    found = [name for name in dir(dist.distributed_c10d) if name.startswith("ProcessGroupNCCL")]
    assert sorted(kind.__name__ for kind in nccl.classes()) == sorted(found)
    assert all(hasattr(kind, nccl.SPLIT) for kind in nccl.classes())
    assert [kind.__name__ for kind in nccl.classes() if hasattr(kind, "_group_start")] == found[:1]
    assert not hasattr(dist.ProcessGroupGloo, nccl.SPLIT)


# --- CUDA graphs --------------------------------------------------------------------------------------------------

SOURCE = """
class CUDAGraph:
    def __init__(self, launch=None):
        self.launch, self.resets = launch, 0
        self.capture_begin()

    def capture_begin(self):
        self.resets = 0

    def replay(self):
        self.launch()

    def reset(self):
        self.resets += 1
"""


@pytest.fixture
def graphs(monkeypatch: Patch) -> Iterator[Any]:
    """torch.cuda.graphs, with a class of graphs that needs no GPU."""
    module: Any = types.ModuleType("torch.cuda.graphs")
    exec(compile(SOURCE, "torch/cuda/graphs.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "torch.cuda.graphs", module)
    nccl.graphs.begin()
    yield module
    nccl.graphs.end()


def until_replaying() -> None:
    while not nccl._is_replaying():
        os.sched_yield()


def test_graphs_that_captured_are_reset_and_may_capture_again(graphs: Any) -> None:
    class Traced(graphs.CUDAGraph):  # type: ignore[misc]
        pass

    found, empty = [graphs.CUDAGraph(), Traced()], Traced.__new__(Traced)
    empty.resets = 0
    assert nccl.graphs.reset() == 2
    assert [graph.resets for graph in [*found, empty]] == [1, 1, 0]
    assert all("replay" not in vars(graph) for graph in found)
    assert nccl.graphs.reset() == 0
    found[0].capture_begin()
    assert nccl.graphs.reset() == 1


def test_graphs_are_noted_during_a_call_only(graphs: Any) -> None:
    before = graphs.CUDAGraph()
    nccl.graphs.end()
    after = graphs.CUDAGraph()
    assert nccl.graphs.reset() == 0
    assert (before.resets, after.resets) == (0, 0)
    assert graphs.CUDAGraph.capture_begin.__qualname__ == "CUDAGraph.capture_begin"


def test_no_replay_begins_while_graphs_are_reset(graphs: Any) -> None:
    refused: list[str] = []

    class Watched(graphs.CUDAGraph):  # type: ignore[misc]
        def reset(self) -> None:
            super().reset()
            with pytest.raises(RuntimeError, match="capture it anew") as error:
                self.replay()
            refused.append(str(error.value))

    graph = Watched()
    assert nccl.graphs.reset() == 1
    assert (graph.resets, len(refused)) == (1, 1)


def test_a_reset_that_hung_takes_no_graph_from_the_next_iteration(graphs: Any, monkeypatch: Patch) -> None:
    """It comes back when it was given up: the others may have captured again."""

    class Slow(graphs.CUDAGraph):  # type: ignore[misc]
        def reset(self) -> None:
            super().reset()
            times.append(1e9)

    times = [0.0]
    monkeypatch.setattr(nccl.clock, "monotonic", lambda: times[-1])
    found = [Slow(), Slow()]
    with pytest.raises(TimeoutError, match="not all graphs were reset"):
        nccl.graphs.reset()
    assert sorted(graph.resets for graph in found) == [0, 1]
    assert all("replay" not in vars(graph) for graph in found)


#: in C, as CUDA's
launch_in_c: Any = type(threading.Lock()).acquire


@contextlib.contextmanager
def replayed(graphs: Any, launch: Callable[..., object] = launch_in_c) -> Iterator[Any]:
    """A graph that a thread replays until the lock `gpu` is released."""
    gpu = threading.Lock()
    gpu.acquire()
    graph = graphs.CUDAGraph(functools.partial(launch, gpu))
    thread = threading.Thread(target=graph.replay)
    thread.start()
    until_replaying()
    yield types.SimpleNamespace(graph=graph, gpu=gpu)
    if gpu.locked():
        gpu.release()
    thread.join()


def test_a_graph_that_is_being_replayed_is_waited_for(graphs: Any, monkeypatch: Patch) -> None:
    """Destroying it under a launch would end the process. The first look finds it at work, and lets it end."""
    looks: list[int] = []
    is_replaying = nccl._is_replaying
    with replayed(graphs) as it:

        def look() -> bool:
            looks.append(it.graph.resets)
            found = is_replaying()
            if found and len(looks) == 1:
                it.gpu.release()
            return found

        monkeypatch.setattr(nccl, "POLL_INTERVAL_S", 0)
        monkeypatch.setattr(nccl, "_is_replaying", look)
        assert nccl.graphs.reset() == 1
    assert len(looks) > 1
    assert set(looks) == {0}


def park(gpu: threading.Lock) -> None:
    """A function on top of the replay, as the signal handler in which the abort parks the main thread."""
    gpu.acquire()


@pytest.mark.parametrize("launch", [launch_in_c, park], ids=["in C", "parked"])
def test_a_replay_that_does_not_end(graphs: Any, launch: Any) -> None:
    with replayed(graphs, launch) as it:
        with pytest.raises(TimeoutError, match="not all graphs were reset"):
            nccl.graphs.reset(patience=0.01)
        assert it.graph.resets == 0
        assert "replay" not in vars(it.graph)


def test_no_graphs_where_torch_has_none(graphs: Any, monkeypatch: Patch) -> None:
    nccl.graphs.end()
    monkeypatch.delattr(graphs, "CUDAGraph")
    nccl.graphs.begin()
    assert nccl.graphs.reset() == 0


# --- what torch remembers -----------------------------------------------------------------------------------------


@pytest.fixture
def memory(monkeypatch: Patch) -> Any:
    """Symmetric memory and the compiler, as a program that uses them has imported them."""
    importlib.import_module("torch.distributed._functional_collectives")  # which needs the real compiler
    symmetric: Any = types.ModuleType("torch.distributed._symmetric_memory")
    symmetric._group_name_to_store = {"0": object()}
    symmetric._group_name_to_workspace_tensor = {"0": object()}
    trees: Any = types.ModuleType("torch._inductor.cudagraph_trees")
    trees.local = types.SimpleNamespace(tree_manager_containers={0: types.SimpleNamespace(tree_manager=object())})
    trees.get_obj = getattr
    compiler: Any = types.ModuleType("torch.compiler")
    compiler.resets = 0

    def reset() -> None:
        compiler.resets += 1
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    compiler.reset = reset
    for module in (symmetric, trees, compiler):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return types.SimpleNamespace(symmetric=symmetric, trees=trees, compiler=compiler)


def test_what_an_abort_made_useless_is_forgotten_once_the_function_is_left(memory: Any) -> None:
    remembered = Remembered()
    remembered.aborted()
    assert memory.symmetric._group_name_to_store
    remembered.forget()
    assert not memory.symmetric._group_name_to_store
    assert not memory.symmetric._group_name_to_workspace_tensor


def test_a_call_without_an_abort_takes_nothing_from_the_program(memory: Any) -> None:
    Remembered().forget()
    assert memory.symmetric._group_name_to_store


@pytest.mark.parametrize(("were_reset", "compiled", "resets"), [(True, True, 1), (False, True, 0), (True, False, 0)])
def test_code_is_compiled_again_if_graphs_of_its_own_were_reset(
    memory: Any, were_reset: bool, compiled: bool, resets: int
) -> None:
    """It would go on to replay them. All other compiled code stays: compiling takes minutes."""
    if not compiled:
        memory.trees.local.tree_manager_containers.clear()
    remembered = Remembered()
    remembered.aborted()
    if were_reset:
        remembered.graphs_were_reset()
    for _ in range(2):
        remembered.forget()
    assert memory.compiler.resets == resets


def test_the_abort_says_that_it_reset_graphs(graphs: Any, monkeypatch: Patch) -> None:
    said: list[bool] = []
    monkeypatch.setattr(abort.remembered, "graphs_were_reset", lambda: said.append(True))
    AbortTorchDistributed()._reset_graphs()
    assert not said
    graph = graphs.CUDAGraph()
    AbortTorchDistributed()._reset_graphs()
    assert (said, graph.resets) == ([True], 1)


def test_the_names_are_torchs() -> None:
    """Where torch has others, symmetric memory of an iteration before is taken for this one's."""
    from torch.distributed import _symmetric_memory

    assert _symmetric_memory._group_name_to_store == {}
    assert _symmetric_memory._group_name_to_workspace_tensor == {}
    assert callable(torch.compiler.reset)


def test_results_of_functional_collectives_are_made_as_before_once_the_call_is_over(
    excepthook: None, monkeypatch: Patch, tmp_path: Path
) -> None:
    """Also where the rank leaves the job: between the abort and then each that is made is noted, to be waited for."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # or torch sets it
    from torch.distributed import _functional_collectives as functional
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    kind = functional.AsyncCollectiveTensor
    made, results = vars(kind)["__new__"], Results()
    results.begin()
    first = functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
    results.pending()
    second = functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
    assert len(results._pending) == 2
    assert torch._C._distributed_c10d._get_work_registry_size() == 2
    results.end()
    groups.settle()
    dist.destroy_process_group()
    assert vars(kind)["__new__"] is made
    assert not torch._C._distributed_c10d._get_work_registry_size()
    del first, second


def test_results_that_go_while_the_groups_are_aborted_are_waited_for(
    excepthook: None, monkeypatch: Patch, tmp_path: Path
) -> None:
    """The function may fail as soon as its group is aborted, and free all that it has."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    from torch.distributed import _functional_collectives as functional
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    monkeypatch.setattr(abort, "results", results := Results())
    results.begin()
    found = [functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)]
    end = abort._abort_group

    def fail(*args: Any) -> None:
        end(*args)
        found.clear()

    monkeypatch.setattr(abort, "_abort_group", fail)
    AbortTorchDistributed()(FrozenState(rank=0, world_size=2, initial_rank=0, initial_world_size=2))
    assert not found
    assert torch._C._distributed_c10d._get_work_registry_size() == 1
    results.end()
    groups.settle()
    assert not torch._C._distributed_c10d._get_work_registry_size()


def test_results_of_one_tensor_are_noted_each(excepthook: None, monkeypatch: Patch, tmp_path: Path) -> None:
    """The end of one says nothing of the other; and what was waited for is not waited for again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    results = Results()
    results.begin()
    tensor = torch.ones(1)
    first, second, waited = (AsyncCollectiveTensor(tensor) for _ in range(3))
    waited.completed = True
    del first
    assert [each is tensor for each in results.waiting()] == [True]
    del second
    assert results.waiting() == []
    assert len(results._made) == 1
    results.end()


def test_results_wait_for_a_thread_where_none_can_be_started(
    excepthook: None, monkeypatch: Patch, tmp_path: Path
) -> None:
    """Neither the restart nor the end of the call may fail for that."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    from torch.distributed import _functional_collectives as functional
    from torch.testing._internal.distributed.fake_pg import FakeStore

    start, left = threading.Thread.start, [True]

    def start_one(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.clear()
        start(thread)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    made, results = vars(functional.AsyncCollectiveTensor)["__new__"], Results()
    results.begin()
    found = [functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD) for _ in range(2)]
    results.pending()
    monkeypatch.setattr(threading.Thread, "start", start_one)
    assert len(results.collect()) == 1
    results.end()
    assert vars(functional.AsyncCollectiveTensor)["__new__"] is made
    monkeypatch.setattr(threading.Thread, "start", start)
    groups.settle()
    assert torch._C._distributed_c10d._get_work_registry_size() == 1
    assert len(results.collect()) == 1
    groups.settle()
    dist.destroy_process_group()
    assert not torch._C._distributed_c10d._get_work_registry_size()
    del found


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_result_that_is_just_being_made_is_waited_for(
    excepthook: None, monkeypatch: Patch, tmp_path: Path, when: str
) -> None:
    """The abort finds the main thread in the middle of that; an error may free the result before anybody has it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    from torch.distributed import _functional_collectives as functional
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    results = Results()
    results.begin()
    make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]

    def abort() -> None:
        thread = threading.Thread(target=results.pending)
        thread.start()
        thread.join()

    def making(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            abort()
        made = make(*args, **kwargs)
        if when == "after":
            abort()
        return made

    monkeypatch.setattr(torch.Tensor, "_make_wrapper_subclass", staticmethod(making))
    functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
    assert torch._C._distributed_c10d._get_work_registry_size() == 1
    results.end()
    groups.settle()
    dist.destroy_process_group()
    assert not torch._C._distributed_c10d._get_work_registry_size()


def test_the_end_of_a_call_collects_a_group_in_a_cycle() -> None:
    """Also where the collection of its iteration was left out, since one of an earlier iteration was in use then."""

    class Group:
        pass

    held = DeadGroups()
    heap.begin()
    heap.enter()
    held.begin()
    used = Group()
    held.keep([used])
    held.collect()
    held.begin()
    mesh: Any = types.SimpleNamespace(group=Group())
    mesh.itself, ended = mesh, weakref.ref(mesh.group)
    held.keep([mesh.group])
    del used, mesh
    held.collect()
    held.end()
    heap.end()
    assert ended() is None
