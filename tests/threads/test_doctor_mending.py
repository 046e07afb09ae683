"""Going on around a process group that was made outside the wrapped function."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from inprocess.doctor.script_mending import OUTSIDE, Mending

WAIT_S = 20.0  # a ceiling


def test_a_group_that_was_made_outside_ends_when_all_ranks_have_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that is still connecting would see its connections close, and fail for a reason that is not the program's."""
    store, rank = dist.HashStore(), threading.local()
    ended: list[int] = []
    rank.number = 1
    monkeypatch.setattr(c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: rank.number)
    monkeypatch.setattr(dist, "is_initialized", lambda: rank.number not in ended)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(rank.number))

    def first() -> None:
        rank.number = 0
        Mending(str(tmp_path), {OUTSIDE}).called()

    thread = threading.Thread(target=first)
    thread.start()
    store.wait(["left/1/0"])
    assert not ended
    Mending(str(tmp_path), {OUTSIDE}).called()
    thread.join(WAIT_S)
    assert sorted(ended) == [0, 1]
