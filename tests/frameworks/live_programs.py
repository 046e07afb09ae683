"""Trainers that keep their state in memory: dropout, Adam, a schedule, shuffled data, accumulated gradients."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import torch.distributed as dist

import inprocess
from inprocess.testing import here

from .programs import data, in_transformers, model, tell, weights

#: each process has its own; a replacement begins without a state
live = inprocess.LiveState()


def net() -> torch.nn.Module:
    return torch.nn.Sequential(*model(), torch.nn.Dropout(0.2))


@inprocess.Wrapper()
def transformers_live(steps: int, folder: str, save_steps: int = 1000, workers: int = 0) -> Any:
    from transformers import TrainerCallback, TrainingArguments

    from inprocess.integrations.transformers import RestartTrainer, last_complete_checkpoint

    class Places(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            here("resume", step=state.global_step)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            here("commit")

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            here("step", number=state.global_step)

        def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            here("evaluated", number=state.global_step)

    class Told(RestartTrainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            here("recovering")
            return super().get_train_dataloader()

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            here("evaluation")
            return super().evaluate(*args, **kwargs)

    rows = [{"inputs": inputs, "labels": labels} for inputs, labels in data()]
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_steps=save_steps,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=8,
        learning_rate=0.05,
        warmup_steps=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=2,
        remove_unused_columns=False,
        dataloader_num_workers=workers,
    )
    tell(arguments.process_index, arguments.world_size, arguments.process_index == 0)
    trainer = Told(
        in_transformers(net()),
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:8],
        callbacks=[Places()],
        live=live,
    )
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(folder))
    assert trainer.state.global_step == steps
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [*range(8, steps + 1, 8)]
    here("end")
    assert trainer.accelerator.num_processes == (dist.get_world_size() if dist.is_initialized() else 1)
    return weights(trainer.model.net)


def _module() -> Any:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, index: int) -> Any:
            inputs, targets = batch
            loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
            here("forward")
            self.log("train_loss", loss, on_epoch=True, logger=False)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            if not self.trainer.sanity_checking:
                here("evaluation")

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            here("commit")

        def configure_optimizers(self) -> Any:
            here("recovering")
            optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Module()


def _places() -> Any:
    import lightning

    class Places(lightning.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            here("resume", step=trainer.global_step)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            here("step", number=trainer.global_step)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            here("epoch")

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                here("evaluated", number=trainer.global_step)

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            here("saving")

    return Places()


@inprocess.Wrapper()
def lightning_live(steps: int, folder: str, save_steps: int = 1000, epochs: int = 0, workers: int = 0) -> Any:
    """``epochs``: instead of steps."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from inprocess.integrations.lightning import RestartCallback, RestartDDPStrategy

    save = ModelCheckpoint(folder, save_last=True, monitor="train_loss", save_on_train_epoch_end=True)
    fit = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=RestartDDPStrategy(process_group_backend="gloo"),
        callbacks=[RestartCallback(live=live), _places(), *([save] if save_steps <= steps else [])],
        max_steps=-1 if epochs else steps,
        max_epochs=epochs or None,
        accumulate_grad_batches=2,
        val_check_interval=4,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=save_steps <= steps,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    tell(fit.global_rank, fit.world_size, fit.is_global_zero)
    shuffled = torch.utils.data.DataLoader(data(), batch_size=4, shuffle=True, num_workers=workers)
    module, last = _module(), pathlib.Path(folder, "last.ckpt")
    fit.fit(
        module, shuffled, torch.utils.data.DataLoader(data(), batch_size=4), ckpt_path=last if last.exists() else None
    )
    assert fit.current_epoch == epochs if epochs else fit.global_step == steps
    here("end")
    return weights(module.net)


@inprocess.Wrapper()
def refused(framework: str) -> str:
    """What a Trainer says that has a sharded state."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if framework == "lightning":
        import lightning

        from inprocess.integrations.lightning import RestartCallback

        fit = lightning.Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[RestartCallback(live=live)])
        train, arguments = fit.fit, (_module(), torch.utils.data.DataLoader(data()))
    else:
        from transformers import TrainingArguments

        from inprocess.integrations.transformers import RestartTrainer

        trainer = RestartTrainer(net(), TrainingArguments("unused", use_cpu=True, report_to=[]), live=live)
        trainer.model = fully_shard(trainer.model, mesh=init_device_mesh("cpu", (1,)))
        train, arguments = trainer.train, ()
    try:
        train(*arguments)
    except inprocess.OptionError as error:
        return str(error)
    return ""
