"""For the Trainer of Hugging Face transformers: progress, and the checkpoint to go on with.

::

    @inprocess.Wrapper()
    def train():
        args = TrainingArguments("out", save_steps=100)  # inside: it notes rank and world size
        trainer = Trainer(model, args, train_dataset=data, callbacks=[RestartCallback()])
        trainer.train(resume_from_checkpoint=last_complete_checkpoint("out"))

With ``RestartTrainer(..., live=live)`` it goes on from the last step, which is in memory.

Tried with transformers 5.24 and accelerate 1.15, see docs/frameworks.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
import sys
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from inprocess.exception import LiveStateError, OptionError
from inprocess.integrations.keeping import Keeping
from inprocess.integrations.pacing import Pace
from inprocess.interrupt.frames import leave_alone
from inprocess.live.state import LiveState
from inprocess.live.tree import is_sharded
from inprocess.system import clock
from inprocess.system.private_folder import own

__all__ = ["RestartCallback", "RestartMixin", "RestartTrainer", "last_complete_checkpoint"]

_NAME = re.compile(r"checkpoint-(\d+)")
#: what the Trainer writes last
_STATE = "trainer_state.json"
_PREFIX = "inprocess-step-"
#: where there is room for some bytes, as long as the process has any memory
SHARED_MEMORY = "/dev/shm"
#: a folder may have no lock yet that was made so short a time ago (seconds)
YOUNG_S = 60.0
#: of a TrainerState: what is not kept, since it belongs to this iteration, or to the log, which has its own way
_NOT_KEPT = {
    *("is_hyper_param_search", "is_local_process_zero", "is_world_process_zero"),
    *("log_history", "max_steps", "num_train_epochs", "stateful_callbacks", "trial_name", "trial_params"),
}


class RestartCallback(TrainerCallback):
    """Pings after each step, and gives evaluations and checkpoints a section, since neither is a step.

    A restart may strike at any moment, also while a checkpoint is written: see `last_complete_checkpoint`.

    Args:
        timeout: timedelta or seconds for an evaluation or a checkpoint, in place of ``soft_timeout``. Default None:
            ``soft_timeout``, or what was learned from those before, where that is longer.
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

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._pace.leave()

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


class RestartMixin:
    """For a class that is a Trainer: ``class MyTrainer(RestartMixin, SFTTrainer)``. See `RestartTrainer`."""

    if TYPE_CHECKING:  # what the Trainer has
        args: Any
        accelerator: Any
        add_callback: Any
        callback_handler: Any
        control: Any
        is_deepspeed_enabled: bool
        is_fsdp_enabled: bool
        is_in_train: bool
        model: Any
        model_wrapped: Any
        _maybe_log_save_evaluate: Any
        _train_batch_size: int

    def __init__(self, *args: Any, live: LiveState, callbacks: Any = None, timeout: Any = None, **kwargs: Any) -> None:
        self._keeping = Keeping(live)
        #: what it goes on from in memory
        self._memory: _Memory | None = None
        others = [callback for callback in callbacks or () if not isinstance(callback, RestartCallback)]
        first = _KeepingCallback(self, timeout)  # others may raise, or take long
        super().__init__(*args, callbacks=[first, *others], **kwargs)  # type: ignore[call-arg]
        self.add_callback(_DueCallback(self, first))  # after all others

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the checkpoint counts where no rank has a state in memory. True: the newest one that is
        whole, or the beginning, where there is none."""
        self._refuse_shards()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir)
        if (step := self._keeping.found()) > 0:
            # at the last step no epoch must be begun: the Trainer would do one step more
            at = sys.maxsize if 0 < self.args.max_steps <= step else step
            self._memory = _Memory(self._beginning(at))
            resume_from_checkpoint = self._memory.folder
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            self._keeping.fail(error)
            raise
        finally:
            if self._memory is not None:
                self._memory.remove()

    def _refuse_shards(self) -> None:
        is_divided = any(is_sharded(parameter) for parameter in self.model.parameters())
        if is_divided or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise OptionError(
                "live=...: this Trainer shards its state (FSDP, DeepSpeed or tensor parallelism), and only a state "
                "that is the same on all ranks is kept in memory. Use Trainer(callbacks=[RestartCallback()]) and "
                "last_complete_checkpoint(), or a training loop with LiveState (docs/live.md, Sharded states)"
            )

    def _beginning(self, step: int) -> TrainerState:
        """What the Trainer has to know before there are parts to recover."""
        callbacks = [*self.callback_handler.callbacks, self.control]
        exported = [each for each in callbacks if isinstance(each, ExportableState)]
        state = TrainerState(global_step=step, train_batch_size=self._train_batch_size, stateful_callbacks=exported)
        state.compute_steps(self.args, max(1, self.args.max_steps))
        return state

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> Any:
        if self._memory is not None and resume_from_checkpoint == self._memory.folder:
            return None  # they are recovered when there is an optimizer, too
        return super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]


class RestartTrainer(RestartMixin, Trainer):
    """A Trainer that goes on from its last step after a restart, with the state in memory; a new process gets it from
    another one.

    ::

        live = inprocess.LiveState()  # outlives restarts

        @inprocess.Wrapper()
        def train():
            trainer = RestartTrainer(model, args, train_dataset=data, live=live)
            trainer.train(resume_from_checkpoint=last_complete_checkpoint("out"))

    Kept at each step are the model, the optimizer, the learning rate's schedule, the scaler and the ``TrainerState``.
    Python's, NumPy's and torch's random numbers follow from step and rank, unless ``LiveState(seed=None)``. For states
    that are the same on all ranks; a Trainer with FSDP or DeepSpeed raises OptionError in ``train()``.

    An evaluation or a checkpoint that was due at that step, and was cut off, is done again. It has a `RestartCallback`
    already.

    Args:
        live: where the state is kept.
        timeout: as for `RestartCallback`.
        args, kwargs: for the Trainer.
    """


class _KeepingCallback(RestartCallback):
    """The first one. Has the Trainer weakly, or that would wait for a collection of garbage."""

    def __init__(self, trainer: Any, timeout: Any) -> None:
        super().__init__(timeout)
        self._trainer: Any = weakref.proxy(trainer)
        self._keeping: Keeping = trainer._keeping

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        super().on_train_begin(args, state, control, **more)
        trainer, optimizer, scheduler = self._trainer, more["optimizer"], more["lr_scheduler"]
        parts = {"model": more["model"], "optimizer": getattr(optimizer, "optimizer", optimizer)}
        parts["trainer"] = _Progress(state, control)
        if scheduler is not None:
            parts["scheduler"] = scheduler
        if trainer.accelerator.scaler is not None:
            parts["scaler"] = trainer.accelerator.scaler
        memory: _Memory | None = trainer._memory
        if memory is not None:
            memory.remove()
            if state.global_step != memory.step:
                raise LiveStateError(
                    f"the Trainer has not read the step in {memory.folder}: this version does it later"
                )
        self._keeping.begin(**parts)
        trainer._initial_global_step = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        super().on_step_begin(args, state, control, **more)
        self._keeping.reseed(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._keeping.open(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._keeping.close()
        super().on_step_end(args, state, control, **more)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._keeping.refresh()  # with what is due now
        super().on_epoch_end(args, state, control, **more)

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._refresh()

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._refresh()  # it is not due any more
        super().on_evaluate(args, state, control, **more)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._refresh()
        super().on_save(args, state, control, **more)

    def _refresh(self) -> None:
        if self._trainer.is_in_train:
            self._keeping.refresh()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        super().on_train_end(args, state, control, **more)
        self._keeping.end()


class _DueCallback(TrainerCallback):
    """The last one: when all have begun, do what was due at this step and was cut off."""

    def __init__(self, trainer: Any, first: _KeepingCallback) -> None:
        self._trainer: Any = weakref.proxy(trainer)
        self._first = first

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if control.should_evaluate or control.should_save:
            RestartCallback.on_epoch_end(self._first, args, state, control)
            trainer, loss = self._trainer, torch.zeros((), device=args.device)
            trainer._maybe_log_save_evaluate(loss, None, trainer.model_wrapped, None, state.epoch, None, clock.wall())
            self._first._pace.leave()


class _Progress:
    """The TrainerState, and what is due, as a part of a LiveState."""

    def __init__(self, state: TrainerState, control: Any) -> None:
        self._state, self._control = state, control
        #: entries of the log, as text: there may be many, and this is asked at each step
        self._log, self._logged = "", 0

    def state_dict(self) -> dict[str, Any]:
        history = self._state.log_history
        if len(history) < self._logged:
            self._log, self._logged = "", 0
        self._log += "".join(f"{json.dumps(entry)}\n" for entry in history[self._logged :])
        self._logged = len(history)
        fields = {field.name for field in dataclasses.fields(self._state)} - _NOT_KEPT
        kept = {name: getattr(self._state, name) for name in sorted(fields)}
        due = [self._control.should_evaluate, self._control.should_save]
        return {"state": json.dumps(kept), "log": self._log, "due": due}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        for name, value in json.loads(kept["state"]).items():
            setattr(self._state, name, value)
        self._state.log_history = [json.loads(line) for line in kept["log"].splitlines()]
        self._control.should_evaluate, self._control.should_save = kept["due"]


class _Memory:
    """A folder that has no more than the step, for a Trainer that reads it from a checkpoint. It is there for moments,
    no longer than this object, and no interruption leaves half of it.

    One that was left by a process that was killed in these moments is removed by the next: nobody has it locked.
    """

    _is_there = False

    def __init__(self, state: TrainerState) -> None:
        self.step = state.global_step
        try:
            self._make(state, tempfile.gettempdir())
        except OSError:  # it is full, say; what the Trainer goes on from is whole, and in memory
            self._make(state, SHARED_MEMORY)

    def _make(self, state: TrainerState, root: str) -> None:
        _remove_left(root)
        made, held = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=root)), -1
        try:
            with contextlib.suppress(OSError):  # a file system without locks: nobody can have it locked, then
                held = _lock(made)
            state.save_to_json(str(made / _STATE))
            made = made.rename(made.with_name(made.name[1:]))  # from here on it may be found
        except BaseException:
            _remove(made, held)
            raise
        self.folder, self._held, self._is_there = str(made), held, True

    def remove(self) -> None:
        if self._is_there:
            self._is_there = False
            _remove(Path(self.folder), self._held)

    __del__ = remove


def _remove_left(root: str) -> None:
    with contextlib.suppress(OSError), own(root) as folder:
        for name in folder.names(re.compile(rf"\.?{re.escape(_PREFIX)}.*")):
            with contextlib.suppress(OSError):  # also BlockingIOError: it is in use
                if name.startswith(".") and clock.wall() - folder.stat(name).st_mtime < YOUNG_S:
                    continue  # another process is making it
                folder.below(name, makes=False).close()  # it is this user's
                _remove(left := Path(folder.path, name), _lock(left))


def _lock(folder: Path) -> int:
    """A descriptor that has it locked. Raises BlockingIOError where another process has."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(held)
        raise
    return held


def _remove(folder: Path, held: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if held >= 0:
        os.close(held)


leave_alone(_Memory.__init__.__code__, _Memory.remove.__code__, _remove.__code__)
