"""What the callbacks of all frameworks share, and which checkpoint of the Trainer is whole."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inprocess.integrations import pacing
from inprocess.integrations.pacing import Pace


class Call:
    """Notes what is done with it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def ping(self) -> None:
        self.seen.append("ping")

    @contextmanager
    def section(self, name: str, timeout: Any) -> Iterator[None]:
        self.seen.append((name, timeout))
        yield
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


def test_no_checkpoint_yet(transformers: Any, tmp_path: Path) -> None:
    assert transformers.last_complete_checkpoint(tmp_path) is None
    assert transformers.last_complete_checkpoint(tmp_path / "none") is None
