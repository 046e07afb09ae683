"""For the Trainer of Lightning: ranks that change with a restart, and progress.

::

    @inprocess.Wrapper()
    def train():
        trainer = Trainer(strategy=RestartDDPStrategy(), callbacks=[RestartCallback()], ...)  # inside: it notes ranks
        trainer.fit(Model(), data, ckpt_path="last")

Tried with lightning 2.6, see docs/frameworks.md.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy

from inprocess.integrations.pacing import Pace

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

    @property
    def local_rank(self) -> int:
        """Among the ranks of this host that are left, without holes: 0 prepares its data."""
        local_rank = os.environ.get("INPROCESS_LOCAL_RANK")
        return super().local_rank if local_rank is None else int(local_rank)

    @property
    def root_device(self) -> torch.device:
        """With GPUs that of ``LOCAL_RANK``, which stays as it is when another process of the host dies."""
        if isinstance(self.accelerator, CPUAccelerator):
            return torch.device("cpu")
        devices: Any = self.parallel_devices
        environment: Any = self.cluster_environment
        device: torch.device = devices[environment.local_rank()]
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each rank's share of the data, by the true world size."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}


class RestartCallback(Callback):
    """Pings after each batch, and gives validation and checkpoints a section, since neither is a step.

    Args:
        timeout: timedelta or seconds for such a section in place of ``soft_timeout``. Default None: learned from those
            before.
    """

    def __init__(self, timeout: Any = None) -> None:
        self._pace = Pace(timeout)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._pace.begin()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self._pace.leave()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self._pace.ping()

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        self._pace.enter("checkpoint")  # it is written after this; there is no hook for its end but the next batch

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._pace.enter("validation")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._pace.leave()

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._pace.ping()

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self._pace.leave()
