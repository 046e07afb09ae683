"""What the wrapped function calls, and what its monitor sees of that on the board."""

from __future__ import annotations

import errno
import gc
import io
import os
import pickle
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inprocess import call_wrapper
from inprocess.call_wrapper import CallWrapper, Controls
from inprocess.exception import OptionError, RankShouldRestart, RestartError
from inprocess.interrupt.signals import Interrupter
from inprocess.monitor.board import Board, Snapshot
from inprocess.state import State

S = 1_000_000_000


class Call(CallWrapper):
    """A call in its first iteration."""

    def __init__(self, board: Board) -> None:
        super().__init__(board, object)
        Controls(self).gate = Interrupter().new_gate()

    @property
    def seen(self) -> Snapshot:
        return self._board.snapshot()


@pytest.fixture
def call() -> Iterator[Call]:
    board = Board.create()
    yield Call(board)
    board.close()


def test_atomic_holds_the_gate_and_shows_on_the_board(call: Call) -> None:
    with call.atomic(), call.atomic():
        assert call.seen.atomic and Controls(call).gate.atomic.depth == 2
    assert not call.seen.atomic and not Controls(call).gate.atomic.depth


def test_atomic_that_is_refused_does_not_show(call: Call) -> None:
    Controls(call).gate.close_for_abort()
    with pytest.raises(RankShouldRestart), call.atomic():
        pytest.fail("a section began after the abort")
    assert not call.seen.atomic


def test_atomic_outside_the_function(call: Call) -> None:
    section = call.atomic()
    section.__enter__()
    Controls(call).gate = None
    with pytest.raises(RestartError, match="only while the wrapped function runs"), call.atomic():
        pass
    section.__exit__(None, None, None)  # of a generator that is closed after the call
    assert not call.seen.atomic


def test_a_thread_of_the_programs_leaves_its_sections_after_the_call(call: Call) -> None:
    """One that writes the last checkpoint, say; its lock is released, too."""
    gate = Controls(call).gate
    with call.section("save", 30), call.disable_hang_protection(), call.atomic():
        Controls(call).end()
        call._board.close()
    assert gate is not None and not gate.atomic.depth and not gate.atomic.held()


def test_a_section_may_nest_while_an_abort_waits(call: Call) -> None:
    with call.atomic():
        Controls(call).gate.atomic.closed = True
        with call.atomic():
            pass
        assert call.seen.atomic
    assert not call.seen.atomic


def test_a_section_that_the_program_keeps(call: Call) -> None:
    """It is that of the function or hook that is running now, not that of the one it was made in."""
    kept, before = call.atomic(), Controls(call).gate
    before.close_for_abort()
    Controls(call).gate = Interrupter().new_gate()
    with pytest.raises(ValueError), kept, kept:
        assert call.seen.atomic and Controls(call).gate.atomic.depth == 2 and not before.atomic.depth
        raise ValueError
    assert not (call.seen.atomic or Controls(call).gate.atomic.depth or Controls(call).counts.progressed)
    Controls(call).gate = None
    with pytest.raises(RestartError, match="only while the wrapped function runs"), kept:
        pass


def test_leaving_what_was_not_entered_changes_nothing(call: Call) -> None:
    """As by a generator that is handed to another thread in a section."""
    inside, release = threading.Event(), threading.Event()

    def hold() -> None:
        with call.atomic():
            inside.set()
            assert release.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(10)
    with pytest.raises(RuntimeError, match="a thread that is not inside it"):
        call.atomic().__exit__(None, None, None)
    assert call.seen.atomic and Controls(call).gate.atomic.depth == 1 and not Controls(call).counts.sections
    release.set()
    thread.join()
    assert not call.seen.atomic and Controls(call).counts.sections == 1


def test_a_section_that_was_left_is_progress(call: Call) -> None:
    call.ping()
    with pytest.raises(ValueError), call.atomic():
        raise ValueError
    assert (Controls(call).counts.progressed, Controls(call).counts.kept, Controls(call).counts.sections) == (
        False,
        0,
        0,
    )
    with call.atomic():
        pass
    assert (Controls(call).counts.progressed, Controls(call).counts.kept, Controls(call).counts.sections) == (
        True,
        1,
        1,
    )
    Controls(call).begin_iteration()
    assert not Controls(call).counts.progressed


def test_a_section_that_outlives_its_hook(call: Call) -> None:
    """A thread is inside one while the main thread has gone on from a hook to the function, and enters another."""
    late, current = call.atomic(), call.atomic()
    late.__enter__()
    Controls(call).gate = Interrupter().new_gate()
    with current:
        late.__exit__(None, None, None)
        assert call.seen.atomic
    assert not call.seen.atomic


def test_a_section_that_is_left_in_a_later_iteration(call: Call) -> None:
    late = call.atomic()
    late.__enter__()
    Controls(call).gate = Interrupter().new_gate()
    call._board.begin(1)
    late.__exit__(None, None, None)
    assert not call.seen.atomic


def test_protection_is_back_also_after_an_error(call: Call) -> None:
    with pytest.raises(ValueError), call.disable_hang_protection():
        assert not call.seen.hang_protection
        raise ValueError
    assert call.seen.hang_protection


def test_the_innermost_section_counts(call: Call) -> None:
    with call.section("step", timeout=20):
        with call.section("save", timeout=50):
            assert call.seen.soft_timeout == 50 * S
        assert call.seen.soft_timeout == 20 * S
    assert call.seen.soft_timeout == 0


def test_sections_of_other_threads_only_learn(call: Call) -> None:
    """The main thread's progress is watched; a thread that saves is none, whenever its section ends."""
    begun, end = threading.Event(), threading.Event()

    def save() -> None:
        with call.section("save", timeout=600):
            begun.set()
            end.wait(20)

    thread = threading.Thread(target=save)
    with call.section("batch", timeout=2):
        thread.start()
        begun.wait(20)
        assert call.seen.soft_timeout == 2 * S
    assert call.seen.soft_timeout == 0
    with call.section("evaluation", timeout=50):
        end.set()
        thread.join()
        assert call.seen.soft_timeout == 50 * S
    assert call.seen.soft_timeout == 0
    assert call.timeouts.observed.sections["save"][0] == 1


def test_a_section_inside_itself(call: Call) -> None:
    section = call.section("step", timeout=20)
    with section, section:
        assert call.seen.soft_timeout == 20 * S
    assert call.seen.soft_timeout == 0


def test_sections_that_are_left_in_another_order(call: Call) -> None:
    """As where they are begun and ended by callbacks."""
    outer, inner = call.section("epoch", timeout=20), call.section("save", timeout=50)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert call.seen.soft_timeout == 50 * S
    inner.__exit__(None, None, None)
    assert call.seen.soft_timeout == 0


def test_a_section_of_an_earlier_iteration_ends_nothing(call: Call) -> None:
    old = call.section("save", timeout=50)
    old.__enter__()
    Controls(call).place(State(0, 1).freeze())
    with call.section("evaluation", timeout=20):
        old.__exit__(None, None, None)
        assert call.seen.soft_timeout == 20 * S


def test_a_section_that_is_dropped_changes_nothing_later(call: Call) -> None:
    """As by a callback whose training was interrupted between its beginning and its end."""
    dropped = call.section("save", timeout=50)
    dropped.__enter__()
    with call.section("evaluation", timeout=20):
        del dropped
        gc.collect()
        assert call.seen.soft_timeout == 20 * S


def test_a_section_learns_its_timeout(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five times the longest of three, and at least five seconds; one that raised teaches nothing."""
    now = 0.0
    monkeypatch.setattr(call_wrapper.clock, "monotonic", lambda: now)
    for duration in (1.0, 4.0, 2.0):
        with call.section("save"):
            assert call.seen.soft_timeout == 0
            now += duration
    with pytest.raises(ValueError), call.section("save"):
        assert call.seen.soft_timeout == 20 * S
        now += 100.0
        raise ValueError
    with call.section("save"):
        assert call.seen.soft_timeout == 20 * S


def test_short_sections_have_time(call: Call) -> None:
    for _ in range(3):
        with call.section("load"):
            pass
    with call.section("load"):
        assert call.seen.soft_timeout == 5 * S


def test_what_other_ranks_learned_counts(call: Call) -> None:
    """Loaded or calculated, beside what this rank has seen itself."""
    call.timeouts.observed.section("save", 3.0)
    state = call.timeouts.state_dict()
    call.timeouts.load_state_dict({**state, "sections": {"save": [3, 4.0]}})
    with call.section("save"):
        assert call.seen.soft_timeout == 20 * S
    call.timeouts.observed.section("save", 6.0)
    assert call.timeouts.calculate()["sections"] == {"save": 30.0}
    with call.section("save"):
        assert call.seen.soft_timeout == 30 * S
    call.ping()
    assert not call.timeouts.observed.heartbeat, "pings are stamped, not measured"


@pytest.mark.parametrize("timeout", [0, 0.0, -1.0])
def test_timeout_of_a_section_must_be_positive(call: Call, timeout: float) -> None:
    with pytest.raises(OptionError, match="timeout"), call.section("save", timeout):
        pass


def test_ping_and_store(call: Call) -> None:
    assert not call.seen.ping
    call.ping()
    assert call.seen.ping
    assert type(call.store) is object


def test_no_ping_after_the_call(call: Call) -> None:
    """As with atomic()."""
    Controls(call).end()
    with pytest.raises(RestartError, match=r"ping\(\) can be used only while the wrapped function runs"):
        call.ping()
    assert not call.seen.ping


def test_state_is_known_only_in_an_iteration(call: Call) -> None:
    with pytest.raises(RestartError, match="known only while"):
        call.iteration


# --- save ---------------------------------------------------------------------------------------------------------


def test_save_in_a_folder_that_may_not_be_read(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read every folder, so the system's answer is made up."""
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **others: Any) -> int:
        if flags & os.O_DIRECTORY:
            raise PermissionError(path)
        return real(path, flags, *args, **others)

    monkeypatch.setattr(os, "open", refuse)
    assert of_rank(call, 0).save({"step": 3}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt") == {"step": 3}


@pytest.mark.parametrize("name", ["a" * 255, "\N{SNOWMAN}" * 85])
def test_save_under_the_longest_name(call: Call, tmp_path: Path, name: str) -> None:
    assert of_rank(call, 0).save({"step": 3}, tmp_path / name)
    assert os.listdir(tmp_path) == [name]


def of_rank(call: Call, rank: int, size: int = 2) -> Call:
    state = State(rank, size)
    state.activate_all_ranks()
    call._state = state.freeze()
    return call


def test_save_puts_a_whole_file_in_place(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside `atomic`; on the disk before its name is; a link stays one, the file behind it is replaced."""
    seen: list[str] = []
    for name in ("fsync", "replace"):
        does = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, does=does: (seen.append(name), does(*args)))
    (tmp_path / "folder").mkdir()
    path, link = tmp_path / "folder" / "a.pt", tmp_path / "link.pt"
    link.symlink_to(path)

    class Told:
        def __reduce__(self) -> tuple[type[int], tuple[int]]:
            seen.append("atomic" if call.seen.atomic else "not atomic")
            return int, (5,)

    assert of_rank(call, 1).save({"step": Told()}, link, rank=1)
    assert seen == ["atomic", "fsync", "replace", "fsync"]
    assert torch.load(path, weights_only=False) == {"step": 5}
    assert link.is_symlink()
    assert os.listdir(path.parent) == ["a.pt"]
    assert not call.seen.atomic and Controls(call).counts.progressed
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_save_where_no_folder_can_be_put_on_the_disk(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As on 9p, vboxsf and some of FUSE: the file is there."""
    fsync = os.fsync

    def refuse(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    assert of_rank(call, 0).save({"step": 1}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt") == {"step": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


def test_save_on_another_rank(call: Call, tmp_path: Path) -> None:
    assert not of_rank(call, 1).save({}, tmp_path / "a.pt")
    assert not os.listdir(tmp_path) and not Controls(call).counts.progressed


def test_save_that_fails_leaves_what_was_there(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    of_rank(call, 0).save({"step": 1}, path)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        call.save({"step": 2, "cannot": lambda: None}, str(path))
    assert torch.load(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["a.pt"]
    with pytest.raises(RuntimeError, match="nowhere"):
        call.save({}, tmp_path / "nowhere" / "a.pt")
    assert not call.seen.atomic


def test_save_begins_no_file_after_an_abort(call: Call, tmp_path: Path) -> None:
    Controls(of_rank(call, 0)).gate.close_for_abort()
    with pytest.raises(RankShouldRestart):
        call.save({}, tmp_path / "a.pt")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("rank", [-1, 2, True, "0", None])
def test_save_on_no_rank(call: Call, tmp_path: Path, rank: Any) -> None:
    """On every rank, not only on the one that would write."""
    with pytest.raises(OptionError, match=r"rank=.* must be one of the 2 active ranks"):
        of_rank(call, 1).save({}, tmp_path / "a.pt", rank=rank)


@pytest.mark.parametrize(
    "path", ["s3://bucket/a.pt", Path("gs://bucket/a.pt"), io.BytesIO(), b"a.pt"], ids=["text", "Path", "file", "bytes"]
)
def test_save_to_no_path(call: Call, path: Any) -> None:
    with pytest.raises(OptionError, match=r"must be a path of a file system\. For a URL, write with fsspec"):
        of_rank(call, 1).save({}, path)
