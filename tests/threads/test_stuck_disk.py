"""What a disk that does not answer costs the main thread: in one process, and as pure rules for all ranks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inprocess import LiveState
from inprocess.call_wrapper import LastSave
from inprocess.live import copies, patience
from inprocess.live.beside import Beside
from inprocess.live.copies import Buffer, Copies, Replicator
from inprocess.live.patience import BUSY, ON_DISK, Doing, Look, all_do, all_ready, in_words
from inprocess.live.plan import Copy, Shard
from inprocess.live.shelf import Name
from tests.harness.stuck import Stuck, install

from .test_checkpoints import begin, names
from .test_live_state import Event, Part, setup_module, train  # noqa: F401  (setup_module runs here too)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[str]:
    install()
    yield f"stuck://{tmp_path}"
    Stuck.come_back()


def test_checkpoints_are_left_out_until_it_is_back(disk: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    live, model, optim = begin(disk, 2, save_every=1, keep=9)
    Stuck.hang()
    train(live, model, optim, 12)
    assert Stuck.asked.wait(60)
    said = [record.message for record in caplog.records if " is skipped " in record.message]
    assert [int(line.split("(")[1].split()[0]) for line in said] == [1, 2, 4, 8]
    assert said[0].endswith(f"that of step 3 is still being written into {disk}, by ranks 0. Does it answer there?")
    live.wait(timeout=0.1)
    assert "does not wait for the disk any longer: step 3 is being written" in caplog.text
    Stuck.come_back()
    live.wait()
    train(live, model, optim, 13)
    live.wait()
    assert names(tmp_path) == [f"step_{step:08d}" for step in (1, 2, 3, 13)]
    assert begin(disk)[0].step == 13


def test_what_is_in_memory_needs_no_disk(disk: str) -> None:
    live, model, optim = begin(disk, 2, save_every=2)
    Stuck.hang()
    train(live, model, optim, 3)
    assert (live.recover(), live.source) == (3, "own memory")


class Call:
    """A later iteration, of which this process has missed some."""

    iteration, _to_free, _last = 9, set[Any](), LastSave()

    def atomic(self) -> Any:
        return contextlib.nullcontext()


def test_what_is_in_memory_will_do(
    disk: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There may be a newer one on the disk, which does not answer."""
    live, *_ = begin(disk, 2, save_every=2)
    monkeypatch.setattr(patience, "SLICE", 0.01)
    monkeypatch.setattr("inprocess.live.search.PATIENCE", 0.1)
    Stuck.hang()
    assert (live.recover(Call()), live.source) == (2, "own memory")  # type: ignore[arg-type]
    assert "the training continues at step 2, which is in memory" in caplog.text
    Stuck.come_back()
    assert live._saving.disk.reader.ended(60)  # type: ignore[union-attr]


def test_what_only_tidies_up_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "TIDY", 0.0)
    work, may_end = Beside("tidies"), threading.Event()
    work.begin(3, may_end.wait)
    work.is_done = True
    assert not patience.join_with_progress(work, 600.0, contextlib.nullcontext)
    may_end.set()
    assert patience.join_with_progress(work, 600.0, contextlib.nullcontext)


# --- all ranks come to the same ---------------------------------------------------------------------------------


def test_all_ranks_wait_the_same_rounds() -> None:
    """This one is ready at once; another one is after three rounds, or never."""
    others = iter([[1], [1], [0]])
    assert all_ready(lambda: True, lambda mine: [list(mine), next(others)], contextlib.nullcontext)
    rounds: list[int] = []
    limit = 4 * patience.SLICE
    found = all_ready(lambda: True, lambda mine: rounds.append(1) or [list(mine), [1]], contextlib.nullcontext, limit)
    assert not found
    assert len(rounds) == 4


def test_one_busy_rank_is_enough() -> None:
    """It is waited for once, and not at each step again; the count is the same everywhere."""
    work = Beside("idle")
    busy = all_do(work, lambda mine: [list(mine), [ON_DISK, 7, 30], [BUSY, 8, 31]], contextlib.nullcontext)
    assert busy == {1: Doing(ON_DISK, 7, 30), 2: Doing(BUSY, 8, 31)}
    assert work.skipped == 1
    assert in_words(busy, "written") == "after 30 s that of step 7 is still being written, by ranks 1"
    assert not all_do(work, lambda mine: [list(mine)], contextlib.nullcontext)
    assert work.skipped == 0


def test_it_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    work, waited = Beside("hangs"), list[float]()
    monkeypatch.setattr(work, "ended", waited.append)
    for _ in range(3):
        all_do(work, lambda mine: [list(mine)], contextlib.nullcontext)
    assert waited == [patience.GRACE, 0, 0]


def test_a_look_that_was_cut_off_is_waited_for() -> None:
    """There is one thread at a time, however often it is interrupted."""
    reader, may_end = Beside("reader"), threading.Event()
    reader.begin(0, may_end.wait)
    look = Look(reader, lambda: 5, contextlib.nullcontext)
    before = threading.active_count()
    assert not look.ready()
    assert threading.active_count() == before
    may_end.set()
    assert all_ready(look.ready, lambda mine: [list(mine)], contextlib.nullcontext)
    assert look.answer() == 5


def test_names_tell_the_order() -> None:
    there = [Name(0, 4), Name(0, 6)]
    assert Name.after([], 2) == Name(0, 2)
    assert Name.after(there, 8) == Name(0, 8)
    assert Name.after(there, 6) == Name(1, 6)
    assert Name.after([*there, Name(1, 5)], 6) == Name(1, 6)
    assert all(Name.after(there, step) > max(there) for step in range(1, 9))


# --- what is said -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"save_every": 1}, "checkpoints are written into {}, at each step; the last 3 stay"),
        ({"save_every": 50, "keep": 1}, "checkpoints are written into {}, every 50 steps; the last 1 stay"),
        ({}, "checkpoints are read from {}, and none are written: save_every is not given"),
    ],
)
def test_it_is_said_what_is_written(
    tmp_path: Path, options: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "inprocess.live")
    live = LiveState(part=Part(), folder=tmp_path, seed=None, **options)
    live.recover()
    live.recover()
    assert [record.message for record in caplog.records].count(said.format(tmp_path)) == 1
    assert "random generators" not in caplog.text


def test_it_is_said_once_that_generators_are_seeded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "inprocess.live")
    live = LiveState(part=Part(), seed=7)
    live.recover()
    with live.commit(1):
        pass
    live.recover()
    assert caplog.text.count("LiveState(seed=7) seeds the global random generators of Python, NumPy and torch") == 1


# --- copies -----------------------------------------------------------------------------------------------------


def test_a_copy_is_sent_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a device is known only when it is there."""
    sent: list[list[int]] = []

    class Wire:
        def __init__(self, group: Any) -> None: ...

        def post_numbers(self, numbers: list[int], to: int) -> list[Any]:
            sent.append(numbers)
            raise ConnectionError

    monkeypatch.setattr(copies, "Wire", Wire)
    monkeypatch.setattr(copies, "there", lambda ref: None)
    replicator = Replicator.__new__(Replicator)
    replicator._group, replicator._to, replicator._kept = None, 1, Copies()  # type: ignore[assignment]
    buffer = Buffer()
    buffer.lay_out({"x": torch.zeros(2)}, b"")
    buffer.holds_after([Event()], Copy(Shard(1, 2), 8, 3))
    replicator._exchange(buffer)
    assert sent == [[1, 2, 8, 3]]
