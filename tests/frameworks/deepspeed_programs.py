"""Training programs with DeepSpeed, as in `programs`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import inprocess
from inprocess.testing import here

from .programs import data, is_whole, model, tell, weights, whole_checkpoint


@inprocess.Wrapper()
def deepspeed_loop(steps: int, stage: int = 0, folder: str = "", call: inprocess.CallWrapper = None) -> Any:  # type: ignore[assignment]
    """``stage``: of ZeRO: 1 divides the optimizer's state, 2 the gradients, too, 3 also the weights; ``folder``: of
    checkpoints, every four steps."""
    import deepspeed
    from deepspeed.runtime.zero import parameter_offload

    here("belief", believed=len(parameter_offload.FWD_MODULE_STACK), true=0)
    deepspeed.init_distributed("gloo", verbose=False)
    tell(deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), deepspeed.comm.get_rank() == 0)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}}  # its own is compiled
    config["zero_force_ds_cpu_optimizer"] = False
    net = model()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    inputs, targets = data().tensors  # type: ignore[attr-defined]
    begin = whole_checkpoint(folder) if folder else 0
    if begin:
        engine.load_checkpoint(folder, tag=str(begin))
    for step in range(begin, steps):
        call.ping()
        rows = slice(4 * (step % 8), 4 * (step % 8) + 4)
        loss = torch.nn.functional.mse_loss(engine(inputs[rows]), targets[rows])
        here("backward")
        engine.backward(loss)
        engine.step()
        if folder and (step + 1) % 4 == 0:
            engine.save_checkpoint(folder, tag=str(step + 1), save_latest=False)
            is_whole(folder, step + 1)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return weights(engine.module)


def deepspeed_checkpoints(steps: int, folder: str, stage: int) -> Any:
    return deepspeed_loop(steps, stage, folder)


def deepspeed_zero_1(steps: int) -> Any:
    return deepspeed_loop(steps, stage=1)


def deepspeed_zero_2(steps: int) -> Any:
    return deepspeed_loop(steps, stage=2)


def deepspeed_zero_3(steps: int) -> Any:
    return deepspeed_loop(steps, stage=3)


class _ModelParallel:
    """What DeepSpeed asks of a program that has model parallelism; here all ranks share a model."""

    get_model_parallel_rank = get_data_parallel_rank = staticmethod(dist.get_rank)
    get_model_parallel_world_size = get_data_parallel_world_size = staticmethod(dist.get_world_size)
    get_model_parallel_group = get_data_parallel_group = staticmethod(lambda: dist.group.WORLD)


@inprocess.Wrapper()
def deepspeed_activations(steps: int, call: inprocess.CallWrapper = None) -> Any:  # type: ignore[assignment]
    """Each rank keeps its share of an activation, and the backward pass gathers them."""
    import deepspeed
    from deepspeed.runtime.activation_checkpointing import checkpointing

    here("belief", believed=[checkpointing.mpu, checkpointing.mp_group, checkpointing.mp_size], true=[None, None, 1])
    deepspeed.init_distributed("gloo", verbose=False)
    checkpointing.configure(_ModelParallel(), partition_activations=True)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    inputs, targets = (rows[:6] for rows in data().tensors)  # type: ignore[attr-defined]
    for _ in range(steps):
        call.ping()
        loss = torch.nn.functional.mse_loss(checkpointing.checkpoint(net[1:], net[0](inputs)), targets)
        here("backward")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(net)
