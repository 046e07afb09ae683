"""What libraries keep is made to fit the next iteration; stand-ins for them. The real ones: tests/frameworks."""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import inprocess
from inprocess.kept import accelerate, debug_server, dynamo, lightning, registry, source, torch_checkpoint
from inprocess.kept.registry import KNOWN, Registry


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Registry:
    found = Registry()
    monkeypatch.setattr(registry, "registry", found)
    return found


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in KNOWN:
        monkeypatch.delitem(sys.modules, entry.module, raising=False)


def test_what_was_not_imported_is_left_alone(ours: Registry, nothing_loaded: None) -> None:
    before = set(sys.modules)
    ours.reset()
    ours.enter(0, 1)
    assert set(sys.modules) == before


class Served:
    """A server of torch's, or the process of its page."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)


def test_a_debug_server_ends_with_its_iteration(
    ours: Registry, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On rank 0 with the page; not one that was there before."""
    module: Any = SimpleNamespace(_WORKER_SERVER=None, _DEBUG_SERVER_PROC=None)
    monkeypatch.setitem(sys.modules, debug_server.MODULE, module)
    monkeypatch.setattr(debug_server, "_before", None)
    ours.enter(0, 1)
    server, page = module._WORKER_SERVER, module._DEBUG_SERVER_PROC = Served(), Served()
    ours.reset()
    assert (server.calls, page.calls) == (["shutdown"], ["kill", "join"])
    assert module._WORKER_SERVER is module._DEBUG_SERVER_PROC is None
    module._WORKER_SERVER = other = Served()
    ours.enter(0, 1)
    ours.reset()
    assert module._WORKER_SERVER is other and not other.calls
    module._WORKER_SERVER = None  # stop_debug_server() in the function
    with caplog.at_level(logging.WARNING, "inprocess"):
        ours.reset()
    assert module._WORKER_SERVER is None and not caplog.records


def half_of_run() -> tuple[Any, Any]:
    """What asyncio.run() does at its beginning; the loop, and the handler."""
    loop = asyncio.new_event_loop()
    asyncio.events._set_running_loop(loop)
    if not hasattr(asyncio.runners, "Runner"):
        return loop, signal.getsignal(signal.SIGINT)
    handler = functools.partial(asyncio.runners.Runner()._on_sigint, main_task=None)
    signal.signal(signal.SIGINT, handler)
    return loop, handler


@pytest.mark.parametrize("around", [False, True], ids=["in the function", "around the call"])
def test_an_interrupted_asyncio_run(ours: Registry, around: bool) -> None:
    """One around the call stays."""
    before = None, signal.getsignal(signal.SIGINT)
    if not around:
        ours.enter(0, 1)
    half = half_of_run()
    try:
        if around:
            ours.enter(0, 1)
        ours.reset()
        now = asyncio.events._get_running_loop(), signal.getsignal(signal.SIGINT)
        assert now == (half if around else before)
    finally:
        asyncio.events._set_running_loop(None)
        signal.signal(signal.SIGINT, before[1])
        half[0].close()


def test_an_asyncio_run_around_a_later_call(ours: Registry) -> None:
    """It runs: without its loop, the coroutine that makes the call could not go on."""
    before = signal.getsignal(signal.SIGINT)
    ours.enter(0, 1)  # of the call before, which was made elsewhere
    half = half_of_run()
    try:
        ours.reset(between_calls=True)
        assert (asyncio.events._get_running_loop(), signal.getsignal(signal.SIGINT)) == half
    finally:
        asyncio.events._set_running_loop(None)
        signal.signal(signal.SIGINT, before)
        half[0].close()


def test_users_own_at_each_restart(ours: Registry, nothing_loaded: None) -> None:
    calls: list[str] = []

    @inprocess.on_restart
    def empty() -> None:
        calls.append("empty")

    assert inprocess.on_restart(empty) is empty  # twice is once
    ours.reset()
    ours.reset()
    assert calls == ["empty", "empty"]


def test_a_method_twice_is_once_too(ours: Registry, nothing_loaded: None) -> None:
    caches: list[list[int]] = [[1], [1]]
    for cache in (*caches, *caches):
        inprocess.on_restart(cache.clear)
    assert len(ours._entries) == 2
    ours.reset()
    assert caches == [[], []]


def test_one_of_an_iteration_goes_with_it(
    ours: Registry, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that registers a closure each time it runs must not gather them."""
    calls: list[int] = []
    for iteration in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(registry, "restarting_call", object)
            inprocess.on_restart(lambda iteration=iteration: calls.append(iteration))
        ours.reset()
    assert calls == [0, 1, 2] and not ours._entries


def test_one_that_raises_is_told_and_the_others_are_reset(
    ours: Registry, nothing_loaded: None, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def broken() -> None:
        raise OSError("no such cache")

    inprocess.on_restart(broken)
    inprocess.on_restart(lambda: calls.append("other"))
    with caplog.at_level(logging.WARNING, "inprocess"):
        ours.reset()
    assert calls == ["other"]
    assert "broken before a restart failed (OSError: no such cache)" in caplog.text


def test_interruptions_are_no_failures(ours: Registry, nothing_loaded: None) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    inprocess.on_restart(stop)
    with pytest.raises(KeyboardInterrupt):
        ours.reset()


@pytest.mark.parametrize("wrong", [None, 3, "reset"])
def test_what_cannot_be_called(wrong: Any) -> None:
    with pytest.raises(TypeError, match="a function without arguments is needed"):
        inprocess.on_restart(wrong)


def test_accelerate(ours: Registry, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    states = SimpleNamespace(
        AcceleratorState=SimpleNamespace(_reset_state=calls.append),
        GradientState=SimpleNamespace(_reset_state=lambda: calls.append("gradients")),
    )
    monkeypatch.setitem(sys.modules, accelerate.MODULE, states)
    ours.reset()
    assert calls == [True, "gradients"]


def test_another_version_of_a_library_is_told(
    ours: Registry, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, accelerate.MODULE, SimpleNamespace())
    with caplog.at_level(logging.WARNING, "inprocess"):
        ours.reset()
    assert "the reset of accelerate before a restart failed (AttributeError" in caplog.text


def test_lightning_has_the_rank_of_the_iteration(ours: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(rank_zero_only=SimpleNamespace(rank=3))
    monkeypatch.setitem(sys.modules, lightning.MODULE, module)
    ours.enter(1, 2)
    assert module.rank_zero_only.rank == 1


def test_compiled_code_stays_as_long_as_its_place_does(ours: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[int] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    monkeypatch.setattr(dynamo, "_place", None)
    monkeypatch.setitem(sys.modules, dynamo.MODULE, ModuleType("dynamo"))
    for place, count in (((1, 3), 0), ((1, 3), 0), ((1, 2), 1), ((0, 2), 2), ((0, 2), 2), ((None, 2), 3), ((0, 2), 4)):
        ours.enter(*place)
        assert len(resets) == count


def test_compiled_code_of_an_iteration_that_imported_the_compiler(
    ours: Registry, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch imports it with the first use, so as a rule after the first iteration was entered."""
    resets: list[int] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    monkeypatch.setattr(dynamo, "_place", None)
    monkeypatch.delitem(sys.modules, dynamo.MODULE, raising=False)
    ours.enter(2, 3)
    ours.enter(1, 2)
    assert not resets
    monkeypatch.setitem(sys.modules, dynamo.MODULE, ModuleType("dynamo"))
    ours.enter(0, 1)
    assert len(resets) == 1


SOURCE = """
    from __future__ import annotations
    from typing import Optional
    import threading

    _GROUP = None
    _SIZE: Optional[int] = None
    _RANKS = []
    _GROUPS = {}
    _READY = False
    _COUNT = 1
    NAME = "unchanged"
    FILLED = [1]
    lock = threading.Lock()
    _UNTOUCHED = None


    def initialize():
        global _GROUP, _SIZE, _READY, _COUNT, NAME, _RANKS
        _GROUP, _SIZE, _READY, _COUNT, NAME = object(), 4, True, 3, "changed"
        _RANKS = [0, 1]
        _GROUPS["a"] = object()
        FILLED.append(2)
"""


def test_variables_get_the_values_of_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept_source_example.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(str(tmp_path))
    import kept_source_example as module  # type: ignore[import-not-found]

    lock, groups = module.lock, module._GROUPS
    for _ in range(2):
        module.initialize()
        source.restore(module.__name__)
        assert (module._GROUP, module._SIZE, module._RANKS, module._GROUPS) == (None, None, [], {})
        assert (module._READY, module._COUNT) == (False, 1)
        assert module.NAME == "changed" and module.FILLED[0] == 1 and module.lock is lock
    assert module._GROUPS is not groups  # whoever has the old one keeps what is in it
    del sys.modules[module.__name__]


def test_a_process_that_nobody_waits_for_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    process = SimpleNamespace(kill=lambda: ended.append("kill"), join=lambda timeout: ended.append("join"))
    module: Any = _executor()
    module._CHECKPOINT_PROCESS = SimpleNamespace(_save_process=process)
    monkeypatch.setitem(sys.modules, torch_checkpoint.MODULE, module)
    torch_checkpoint.reset()
    assert ended == ["kill", "join"] and module._CHECKPOINT_PROCESS is None
    torch_checkpoint.reset()
    assert ended == ["kill", "join"]


def _executor() -> SimpleNamespace:
    class Process:
        def __init__(self) -> None: ...

        def _wait_for_response(self) -> None: ...

        def save(self) -> None: ...

    class Executor:
        @staticmethod
        def _execute_save_impl() -> None: ...

    return SimpleNamespace(
        _AsyncCheckpointProcess=Process, _ProcessBasedAsyncCheckpointExecutor=Executor, _CHECKPOINT_PROCESS=None
    )
