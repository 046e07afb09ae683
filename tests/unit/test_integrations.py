"""What the callbacks of all frameworks share, and which checkpoint of the Trainer is whole."""

from __future__ import annotations

import errno
import importlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inprocess.integrations import pacing
from inprocess.integrations.pacing import Pace
from inprocess.monitor.learned import LearnedTimeouts
from tests.harness.at_line import AtLine


class Call:
    """Notes what is done with it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.timeouts = LearnedTimeouts()
        self.timeouts.soft_timeout = 60.0

    def ping(self) -> None:
        self.seen.append("ping")

    @contextmanager
    def section(self, name: str, timeout: Any) -> Iterator[None]:
        self.seen.append((name, timeout))
        yield
        self.timeouts.observed.section(name, 0.1)
        self.seen.append("end")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    found = Call()
    monkeypatch.setattr(pacing, "current_call", lambda: found)
    return found


def test_one_section_at_a_time_and_its_end_is_progress(call: Call) -> None:
    pace = Pace(timeout=7)
    pace.ping()
    pace.enter("evaluation")
    pace.enter("checkpoint")
    pace.leave()
    pace.leave()
    assert call.seen == ["ping", ("evaluation", 7), "end", "ping", ("checkpoint", 7), "end", "ping"]


def test_a_section_that_was_interrupted_is_not_ended_in_the_next_training(call: Call) -> None:
    pace = Pace()
    pace.enter("checkpoint")
    pace.begin()
    pace.leave()
    assert call.seen[0] == ("checkpoint", None) and "ping" not in call.seen


@pytest.mark.parametrize(("longest", "limit"), [(1.0, 60.0), (11.9, 60.0), (20.0, 100.0)])
def test_what_is_learned_makes_a_limit_longer_only(call: Call, longest: float, limit: float) -> None:
    """A section also covers what no hook tells of, such as the loader's next start."""
    pace = Pace()
    for _ in range(2):
        pace.enter("checkpoint")
    pace.leave()
    assert call.seen[0] == call.seen[3] == ("checkpoint", None)
    call.timeouts.observed.section("checkpoint", longest)
    pace.enter("checkpoint")
    assert call.seen[-1] == ("checkpoint", limit)


def test_a_section_that_ends_with_an_error_teaches_nothing(call: Call) -> None:
    pace = Pace()
    pace.enter("checkpoint")
    pace.fail(ZeroDivisionError())
    pace.leave()
    assert call.seen == [("checkpoint", None)] and not call.timeouts.observed.sections


def test_outside_of_a_wrapped_function_nothing_happens() -> None:
    pace = Pace()
    pace.ping()
    pace.enter("checkpoint")
    pace.leave()


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with stand-ins for the classes of the framework."""
    name = "inprocess.integrations.transformers"
    kinds = {kind: type(kind, (), {}) for kind in ("ExportableState", "Trainer", "TrainerCallback", "TrainerState")}
    for module in ("transformers", "transformers.trainer_callback"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**kinds))
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As `transformers`."""
    name = "inprocess.integrations.lightning"
    for module, kind in (
        ("", "Callback"),
        (".accelerators", "CPUAccelerator"),
        (".plugins.environments", "ClusterEnvironment"),
        (".strategies", "DDPStrategy"),
        (".trainer.states", "TrainerFn"),
    ):
        monkeypatch.setitem(sys.modules, f"lightning.pytorch{module}", SimpleNamespace(**{kind: type(kind, (), {})}))
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def test_a_checkpoint_of_transformers_ends_when_it_is_written(call: Call, transformers: Any) -> None:
    """Not with the next step, before which a loader may start its workers."""
    callback, due = transformers.RestartCallback(), SimpleNamespace(should_evaluate=False, should_save=True)
    callback.on_train_begin(None, None, None)
    callback.on_step_begin(None, None, None)
    callback.on_step_end(None, None, due)
    callback.on_save(None, None, due)
    assert call.seen == ["ping", ("checkpoint", None), "end", "ping"]


def test_a_checkpoint_of_lightning_after_the_fit_is_no_section(call: Call, lightning: Any) -> None:
    """``trainer.save_checkpoint()``: nothing would end it."""
    callback, trainer = lightning.RestartCallback(), SimpleNamespace(sanity_checking=False)
    for ends in (callback.on_fit_end, lambda *args: callback.on_exception(*args, KeyError())):
        callback.on_fit_start(trainer, None)
        callback.on_save_checkpoint(trainer, None, {})
        callback.on_train_batch_start(trainer, None, None, 1)
        ends(trainer, None)
        callback.on_save_checkpoint(trainer, None, {})
    assert call.seen == [("checkpoint", None), "end", "ping"] * 2


def test_the_sanity_check_of_lightning_is_no_validation(call: Call, lightning: Any) -> None:
    """Two batches say nothing about how long a whole one takes. One outside of a fit has its end, too."""
    callback, trainer = lightning.RestartCallback(), SimpleNamespace(sanity_checking=True)
    callback.on_fit_start(trainer, None)
    for trainer.sanity_checking in (True, False):
        callback.on_validation_start(trainer, None)
        callback.on_validation_end(trainer, None)
    assert [each for each in call.seen if isinstance(each, tuple)] == [("sanity check", None), ("validation", None)]


@pytest.mark.parametrize(
    ("state", "is_whole"),
    [
        (json.dumps({"global_step": 20}), True),
        (json.dumps({"global_step": 20})[:-5], False),
        (json.dumps({"global_step": 10}), False),
        (json.dumps([20]), False),
        ("", False),
        (b"\xff\xfe", False),
        (None, False),
    ],
    ids=["whole", "cut off", "of another step", "no object", "empty", "no text", "missing"],
)
def test_the_newest_checkpoint_that_is_whole(
    transformers: Any, tmp_path: Path, state: str | bytes | None, is_whole: bool
) -> None:
    for step in (9, 10, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    newest = tmp_path / "checkpoint-20" / "trainer_state.json"
    newest.unlink()
    if state is not None:
        newest.write_bytes(state.encode() if isinstance(state, str) else state)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-30").write_text("no folder")
    assert transformers.last_complete_checkpoint(tmp_path) == str(tmp_path / f"checkpoint-{20 if is_whole else 10}")


@pytest.mark.parametrize("newest", [20, 10, None])
def test_the_trainer_finds_it_by_itself(transformers: Any, tmp_path: Path, newest: int | None) -> None:
    """The Trainer's own way takes the newest folder, also a torn one, and raises where there is none."""

    class Standing:
        args, seen = SimpleNamespace(output_dir=str(tmp_path)), []
        _keeping = SimpleNamespace(found=lambda: 0, fail=None)

        def train(self, resume_from_checkpoint: Any) -> None:
            self.seen.append(resume_from_checkpoint)

    class Trainer(transformers.RestartMixin, Standing):
        __init__ = object.__init__
        _memory = None

        def _refuse_shards(self) -> None: ...

    for step in (10, 20) if newest else ():
        (tmp_path / f"checkpoint-{step}").mkdir()
        if step <= newest:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    Trainer().train(resume_from_checkpoint=True)
    assert Standing.seen == [newest and str(tmp_path / f"checkpoint-{newest}")]


class State:
    """A TrainerState, and what comes of each attempt to write it."""

    def __init__(self, *errors: int) -> None:
        self.global_step, self._errors = 7, list(errors)

    def save_to_json(self, path: str) -> None:
        if self._errors and (number := self._errors.pop(0)):
            raise OSError(number, os.strerror(number), path)
        Path(path).write_text(json.dumps({"global_step": self.global_step}))


@pytest.fixture
def temporary(transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files; the other one is beside it."""
    for name in ("temporary", "shared"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(transformers, "SHARED_MEMORY", str(tmp_path / "shared"))
    return tmp_path / "temporary"


def step_in(memory: Any) -> Any:
    return json.loads((Path(memory.folder) / "trainer_state.json").read_text())["global_step"]


def test_a_full_temporary_folder_ends_no_recovery(transformers: Any, temporary: Path) -> None:
    """The step is told to the Trainer from elsewhere, and nothing is left behind, whatever fails."""
    memory = transformers._Memory(State(errno.ENOSPC))
    assert step_in(memory) == 7 and Path(memory.folder).parent == temporary.with_name("shared")
    memory.remove()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space"):
        transformers._Memory(State(errno.ENOSPC, errno.ENOSPC))
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [*temporary.iterdir(), *temporary.with_name("shared").iterdir()]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    transformers: Any, temporary: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_lock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(transformers.fcntl, "flock", no_lock)
    first, second = (transformers._Memory(State()) for _ in range(2))
    assert step_in(first) == step_in(second) == 7
    for memory in (first, second, first):
        memory.remove()
    assert not list(temporary.iterdir())


def test_an_interruption_at_any_line_leaves_nothing(transformers: Any, temporary: Path) -> None:
    """Half a folder stayed, and its lock with it, until the process ended."""

    def use() -> None:
        memory = transformers._Memory(State())
        try:
            assert step_in(memory) == 7
        finally:
            memory.remove()

    open_before = len(os.listdir("/proc/self/fd"))
    for line in itertools.count(1):
        with AtLine(line, (transformers.__file__, __file__)) as strike:
            use()
        assert not list(temporary.iterdir()), line
        assert len(os.listdir("/proc/self/fd")) == open_before, line
        if not strike.is_done:
            break
    assert line > 5


def test_what_a_killed_process_has_left_is_removed(transformers: Any, temporary: Path) -> None:
    """What another one uses is not, nor what it is just making and has not locked yet."""
    held = transformers._Memory(State())
    for name in ("inprocess-step-left", ".inprocess-step-old", ".inprocess-step-new", "inprocess-other"):
        (temporary / name).mkdir(mode=0o700)
    os.utime(temporary / ".inprocess-step-old", (0, 0))
    transformers._Memory(State()).remove()
    left = {path.name for path in temporary.iterdir()}
    assert left == {Path(held.folder).name, ".inprocess-step-new", "inprocess-other"}
    held.remove()


def test_no_checkpoint_yet(transformers: Any, tmp_path: Path) -> None:
    assert transformers.last_complete_checkpoint(tmp_path) is None
    assert transformers.last_complete_checkpoint(tmp_path / "none") is None
