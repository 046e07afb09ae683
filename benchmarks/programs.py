"""The trainings of `back_to_training`, as their users write them.

Each is made before the call; ``run(call)`` is one run of the wrapped function, or of a process under torchrun, where
there is no call. It says to its rank what it has reached, and asks it at each batch whether the fault is due.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import inprocess
from benchmarks.parts import SIZE, Parts, Texts

if TYPE_CHECKING:
    from benchmarks.back_to_training import Rank

__all__ = ["Fresh", "Kept", "Program", "Sharded"]

#: steps of each run after which a checkpoint is written
SAVED = 2
#: of the sharded model; ranks that share a layer
WIDTH, BLOCKS, TENSOR = 256, 8, 2


class Program(ABC):
    """What one process does."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    @abstractmethod
    def run(self, call: Any) -> None:
        """Train until the fault, or without an end."""

    def warm_up(self) -> None:
        """What a spare runs while it waits."""
        raise NotImplementedError


class Kept(Program):
    """Model, optimizer and loader are made before the call, and the module is compiled before it."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        from benchmarks.parts_ahead import PARTS as parts  # noqa: PLC0415  (it compiles)

        getattr(inprocess, "keep_compiled_code", lambda: None)()  # earlier revisions have it not
        self._parts = parts
        self._live = inprocess.LiveState(model=parts.network, optim=parts.optimizer, sampler=parts.sampler)
        self._loader = inprocess.KeptLoader(parts.loader(rank.request.workers))

    def run(self, call: Any) -> None:
        parts = self._parts
        self.rank.join()
        step = self._live.recover(call)
        self.rank.reached("state")
        model = DistributedDataParallel(parts.compiled)
        self.rank.reached("model")
        for number, words in enumerate(self._loader.from_step(step)):
            self.rank.begin(number)
            call.ping()
            parts.learn(model, words)
            with self._live.commit(step + number + 1):
                parts.optimizer.step()
                parts.sampler.advance()
            self.rank.done(number)

    def warm_up(self) -> None:
        """The function's first steps, in a group of this process alone."""
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = DistributedDataParallel(self._parts.compiled)
        self._parts.rehearse(model)
        self.rank.reached("warm")
        del model
        dist.destroy_process_group()


class Fresh(Program):
    """The function makes everything anew, and loads a checkpoint."""

    def run(self, call: Any) -> None:
        self.rank.join()
        parts, step = Parts(), 0
        if self.rank.file.exists():
            found = torch.load(self.rank.file)
            parts.network.load_state_dict(found["network"])
            parts.optimizer.load_state_dict(found["optimizer"])
            step, parts.sampler.position = found["step"], found["position"]
        self.rank.reached("state")
        model = DistributedDataParallel(parts.compiled)
        self.rank.reached("model")
        for number, words in enumerate(parts.loader(self.rank.request.workers)):
            self.rank.begin(number)
            if call is not None:
                call.ping()
            parts.learn(model, words)
            parts.optimizer.step()
            parts.sampler.advance()
            self.rank.done(number)
            if number == SAVED and dist.get_rank() == 0:
                self._save(parts, step + number + 1)

    def _save(self, parts: Parts, step: int) -> None:
        found = {"network": parts.network.state_dict(), "optimizer": parts.optimizer.state_dict()}
        unfinished = self.rank.file.with_suffix(".tmp")
        torch.save(found | {"step": step, "position": parts.sampler.position}, unfinished)
        unfinished.replace(self.rank.file)


class Sharded(Program):
    """FSDP2 and tensor parallelism on a mesh; not compiled, since torch would compile it anew at each restart.

    Wrapped, it gets its shards back from memory; under torchrun from a checkpoint of torch.distributed.checkpoint.
    """

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        torch.set_num_threads(1)
        self._live = inprocess.LiveState(copy_every=1)
        self._texts = Texts()
        self._loader = inprocess.KeptLoader(DataLoader(self._texts, SIZE["batch"], num_workers=rank.request.workers))

    def run(self, call: Any) -> None:
        self.rank.join()
        mesh = init_device_mesh("cpu", (dist.get_world_size() // TENSOR, TENSOR), mesh_dim_names=("data", "tensor"))
        model = _blocks(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.rank.reached("model")
        if call:  # the embedding has no tensor parallelism, so parameters are on two meshes
            shard = dist.get_rank(), dist.get_world_size()
            step = self._live.recover(call, shard=shard, model=model, optimizer=optimizer)
        else:
            step = self._load(model, optimizer)
        self.rank.reached("state")
        data = mesh["data"]
        order: Any = DistributedSampler(self._texts, data.size(), data.get_local_rank(), shuffle=False)
        for number, words in enumerate(
            self._loader.from_step(step, BatchSampler(order, SIZE["batch"], drop_last=True))
        ):
            self.rank.begin(number)
            found = model(words[:, :-1])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(found.flatten(0, 1), words[:, 1:].flatten()).backward()
            if call:
                call.ping()
                with self._live.commit(step + number + 1):
                    optimizer.step()
            else:
                optimizer.step()
            self.rank.done(number)
            if not call and number == SAVED:
                dcp.save(_state(model, optimizer), checkpoint_id=self._folder(step + number + 1))

    def _folder(self, step: int) -> Path:
        return self.rank.file.with_suffix(f".{step}")

    def _load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
        step = SAVED + 1
        if not (self._folder(step) / ".metadata").exists():
            return 0
        dcp.load(state := _state(model, optimizer), checkpoint_id=self._folder(step))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return step


def _blocks(mesh: DeviceMesh) -> torch.nn.Module:
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(BLOCKS)
    ]
    for block in blocks:
        parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    model = torch.nn.Sequential(
        torch.nn.Embedding(SIZE["words"], WIDTH), *blocks, torch.nn.Linear(WIDTH, SIZE["words"])
    )
    return fully_shard(model, mesh=mesh["data"])


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, rest = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": rest}
