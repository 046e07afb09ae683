"""FSDP2 and tensor parallelism on a mesh of four ranks, with torch.distributed.checkpoint; goes on after a fault.

inprocess run --nproc-per-node 4 examples/fsdp2_tp.py FOLDER
"""

import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import inprocess

STEPS, SAVE_EVERY = 60, 10


def build(mesh):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def latest(folder):
    """The newest checkpoint that is whole: its metadata is written last."""
    whole = sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))
    return whole[-1] if whole else 0


def state_of(model, optimizer):
    weights, rest = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": rest}


def load(folder, step, model, optimizer):
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder / str(step))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@inprocess.Wrapper()
def train(folder: pathlib.Path, call: inprocess.CallWrapper = None) -> float:
    dist.init_process_group("gloo")
    tensor = 2  # ranks that share a layer; the others share the data, also where some of them are gone
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("data", "tensor"))
    model, optimizer = build(mesh)
    step = latest(folder)
    if step:
        load(folder, step, model, optimizer)
    while step < STEPS:
        call.ping()
        if step == 35 and call.iteration == 0 and dist.get_rank() == 1:
            raise RuntimeError("a fault, once")
        seed = step * 1000 + mesh["data"].get_local_rank()
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))
        loss = (model(x) - x.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % SAVE_EVERY == 0:
            dcp.save(state_of(model, optimizer), checkpoint_id=folder / str(step))
    dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("give a folder for checkpoints that all ranks share")
    loss = train(pathlib.Path(sys.argv[1]))
    if loss is not None:  # None: this process joined when the others had finished
        print(f"loss {loss:.4f}", flush=True)
