"""A thread that saves a checkpoint at a restart: stand-ins for torch's. The real one: tests/frameworks."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from inprocess.kept import torch_thread
from inprocess.system import interpreter


class Groups:
    """As torch's ``_DistWrapper``; None stands for the default group."""

    group: Any = None


def test_a_save_is_cut_off_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, finish, wrapper = threading.Event(), threading.Event(), Groups()

    def save_wrapper() -> None:
        groups = wrapper  # a local variable, as in torch's functions
        begun.set()
        finish.wait(10)
        assert groups.group is not None

    monkeypatch.setitem(sys.modules, torch_thread.MODULE, SimpleNamespace(save_wrapper=save_wrapper))  # type: ignore[arg-type]
    utils: Any = SimpleNamespace(_DistWrapper=Groups)
    monkeypatch.setitem(sys.modules, "torch.distributed.checkpoint.utils", utils)
    monkeypatch.setattr(torch_thread, "LIMIT_S", 0.01)
    thread = threading.Thread(target=save_wrapper)
    thread.start()
    try:
        begun.wait(10)
        with pytest.raises(TimeoutError, match="under another name"):
            torch_thread.reset()
        assert wrapper.group is not None
        monkeypatch.setattr(torch_thread, "LIMIT_S", 10.0)
        monkeypatch.setattr(interpreter, "sleep_with_progress", lambda _: finish.set())
        torch_thread.reset()
    finally:
        finish.set()
        thread.join()
