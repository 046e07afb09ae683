"""When garbage is collected, and when a warning is due: by what the allocator says, which the test does here."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from inprocess.hardware import leftovers
from inprocess.hardware.leftovers import MIB, WORTH_A_WARNING, WORTH_COLLECTING, Leftovers, in_words
from inprocess.state import FrozenState

STATE = FrozenState(rank=2, world_size=4, initial_rank=3, initial_world_size=4, iteration=1)
LARGE = 1000 * MIB


class Gpu:
    """A GPU whose memory the test fills."""

    def __init__(self) -> None:
        self.allocated = 0
        #: what the next collection frees
        self.garbage = 0
        self.collections = 0

    def collect(self) -> None:
        self.collections += 1
        self.allocated -= self.garbage
        self.garbage = 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """In place of the real one; whoever is asked for the holders knows nothing."""
    gpu = Gpu()
    monkeypatch.setattr(gc, "collect", gpu.collect)
    monkeypatch.setattr(leftovers, "_tensors", lambda things: [])
    return gpu


def entered(gpu: Gpu) -> Leftovers:
    it = Leftovers(allocated=lambda: gpu.allocated)
    it.begin()
    it.enter()
    return it


def restart(it: Leftovers) -> None:
    it.collect()
    it.report(STATE)
    it.enter()


def test_nothing_is_done_where_nothing_is_left(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    gpu.allocated = LARGE
    it = entered(gpu)
    gpu.allocated += WORTH_COLLECTING
    restart(it)
    assert not gpu.collections
    assert not caplog.records


def test_garbage_is_collected_in_silence(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    it = entered(gpu)
    for number in range(3):
        gpu.garbage = LARGE
        gpu.allocated += LARGE
        restart(it)
        assert gpu.allocated == 0
        assert gpu.collections == number + 1
    assert not caplog.records


def test_a_little_garbage_does_not_add_up(gpu: Gpu) -> None:
    it = entered(gpu)
    for _ in range(10):
        gpu.garbage += WORTH_COLLECTING
        gpu.allocated += WORTH_COLLECTING
        restart(it)
        assert gpu.allocated <= WORTH_COLLECTING


def test_what_stays_is_said_once(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    it = entered(gpu)
    gpu.allocated = LARGE
    for _ in range(3):
        restart(it)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        "rank 2 (initial rank 3): as iteration 1 begins, 1000.0 MiB of the GPU's memory"
    )


def test_what_stays_is_not_collected_for_again(gpu: Gpu) -> None:
    it = entered(gpu)
    gpu.allocated = LARGE
    restart(it)
    before = gpu.collections
    restart(it)
    restart(it)
    assert gpu.collections == before


def test_and_again_when_it_grew(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    it = entered(gpu)
    for size in (LARGE, LARGE + WORTH_A_WARNING, 2 * LARGE):
        gpu.allocated = size
        restart(it)
    assert [record.getMessage().split("begins, ")[1][:10] for record in caplog.records] == ["1000.0 MiB", "1000.0 MiB"]


def test_a_little_each_time_is_said_too(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    it = entered(gpu)
    for _ in range(10):
        gpu.allocated += WORTH_A_WARNING // 2
        restart(it)
    assert len(caplog.records) == 3


def test_a_level_that_went_down_is_the_new_one(gpu: Gpu) -> None:
    gpu.allocated = LARGE
    it = entered(gpu)
    gpu.allocated = 0
    restart(it)
    gpu.allocated = gpu.garbage = LARGE
    restart(it)
    assert gpu.allocated == 0


def test_what_groups_held_is_not_said(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    """They go between the two looks."""
    it = entered(gpu)
    gpu.allocated = LARGE
    it.collect()
    gpu.garbage = LARGE
    it.report(STATE)
    assert not caplog.records


def test_who_never_entered_has_left_nothing(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    it = Leftovers(allocated=lambda: gpu.allocated)
    it.begin()
    gpu.allocated = LARGE
    it.collect()
    it.report(STATE)
    assert not gpu.collections
    assert not caplog.records


@pytest.mark.parametrize(("anew", "count"), [(True, 0), (False, 1)])
def test_the_next_call_begins_anew(gpu: Gpu, caplog: pytest.LogCaptureFixture, anew: bool, count: int) -> None:
    it = entered(gpu)
    gpu.allocated = LARGE
    it.begin(anew)
    it.enter()
    restart(it)
    assert len(caplog.records) == count


def test_a_lost_gpu_says_nothing(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    def lost() -> int:
        if gpu.allocated:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return 0

    it = Leftovers(allocated=lost)
    it.begin()
    it.enter()
    gpu.allocated = LARGE
    restart(it)
    assert not caplog.records


def test_a_search_that_fails_is_no_fault(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leftovers, "_tensors", None)
    caplog.set_level(logging.DEBUG)
    gpu.allocated = 1
    it = entered(gpu)
    gpu.allocated = LARGE
    for _ in range(2):
        restart(it)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG] * 3


# --- torch.cuda -----------------------------------------------------------------------------------------------------


def test_where_cuda_is_not_in_use_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", None)
    monkeypatch.setattr(gc, "collect", None)
    it = Leftovers()
    it.begin()
    it.enter()
    restart(it)


def test_all_devices_count_and_the_driver_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {0: 3 * MIB, 1: 4 * MIB}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", ("one", "another"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: sizes[device])
    for asks in ("device_count", "current_device", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, asks, None)
    assert leftovers._allocated() == 7 * MIB


@pytest.mark.parametrize(("size", "words"), [(MIB // 2, "0.5 MiB"), (300 * MIB, "300.0 MiB"), (1536 * MIB, "1.50 GiB")])
def test_bytes_in_words(size: int, words: str) -> None:
    assert in_words(size) == words
