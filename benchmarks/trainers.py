"""The trainings of `back_to_training` by the Trainers of transformers and Lightning, with what makes them go on.

Both keep their state in memory with a ``LiveState``, and load a checkpoint under torchrun. Network and data are made
before the call, which is right where no process dies (docs/frameworks.md). Under torchrun the process group is there
before: by themselves both would read the addresses of the workers that died (torch 2.13).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import inprocess
from benchmarks.parts import SIZE, Parts, Texts
from benchmarks.programs import SAVED, Program

if TYPE_CHECKING:
    from benchmarks.back_to_training import Rank

__all__ = ["Lightning", "Transformers"]

#: more than there ever are
STEPS = 1000


class Transformers(Program):
    """A small GPT-2, compiled, in transformers' Trainer."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

        torch.set_num_threads(1)
        torch.manual_seed(0)
        shape = {"n_positions": SIZE["length"] + 1, "n_embd": SIZE["width"], "n_layer": SIZE["layers"], "n_head": 8}
        self._network = GPT2LMHeadModel(GPT2Config(vocab_size=SIZE["words"], **shape))
        self._live, self._data = inprocess.LiveState(), _Examples()

    def run(self, call: Any) -> None:
        from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: PLC0415

        from inprocess.integrations.transformers import RestartTrainer, last_complete_checkpoint  # noqa: PLC0415

        reached = _Steps(self.rank)

        class Told(TrainerCallback):
            def on_train_begin(self, *given: Any, **more: Any) -> None:
                reached.rank.reached("model")

            def on_step_begin(self, *given: Any, **more: Any) -> None:
                reached.begin()

            def on_step_end(self, *given: Any, **more: Any) -> None:
                reached.done()

        self.rank.enter() if call else self.rank.join()
        arguments = TrainingArguments(
            str(self.rank.file.parent / "trainer"),
            max_steps=STEPS,
            per_device_train_batch_size=SIZE["batch"],
            dataloader_num_workers=self.rank.request.workers,
            torch_compile=True,
            use_cpu=True,
            save_strategy="no" if call else "steps",
            save_steps=SAVED + 1,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        self.rank.reached("group")
        kind = partial(RestartTrainer, live=self._live) if call else Trainer
        trainer = kind(self._network, arguments, train_dataset=self._data, callbacks=[Told()])
        trainer.train(resume_from_checkpoint=None if call else last_complete_checkpoint(arguments.output_dir))


class _Examples(Texts):
    """As transformers wants them."""

    def __getitem__(self, index: int) -> Any:
        words = super().__getitem__(index)
        return {"input_ids": words, "labels": words}


class Lightning(Program):
    """The small GPT of the other programs, compiled, in Lightning's Trainer."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self._parts, self._data = Parts(), Texts()
        self._live = inprocess.LiveState()

    def run(self, call: Any) -> None:
        import lightning  # noqa: PLC0415
        from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: PLC0415
        from lightning.pytorch.strategies import DDPStrategy  # noqa: PLC0415

        from inprocess.integrations.lightning import RestartCallback, RestartDDPStrategy  # noqa: PLC0415

        parts, reached = self._parts, _Steps(self.rank)

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.network = parts.compiled

            def on_train_start(self) -> None:
                reached.rank.reached("model")

            def training_step(self, words: torch.Tensor, index: int) -> torch.Tensor:
                reached.begin()
                found = self.network(words[:, :-1])
                return torch.nn.functional.cross_entropy(found.flatten(0, 1), words[:, 1:].flatten())

            def on_train_batch_end(self, *given: Any) -> None:
                reached.done()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters(), lr=1e-4)

        self.rank.enter() if call else self.rank.join()
        folder = self.rank.file.parent / "lightning"
        if call:
            own: dict[str, Any] = {"strategy": RestartDDPStrategy(process_group_backend="gloo"), "devices": 1}
            callbacks: list[Any] = [RestartCallback(live=self._live)]
        else:
            own = {"strategy": DDPStrategy(process_group_backend="gloo"), "devices": self.rank.request.ranks}
            callbacks = [ModelCheckpoint(folder, save_last=True, every_n_train_steps=SAVED + 1)]
        trainer = lightning.Trainer(
            **own,
            accelerator="cpu",
            callbacks=callbacks,
            enable_checkpointing=not call,
            max_steps=STEPS,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = torch.utils.data.DataLoader(self._data, SIZE["batch"], num_workers=self.rank.request.workers)
        last = folder / "last.ckpt"
        trainer.fit(Module(), loader, ckpt_path=str(last) if not call and last.exists() else None)


class _Steps:
    """Counts the steps of one run."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self._number = rank, 0

    def begin(self) -> None:
        self.rank.begin(self._number)

    def done(self) -> None:
        self.rank.done(self._number)
        self._number += 1
