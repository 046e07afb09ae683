"""Training programs as users of these frameworks write them: the decorator, and nothing else of this library's."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data._utils import worker

import inprocess
from inprocess.testing import here

FEATURES = 8


def data(count: int = 64) -> torch.utils.data.Dataset[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, FEATURES, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Ordered(torch.utils.data.Sampler[int]):
    """Its first number is asked for when a DataLoader has started its workers, in the DataLoader's own code."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        here("workers start")
        for child in {each.pid for each in multiprocessing.active_children()} - _seen:
            _seen.add(child)
            assert _watching.acquire(timeout=30)
        here("workers run")
        yield from range(self.count)


#: how many workers watch their parent; and those for which this process has waited
_watching, _seen = multiprocessing.get_context("fork").Semaphore(0), set[int | None]()


class _Watchdog(worker.ManagerWatchdog):  # type: ignore[misc]
    """Of a worker, by which it ends after its parent: it takes for that whoever is its parent now."""

    def __init__(self) -> None:
        super().__init__()
        _watching.release()


worker.ManagerWatchdog = _Watchdog


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def weights(trained: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trained.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def tell(rank: int, world_size: int, is_main: bool) -> None:
    """What a library believes, beside what the environment says. All are on one host, whose first process is rank 0."""
    here("belief", believed=[rank, world_size, is_main], true=_true())


def _true() -> list[Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return [rank, world_size, rank == 0]


@inprocess.Wrapper()
def accelerate_loop(steps: int, workers: int = 0, call: inprocess.CallWrapper = None) -> Any:  # type: ignore[assignment]
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    tell(accelerator.process_index, accelerator.num_processes, accelerator.is_main_process)
    tell(accelerator.process_index, accelerator.num_processes, accelerator.is_local_main_process)
    net = model()
    loader = torch.utils.data.DataLoader(data(), batch_size=4, sampler=Ordered(64), num_workers=workers)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05), loader)
    batches = iter(loader)
    for _ in range(steps):
        call.ping()
        try:
            inputs, targets = next(batches)
        except StopIteration:
            batches = iter(loader)
            inputs, targets = next(batches)
        with accelerator.accumulate(net):
            loss = torch.nn.functional.mse_loss(net(inputs), targets)
            here("backward")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return weights(accelerator.unwrap_model(net))


def whole_checkpoint(folder: str) -> int:
    """The step of the last checkpoint that is whole on all ranks; 0: none is."""
    mark = pathlib.Path(folder, "whole")
    step = int(mark.read_text()) if mark.exists() else 0
    here("resume", step=step)
    return step


def is_whole(folder: str, step: int) -> None:
    """All ranks have written theirs. In one step: a restart may begin at any moment."""
    dist.barrier()
    if dist.get_rank() == 0:
        fresh = pathlib.Path(folder, "fresh")
        fresh.write_text(str(step))
        fresh.replace(pathlib.Path(folder, "whole"))


@inprocess.Wrapper()
def accelerate_checkpoints(steps: int, folder: str, call: inprocess.CallWrapper = None) -> Any:  # type: ignore[assignment]
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    tell(accelerator.process_index, accelerator.num_processes, accelerator.is_main_process)
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    begin = whole_checkpoint(folder)
    if begin:
        accelerator.load_state(f"{folder}/{begin}")
    inputs, targets = data().tensors  # type: ignore[attr-defined]
    for step in range(begin, steps):
        call.ping()
        rows = slice(4 * (step % 8), 4 * (step % 8) + 4)
        accelerator.backward(torch.nn.functional.mse_loss(net(inputs[rows]), targets[rows]))
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 4 == 0:
            accelerator.save_state(f"{folder}/{step + 1}")
            is_whole(folder, step + 1)
    return weights(accelerator.unwrap_model(net))


@inprocess.Wrapper()
def compiled(steps: int, call: inprocess.CallWrapper = None) -> Any:  # type: ignore[assignment]
    """Rank and world size are constants of the compiled code."""
    dist.init_process_group("gloo")
    for _ in range(steps):
        call.ping()
        value = _of_this_rank(torch.ones(1)).tolist()
        here("belief", believed=value, true=[float(dist.get_rank()), float(dist.get_world_size())])
        dist.barrier()
    return value


@torch.compile(backend="eager")
def _of_this_rank(ones: torch.Tensor) -> torch.Tensor:
    return torch.cat([ones * dist.get_rank(), ones * dist.get_world_size()])


@inprocess.Wrapper()
def checkpoint_process(steps: int, folder: str, call: inprocess.CallWrapper = None) -> Any:  # type: ignore[assignment]
    """Saved asynchronously, in torch's own process."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    dist.init_process_group("gloo")
    saved = []
    for step in range(steps):
        call.ping()
        name = f"{folder}/{dist.get_world_size()}-{step}"
        future = checkpoint.async_save(
            {"step": torch.tensor(step)}, checkpoint_id=name, async_checkpointer_type=AsyncCheckpointerType.PROCESS
        )
        here("saving")
        future.result()
        saved.append(os.path.exists(f"{name}/.metadata"))
        dist.barrier()
    return saved


@inprocess.Wrapper()
def megatron_groups(steps: int, call: inprocess.CallWrapper = None) -> Any:  # type: ignore[assignment]
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    assert not parallel_state.is_initialized()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    tell(rank, size, rank == 0)
    for _ in range(steps):
        call.ping()
        total = torch.ones(1)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        here("belief", believed=[total.item()], true=[float(os.environ["WORLD_SIZE"])])
    return size


def in_transformers(inner: torch.nn.Module) -> Any:
    """A language model is not needed for a Trainer: this one has the model of the others."""
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import SequenceClassifierOutput

    class Net(PreTrainedModel):  # type: ignore[misc]
        config_class = PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.net = inner
            self.post_init()

        def _init_weights(self, module: Any) -> None: ...

        def forward(self, inputs: Any, labels: Any) -> Any:
            out = self.net(inputs)
            here("forward")
            return SequenceClassifierOutput(loss=torch.nn.functional.mse_loss(out, labels), logits=out)

    return Net(PretrainedConfig())


@inprocess.Wrapper()
def transformers_trainer(steps: int, folder: str, workers: int = 0) -> Any:
    from transformers import Trainer, TrainingArguments

    from inprocess.integrations.transformers import RestartCallback, last_complete_checkpoint

    rows = [{"inputs": inputs, "labels": labels} for inputs, labels in data()]
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        save_steps=4,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=8,
        learning_rate=0.05,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        remove_unused_columns=False,
        dataloader_num_workers=workers,
    )
    tell(arguments.process_index, arguments.world_size, arguments.process_index == 0)
    tell(arguments.process_index, arguments.world_size, arguments.should_log)  # asks the local process

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return Ordered(len(rows))

    found = InOrder(in_transformers(model()), arguments, train_dataset=rows, eval_dataset=rows[:8])
    found.add_callback(RestartCallback())
    latest = last_complete_checkpoint(folder)
    here("resume", step=0 if latest is None else int(latest.rpartition("-")[2]))
    found.train(resume_from_checkpoint=latest)
    assert found.accelerator.num_processes == dist.get_world_size()
    return weights(found.model.net)


@inprocess.Wrapper()
def lightning_fit(steps: int, folder: str, workers: int = 0, call: inprocess.CallWrapper = None) -> Any:  # type: ignore[assignment]
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.utilities import rank_zero_only

    from inprocess.integrations.lightning import RestartCallback, RestartDDPStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, index: int) -> Any:
            inputs, targets = batch
            loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
            here("forward")
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            here("validation")

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            here("saving")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    # at the end of an epoch: with a DataLoader of torch's Lightning does not go on where it was inside one
    save = ModelCheckpoint(folder, save_last=True, save_on_train_epoch_end=True)
    fit = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=RestartDDPStrategy(process_group_backend="gloo"),
        callbacks=[save, RestartCallback()],
        max_steps=steps,
        val_check_interval=2,
        limit_val_batches=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    tell(fit.global_rank, fit.world_size, fit.is_global_zero)
    tell(rank_zero_only.rank, fit.world_size, rank_zero_only.rank == 0)
    tell(fit.global_rank, fit.world_size, fit.local_rank == 0)
    of_all = [torch.utils.data.DataLoader(data(), batch_size=4, sampler=Ordered(64), num_workers=workers) for _ in "ab"]
    module = Module()
    last = f"{folder}/last.ckpt"
    fit.fit(module, *of_all, ckpt_path=last if os.path.exists(last) else None)
    assert fit.train_dataloader.sampler.num_replicas == dist.get_world_size()
    return weights(module.net)


@inprocess.Wrapper()
def mesh_training(steps: int, folder: str, kind: str, call: inprocess.CallWrapper = None) -> Any:  # type: ignore[assignment]
    """FSDP2 with tensor parallelism, with the sequence shared out besides, or tensor with pipeline parallelism; two of
    each; checkpoints by torch."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    outer = {"FSDP2 and TP": "data", "CP and TP": "context", "TP and PP": "pipeline"}[kind]
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=(outer, "tensor"))
    train_step, net = {"data": _sharded, "context": _shared_sequence, "pipeline": _pipelined}[outer](mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    whole = sorted(int(path.parent.name) for path in pathlib.Path(folder).glob("*/.metadata"))
    step = whole[-1] if whole else 0
    stage = mesh[outer].get_local_rank() if outer == "pipeline" else 0

    def state() -> Any:
        weights, rest = get_state_dict(net, optimizer)
        return {f"model {stage}": weights, f"optimizer {stage}": rest}  # each stage has names of its own

    if step:
        found = state()
        checkpoint.load(found, checkpoint_id=f"{folder}/{step}")
        weights, rest = found[f"model {stage}"], found[f"optimizer {stage}"]
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=rest)
    here("resume", step=step)
    while step < steps:
        call.ping()
        optimizer.zero_grad()
        train_step(torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(step)))
        optimizer.step()
        step += 1
        if step % 4 == 0:
            here("saving")
            if step % 8:
                checkpoint.save(state(), checkpoint_id=f"{folder}/{step}")
            else:
                checkpoint.async_save(state(), checkpoint_id=f"{folder}/{step}").result()
    return [_whole(value) for value in net.state_dict().values()]


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()


def _stack() -> torch.nn.Sequential:
    torch.manual_seed(0)
    stages = [
        torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, FEATURES)) for _ in "ab"
    ]
    return torch.nn.Sequential(*stages)


def _split(stage: torch.nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(stage, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _sharded(mesh: Any) -> tuple[Any, torch.nn.Module]:
    from torch.distributed.fsdp import fully_shard

    net = _stack()
    for stage in net:
        _split(stage, mesh["tensor"])
        fully_shard(stage, mesh=mesh["data"])
    fully_shard(net, mesh=mesh["data"])

    def train_step(x: torch.Tensor) -> None:
        loss = (net(x) - x.sin()).square().mean()
        here("backward")
        loss.backward()

    return train_step, net


class _Attention(torch.nn.Module):
    """Of a part of the sequence to all of it. torch's own context parallelism has kernels for GPUs alone."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.into, self.out = torch.nn.Linear(FEATURES, 3 * FEATURES), torch.nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_gather_tensor_autograd as gathered

        query, key, value = self.into(x).chunk(3, dim=-1)
        keys, values = (gathered(part.contiguous(), 0, self.group) for part in (key, value))
        here("forward")
        return x + self.out(torch.nn.functional.scaled_dot_product_attention(query, keys, values))


def _shared_sequence(mesh: Any) -> tuple[Any, torch.nn.Module]:
    """The ranks that share a sequence share the weights, too, as torchtitan does it."""
    from torch.distributed.fsdp import fully_shard

    group, place = mesh["context"].get_group(), mesh["context"].get_local_rank()
    net = torch.nn.Sequential()
    for stage in _stack():
        _split(stage, mesh["tensor"])
        net.append(torch.nn.Sequential(_Attention(group), stage))
    for stage in net:
        fully_shard(stage, mesh=mesh["context"])
    fully_shard(net, mesh=mesh["context"])

    def train_step(x: torch.Tensor) -> None:
        part = x.chunk(2)[place]
        loss = (net(part) - part.sin()).square().mean()
        here("backward")
        loss.backward()

    return train_step, net


def _pipelined(mesh: Any) -> tuple[Any, torch.nn.Module]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    place = mesh["pipeline"].get_local_rank()
    net = _stack()[place]
    _split(net, mesh["tensor"])
    stage = PipelineStage(net, place, 2, torch.device("cpu"), group=mesh["pipeline"].get_group())

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        here("backward")
        return (out - target).square().mean()

    schedule = ScheduleGPipe(stage, 2, loss_fn=loss)

    def train_step(x: torch.Tensor) -> None:
        if place == 0:
            here("backward")
            schedule.step(x)
        else:
            schedule.step(target=x.sin())

    return train_step, net
