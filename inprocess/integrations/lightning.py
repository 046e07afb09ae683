"""For the Trainer of Lightning: ranks that change with a restart, and progress.

::

    @inprocess.Wrapper()
    def train():
        trainer = Trainer(strategy=RestartDDPStrategy(), callbacks=[RestartCallback()], ...)  # inside: it notes ranks
        trainer.fit(Model(), data, ckpt_path="last")

With ``RestartCallback(live=live)`` it goes on from the last step, which is in memory.

Tried with lightning 2.6, see docs/frameworks.md.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from inprocess.exception import OptionError
from inprocess.integrations.keeping import Keeping
from inprocess.integrations.pacing import Pace
from inprocess.live.state import LiveState
from inprocess.system import environment

__all__ = ["RestartCallback", "RestartDDPStrategy", "RestartEnvironment"]


class RestartEnvironment(ClusterEnvironment):
    """Ranks and addresses as the environment has them in this iteration; starts no processes.

    ``LOCAL_RANK`` and the rank of the node stay those of the start: they name a GPU and a host. Lightning also takes
    local rank 0 for the process that prepares the data of its host; `RestartDDPStrategy` tells the two apart.
    """

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        return False  # it is named by the strategy below, or by the user

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def set_world_size(self, size: int) -> None:
        """Lightning computes it from its own options; what is true stands in the environment."""

    def global_rank(self) -> int:
        return int(os.environ["RANK"])

    def set_global_rank(self, rank: int) -> None:
        """As `set_world_size`."""

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", "0")))


class RestartDDPStrategy(DDPStrategy):
    """DistributedDataParallel over the ranks of this iteration, whatever ``devices`` and ``num_nodes`` say.

    Takes the arguments of Lightning's ``DDPStrategy``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("cluster_environment", RestartEnvironment())
        super().__init__(*args, **kwargs)
        #: set by `RestartCallback`
        self.is_from_memory = False

    @property
    def local_rank(self) -> int:
        """Among the ranks of this host that are left, without holes: 0 prepares its data."""
        local_rank = environment.local_rank()
        return super().local_rank if local_rank is None else local_rank

    @property
    def root_device(self) -> torch.device:
        """With GPUs that of ``LOCAL_RANK``, which stays as it is when another process of the host dies."""
        if isinstance(self.accelerator, CPUAccelerator):
            return torch.device("cpu")
        devices: Any = self.parallel_devices
        cluster: Any = self.cluster_environment
        device: torch.device = devices[cluster.local_rank()]
        return device

    def process_dataloader(self, dataloader: Any) -> Any:
        """An epoch that goes on in its middle, from memory: what it has had of the data is left out, unread."""
        made, loop = super().process_dataloader(dataloader), self.lightning_module.trainer.fit_loop
        if not self.is_from_memory or not loop.restarting or not self.lightning_module.trainer.training:
            return made
        if isinstance(made, torch.utils.data.DataLoader) and not hasattr(made, "load_state_dict"):
            # workers ask for it before Lightning says which epoch it is
            if isinstance(made.sampler, torch.utils.data.DistributedSampler):
                made.sampler.set_epoch(loop.epoch_progress.current.processed)
            name = "sampler" if made.batch_sampler is None else "batch_sampler"
            rest = _Rest(getattr(made, name), loop.epoch_loop.batch_progress.current.completed)
            object.__setattr__(made, name, rest)  # which a DataLoader does not allow once it is made
        return made

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each rank's share of the data, by the true world size."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}


class _Rest(torch.utils.data.Sampler[Any]):
    """A sampler, of a DataLoader's samples or batches, whose first pass leaves out as many as were done."""

    def __init__(self, sampler: Any, done: int) -> None:
        self._sampler, self._done = sampler, done

    def __iter__(self) -> Iterator[Any]:
        done, self._done = self._done, 0
        return itertools.islice(iter(self._sampler), done, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)


class _Loops:
    """Where a Trainer is, as a part of a LiveState. Has the Trainer weakly: it ends with its iteration.

    Lightning counts a batch as completed only after the callbacks at its end. An epoch counts as unfinished until the
    next one begins: so what Lightning does at its end is done again where a fault cut it off.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.proxy(trainer)
        #: what the callbacks at an epoch's end may ask for
        self.metrics: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        loops = self._trainer.fit_loop.state_dict()
        for count in ("total", "current"):
            batches, epochs = loops["epoch_loop.batch_progress"][count], loops["epoch_progress"][count]
            batches["completed"] = batches["processed"]
            epochs["processed"] = epochs["completed"]
        return {"loops": loops, "metrics": self.metrics}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        if kept["loops"]["epoch_loop.batch_progress"]["total"]["ready"]:
            self._trainer.fit_loop.load_state_dict(kept["loops"])
            metrics = {name: torch.tensor(value) for name, value in kept["metrics"].items()}
            self._trainer._logger_connector._callback_metrics.update(metrics)


class _Callbacks:
    """What a Trainer's callbacks keep, as a part of a LiveState."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.proxy(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {callback.state_key: callback.state_dict() for callback in self._trainer.callbacks}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        for callback in self._trainer.callbacks:
            if state := kept.get(callback.state_key):
                callback.load_state_dict(state)


class RestartCallback(Callback):
    """Pings after each batch, and gives validation and checkpoints a section, since neither is a step.

    With ``live`` it also keeps the state in memory at each step: the module, the optimizer, schedules, the precision
    plugin, loops and callbacks. After a restart the training goes on from the last step, in the middle of an epoch, and
    a new process gets the state from another one; ``ckpt_path`` counts where no rank has any. Python's, NumPy's and
    torch's random numbers follow from step and rank, unless ``LiveState(seed=None)``. Put it first in ``callbacks``.

    Args:
        timeout: timedelta or seconds for such a section in place of ``soft_timeout``. Default None: ``soft_timeout``,
            or what was learned from those before, where that is longer.
        live: where the state is kept; it outlives restarts. Needs `RestartDDPStrategy` and automatic optimization, else
            ``fit()`` raises OptionError.
    """

    def __init__(self, timeout: Any = None, live: LiveState | None = None) -> None:
        self._pace = Pace(timeout)
        self._keeping = Keeping(live) if live is not None else None
        self._loops: _Loops | None = None
        #: whether more than the parameters is done since the last commit
        self._has_more = False
        #: between the hooks of a fit's beginning and end
        self._fits = False

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._pace.begin()
        self._fits = True
        if self._keeping is None:
            return
        strategy = trainer.strategy
        if not isinstance(strategy, RestartDDPStrategy) or not module.automatic_optimization:
            raise OptionError(
                "live=...: what is kept is a state that is the same on all ranks, at each step Lightning makes. So "
                "strategy=RestartDDPStrategy() and automatic optimization are needed; here the strategy is "
                f"{type(strategy).__name__}, and automatic_optimization={module.automatic_optimization}"
            )
        strategy.is_from_memory = self._keeping.found() > 0
        self._loops = _Loops(trainer)
        parts = {f"optimizer{index}": optimizer for index, optimizer in enumerate(trainer.optimizers)}
        for index, config in enumerate(trainer.lr_scheduler_configs):
            parts[f"scheduler{index}"] = config.scheduler
        parts |= {"loops": self._loops, "callbacks": _Callbacks(trainer), "precision": trainer.precision_plugin}
        self._keeping.begin(module=module, **parts)
        if strategy.is_from_memory:
            trainer._checkpoint_connector._loaded_checkpoint = {}  # that of ckpt_path is older

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self._pace.leave()
        if self._keeping is not None:
            if self._has_more:
                self._refresh(trainer, False)
            self._keeping.reseed(trainer.global_step)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self._keeping is not None:
            self._keeping.open(trainer.global_step + 1)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if self._keeping is not None and self._loops is not None and self._keeping.is_open:
            self._loops.metrics, self._has_more = {}, False
            self._keeping.close()
        self._pace.ping()

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        if self._fits:  # later nothing would end it
            self._pace.enter("checkpoint")  # it is written after this; there is no hook for its end but the next batch

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._pace.enter("sanity check" if trainer.sanity_checking else "validation")

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, index: int, loader: int = 0) -> None:
        if not index and not loader and not trainer.sanity_checking:
            self._refresh(trainer, True)  # from here on Lightning knows that it has to be done again

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._pace.leave()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self._loops is not None:
            self._loops.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self._refresh(trainer, True)

    def _refresh(self, trainer: Any, has_more: bool) -> None:
        if self._keeping is not None and trainer.state.fn == TrainerFn.FITTING:
            self._keeping.refresh()
            self._has_more = has_more

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._pace.ping()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._pace.fail(exception)
        self._fits = False
        if self._keeping is not None:
            self._keeping.fail(exception)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self._pace.leave()
        self._fits = False
        if self._keeping is not None:
            self._keeping.end()
