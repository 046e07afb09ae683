"""A LiveState's checkpoints on disk, in one process: written, kept, damaged, loaded."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import stat
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.testing._internal.distributed.fake_pg import FakeStore

from inprocess import LiveState
from inprocess.call_wrapper import LastSave
from inprocess.exception import LiveStateError, OptionError, StateLost
from inprocess.integrations.keeping import Keeping
from inprocess.live import checkpoints, shelf
from inprocess.live.checkpoints import Checkpoints, Name

from .test_live_state import Part, parts, same, setup_module, train, values  # noqa: F401  (setup_module runs here too)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def begin(folder: Any, to: int = 0, **options: Any) -> tuple[LiveState, torch.nn.Module, torch.optim.Optimizer]:
    """A process' training, up to a step, all of it written."""
    torch.manual_seed(random.randrange(1 << 30))  # the first weights are others each time
    model, optim = parts()
    live = LiveState(model=model, optim=optim, extra=Part([1, "a"]), folder=folder, **options)
    live.recover()
    live.wait()
    for step in range(live.step + 1, to + 1):
        train(live, model, optim, step)
        live.wait()  # else one that is due may be left out
    return live, model, optim


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_process_goes_on_at_the_newest(tmp_path: Path) -> None:
    _, model, optim = begin(tmp_path, 5, save_every=2)
    other, _, _ = begin(tmp_path / "nothing there", 4)
    assert other.source == "nowhere"
    live, again, optim_again = begin(tmp_path)
    assert (live.step, live.source) == (4, f"the checkpoint {tmp_path}/step_00000004")
    train(live, again, optim_again, 5)
    assert same(values(again), values(model))
    assert optim_again.state_dict()["state"][0]["step"] == optim.state_dict()["state"][0]["step"] == 5


def test_other_parts_come_back_with_any_structure(tmp_path: Path) -> None:
    written: dict[str, Any] = {"deep": [torch.arange(3), {"none": None}], "text": "x"}
    live = LiveState(part=Part(written), folder=tmp_path, save_every=1)
    live.recover()
    with live.commit(1):
        pass
    live.wait()
    part = Part()
    assert LiveState(part=part, folder=tmp_path).recover() == 1
    assert part.value["deep"][0].tolist() == [0, 1, 2]
    assert part.value["deep"][1] == {"none": None}
    assert part.value["text"] == "x"


def test_memory_is_newer_as_a_rule(tmp_path: Path) -> None:
    live, *_ = begin(tmp_path, 5, save_every=2)
    assert (live.recover(), live.source) == (5, "own memory")


def test_a_torn_state_is_loaded(tmp_path: Path) -> None:
    live, model, optim = begin(tmp_path, 4, save_every=2)
    before = values(model)
    train(live, model, optim, 5)
    with pytest.raises(ZeroDivisionError), live.commit(6):
        optim.step()
        raise ZeroDivisionError
    assert live.recover() == 4
    assert same(values(model), before)


def test_the_newer_one_of_copy_and_checkpoint(tmp_path: Path) -> None:
    live, _, optim = begin(tmp_path, 5, save_every=4, copy_every=3)
    with pytest.raises(ZeroDivisionError), live.commit(6):
        raise ZeroDivisionError
    assert live.recover() == 4
    live, _, optim = begin(tmp_path / "other", 5, save_every=3, copy_every=4)
    with pytest.raises(ZeroDivisionError), live.commit(6):
        optim.step()
        raise ZeroDivisionError
    assert (live.recover(), live.source) == (4, "own copy")


class Call:
    """A running call."""

    def __init__(self, iteration: int) -> None:
        self.iteration, self._to_free, self._last = iteration, set[Any](), LastSave()

    def atomic(self) -> Any:
        return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("is_another_call", "iteration", "step"), [(False, 1, 3), (False, 5, 6), (True, 0, 3), (True, 1, 6)]
)
def test_who_was_not_there_looks_for_newer_ones(
    tmp_path: Path, is_another_call: bool, iteration: int, step: int
) -> None:
    """A reserve, say: others went on in the iterations between, and may have come further. In each call the iterations
    begin at 0 again."""
    live, _, _ = begin(tmp_path, 3, save_every=2)
    live.recover(call := Call(0))
    begin(tmp_path / "others", 6, save_every=2)
    for path in (tmp_path / "others").iterdir():
        if not (tmp_path / path.name).exists():
            path.rename(tmp_path / path.name)
    call.iteration = iteration
    assert live.recover(Call(iteration) if is_another_call else call) == step


def test_a_trainer_takes_no_state_with_checkpoints(tmp_path: Path) -> None:
    """It decides where it begins before they are loaded: the data would be at another step than the parts."""
    assert Keeping(LiveState()).found() == 0
    with pytest.raises(OptionError, match="Leave out folder= and save_every="):
        Keeping(LiveState(folder=tmp_path))


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    begin(tmp_path, 6, save_every=1, keep=2)
    assert names(tmp_path) == ["step_00000005", "step_00000006"]


def test_unfinished_ones_go_with_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "step_00000001").mkdir(parents=True)
    (tmp_path / "step_00000009").mkdir()
    (tmp_path / "notes").mkdir()
    begin(tmp_path, 2, save_every=2)
    assert names(tmp_path) == ["notes", "step_00000002_b1"]


DAMAGES = {
    "a byte": lambda path: flip(path / "__0_0.distcp", -20),
    "the first byte": lambda path: flip(path / "__0_0.distcp", 0),
    "cut short": lambda path: (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:-1]),
    "gone": lambda path: (path / "__0_0.distcp").unlink(),
    "metadata": lambda path: (path / ".metadata").write_bytes(b"nothing"),
    "empty metadata": lambda path: (path / ".metadata").write_bytes(b""),
    "checksums": lambda path: (path / "__0_sums.json").write_text("{"),
    "no checksums": lambda path: (path / "__0_sums.json").unlink(),
    "unfinished": lambda path: (path / ".metadata").unlink(),
}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    begin(tmp_path, 6, save_every=2)
    damage(tmp_path / "step_00000006")
    live, *_ = begin(tmp_path)
    assert live.source == f"the checkpoint {tmp_path}/step_00000004"
    unfinished = not (tmp_path / "step_00000006/.metadata").exists()
    assert unfinished or f"the checkpoint {tmp_path}/step_00000006 is passed over" in caplog.text


def test_a_damaged_one_is_written_again(tmp_path: Path) -> None:
    _, model, _ = begin(tmp_path, 6, save_every=2)
    flip(tmp_path / "step_00000006/__0_0.distcp", 100)
    begin(tmp_path, 6, save_every=2)
    live, again, _ = begin(tmp_path)
    assert live.step == 6
    assert same(values(again), values(model))


def usable(folder: Path) -> list[str]:
    """Those that are whole, of all that count."""
    disk = Checkpoints(str(folder), 3)
    return [str(name) for name in disk.names(disk.finished(-1)) if not disk.fault(name, 0, 1)]


def last(folder: Path) -> Path:
    """The one that was written last."""
    return max(folder.glob("step_*/.metadata"), key=lambda path: path.stat().st_mtime_ns).parent


@pytest.mark.parametrize("keep", [2, 3])
def test_damaged_ones_push_out_no_whole_one(tmp_path: Path, keep: int) -> None:
    """A job restarts inside its processes, so its iterations count up; then its newest checkpoint is damaged, and all
    workers are started anew, with iterations from 0. Each life begins in an older iteration than the one before."""
    for iteration, end in ((2, 6), (1, 7), (0, 8)):
        model, optim = parts()
        live = LiveState(model=model, optim=optim, extra=Part(), folder=tmp_path, save_every=1, keep=keep)
        live.recover(Call(iteration))
        live.wait()
        for step in range(live.step + 1, end + 1):
            train(live, model, optim, step)
            live.wait()
        assert len(usable(tmp_path)) == keep
        flip(last(tmp_path) / "__0_0.distcp", 100)
    assert begin(tmp_path)[0].step == 7


def test_the_order_is_that_of_writing(tmp_path: Path) -> None:
    """Training went back behind checkpoints that are whole, and saved another one: that counts, not a later step."""
    begin(tmp_path, 6, save_every=2)
    _, model, _ = begin(tmp_path / "again", 3, save_every=3)
    (tmp_path / "again/step_00000003").rename(tmp_path / "step_00000003_b1")
    live, again, optim = begin(tmp_path, save_every=5)
    assert live.source == f"the checkpoint {tmp_path}/step_00000003_b1"
    assert same(values(again), values(model))
    train(live, again, optim, 4)
    assert live.recover(Call(5)) == 4  # nor does one that is newer than what is in memory, but of another branch
    train(live, again, optim, 5)
    live.wait()
    assert names(tmp_path) == ["again", "step_00000003_b1", "step_00000005_b1", "step_00000006"]


def test_what_is_moved_aside_is_bounded(tmp_path: Path) -> None:
    """Also where one of the same name was moved aside before."""
    begin(tmp_path, 3, save_every=1)
    for step in (4, 4, 5, 6):
        begin(tmp_path, step, save_every=1)
        flip(tmp_path / f"step_{step:08d}/__0_0.distcp", 100)
        begin(tmp_path)
        assert f"damaged_step_{step:08d}" in names(tmp_path)
        assert f"step_{step:08d}" not in names(tmp_path)
    aside = [name for name in names(tmp_path) if name.startswith("damaged_")]
    assert aside == ["damaged_step_00000005", "damaged_step_00000006"]
    assert shelf.ASIDE == 2


def test_where_all_are_damaged_nobody_begins_at_zero(tmp_path: Path) -> None:
    begin(tmp_path, 4, save_every=2)
    for name in ("step_00000002", "step_00000004"):
        (tmp_path / name / ".metadata").write_bytes(b"")
    with pytest.raises(StateLost, match=r"none of the 2 checkpoints in .* remove the checkpoints to begin at step 0"):
        begin(tmp_path)


def test_one_of_other_parts_is_an_error(tmp_path: Path) -> None:
    """Not passed over: it is not damaged."""
    begin(tmp_path, 2, save_every=2)
    with pytest.raises(LiveStateError, match=r"step_00000002 does not fit: the parts here are part, and .* model"):
        LiveState(part=Part(), folder=tmp_path).recover()
    model = torch.nn.Linear(5, 5)
    optim = torch.optim.SGD(model.parameters())
    with pytest.raises(LiveStateError, match="step_00000002 does not fit the parts: "):
        LiveState(model=model, optim=optim, extra=Part(), folder=tmp_path).recover()


def test_one_of_another_size_is_an_error_and_nothing_is_loaded(tmp_path: Path) -> None:
    begin(tmp_path, 2, save_every=2)
    model = torch.nn.Sequential(torch.nn.Linear(7, 4), torch.nn.BatchNorm1d(4))
    optim = torch.optim.AdamW(model.parameters())
    before = [parameter.clone() for parameter in model.parameters()]
    said = r"step_00000002 does not fit: model.0.weight has the size \(4, 3\) there, and \(4, 7\) here"
    with pytest.raises(LiveStateError, match=said):
        LiveState(model=model, optim=optim, extra=Part(), folder=tmp_path).recover()
    assert all(map(torch.equal, before, model.parameters()))


def test_torchs_own_tools_read_it(tmp_path: Path) -> None:
    _, model, _ = begin(tmp_path, 2, save_every=2)
    mine = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    load(mine, storage_reader=FileSystemReader(tmp_path / "step_00000002"), no_dist=True)
    assert same(list(mine.values()), values(model))


def test_a_disk_that_is_full_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "_sums", full)
        live, *_ = begin(tmp_path, 2, save_every=2)
    assert live.step == 2
    assert "the checkpoint of step 2 is not finished: rank 0: [Errno 28] No space left on device" in caplog.text
    assert Checkpoints(str(tmp_path), 3).finished(-1)[0] == -1
    assert not names(tmp_path)  # what was written of it takes no room


def test_what_is_left_of_earlier_ones_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes were killed while they wrote; no checkpoint is finished while the disk is full."""
    begin(tmp_path, 2, save_every=2)
    (tmp_path / "step_00000003" / "half").mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints._Summed, "_write_sums", lambda *_: 1 / 0)
        begin(tmp_path, 4, save_every=2)
    assert names(tmp_path) == ["step_00000002"]


@pytest.mark.parametrize(("mode", "of_files"), [(0o700, 0o600), (0o750, 0o640)])
def test_who_may_read_it(tmp_path: Path, mode: int, of_files: int) -> None:
    before = os.umask(0)
    try:
        begin(tmp_path / "above" / "run", 2, save_every=2, folder_mode=mode)
    finally:
        os.umask(before)
    made = list(tmp_path.rglob("*"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_dir()} == {mode}
    assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_file()} == {of_files}
    assert (tmp_path / "above/run/step_00000002/.metadata") in made


def test_a_file_address_is_a_folder(tmp_path: Path) -> None:
    begin(f"file://{tmp_path}/run", 2, save_every=2)
    live, *_ = begin(tmp_path / "run")
    assert live.step == 2 and stat.S_IMODE((tmp_path / "run/step_00000002").stat().st_mode) == 0o700


@pytest.fixture
def two_ranks(excepthook: None) -> Iterator[None]:
    """A group of which only rank 0 is there, and whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def write_while(save: Callable[..., object], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoints:
    """The checkpoint of step 2, with this in place of torch's `save`."""
    found = Checkpoints(str(folder), 3)
    writer = checkpoints._writer(found.folder, 0o700)
    writer.beside = found.writer
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    monkeypatch.setattr(checkpoints, "save", save)
    state = {"weight": torch.ones(2)}
    found.begin(checkpoints.Staged(2, writer, state, state), weakref.ref(group))
    assert found.writer.ended(10)
    return found


@pytest.mark.usefixtures("two_ranks")
def test_one_rank_writes_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's `save` finds no default group any more, and takes the rank for the only one."""
    as_it_is = checkpoints.save

    def save(*args: Any, **options: Any) -> object:
        dist.destroy_process_group()
        return as_it_is(*args, **options)

    found = write_while(save, tmp_path, monkeypatch)
    assert "the checkpoint of step 2 is not finished: rank 0: the iteration is over: 2 ranks were to" in caplog.text
    assert found.finished(-1)[0] == -1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.usefixtures("two_ranks")
def test_the_iteration_ends_when_all_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = write_while(lambda *_, **__: dist.destroy_process_group(), tmp_path, monkeypatch)
    assert "step 2 is saved" in caplog.text
    assert found.newest == 2


@pytest.mark.usefixtures("two_ranks")
def test_the_iteration_ends_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch would warn that it assumes a single process."""
    saved: list[object] = []
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: dist.destroy_process_group())
    write_while(lambda *args, **_: saved.append(args), tmp_path, monkeypatch)
    assert "the checkpoint of step 2 is not finished: the iteration is over" in caplog.text
    assert not saved


def test_other_file_systems() -> None:
    pytest.importorskip("fsspec")
    folder = "memory://run/one"
    _, model, _ = begin(folder, 8, save_every=2)
    live, again, _ = begin(folder)
    assert live.source == "the checkpoint memory://run/one/step_00000008"
    assert same(values(again), values(model))
    assert Checkpoints(folder, 3).finished(-1)[1:6:2] == [8, 6, 4]


@pytest.mark.parametrize("name", [Name(0, 5), Name(0, 123456789), Name(3, 7)])
def test_names(name: Name) -> None:
    assert Name.of(str(name)) == name
    assert Name.of(str(name) + "x") is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"save_every": 2}, "save_every=2 needs folder"),
        ({"folder": ".", "save_every": -1}, "save_every=-1 must be"),
        ({"folder": ".", "keep": 0}, "keep=0 must be at least 1"),
        ({"folder": ".", "folder_mode": 0o070}, "folder_mode=0o70 must be a mode"),
        ({"folder": "nosuch://x"}, "folder='nosuch://x' cannot be opened"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        LiveState(**options)
