"""For the Trainer of Hugging Face transformers: progress, and the checkpoint to go on with.

::

    @inprocess.Wrapper()
    def train():
        args = TrainingArguments("out", save_steps=100)  # inside: it notes rank and world size
        trainer = Trainer(model, args, train_dataset=data, callbacks=[RestartCallback()])
        trainer.train(resume_from_checkpoint=last_complete_checkpoint("out"))

Tried with transformers 5.24 and accelerate 1.15, see docs/frameworks.md.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from inprocess.integrations.pacing import Pace

__all__ = ["RestartCallback", "last_complete_checkpoint"]

_NAME = re.compile(r"checkpoint-(\d+)")
#: what the Trainer writes last
_STATE = "trainer_state.json"


class RestartCallback(TrainerCallback):
    """Pings after each step, and gives evaluations and checkpoints a section, since neither is a step.

    A restart may strike at any moment, also while a checkpoint is written: see `last_complete_checkpoint`.

    Args:
        timeout: timedelta or seconds for an evaluation or a checkpoint, in place of ``soft_timeout``. Default None:
            learned from those before.
    """

    def __init__(self, timeout: Any = None) -> None:
        self._pace = Pace(timeout)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._pace.begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._pace.leave()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._pace.ping()
        self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if control.should_evaluate:  # the Trainer has decided before it asks callbacks
            self._pace.enter("evaluation")
        elif control.should_save:
            self._pace.enter("checkpoint")

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._pace.leave()
        if control.should_save:
            self._pace.enter("checkpoint")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._pace.ping()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._pace.leave()


def last_complete_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The latest ``checkpoint-N`` that the Trainer has written as a whole, None where there is none.

    It writes ``trainer_state.json`` last; a folder in which that is missing, cut off, or of another step was left by an
    interruption. ``get_last_checkpoint`` of transformers would choose it, and each restart would fail on it.

    Args:
        folder: ``output_dir`` of the Trainer; it need not exist yet.
    """
    paths = {int(match[1]): path for path in Path(folder).glob("*") if (match := _NAME.fullmatch(path.name))}
    return next((str(paths[step]) for step in sorted(paths, reverse=True) if _is_complete(paths[step], step)), None)


def _is_complete(path: Path, step: int) -> bool:
    try:
        state = json.loads((path / _STATE).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and state.get("global_step") == step
