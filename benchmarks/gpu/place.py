"""Where ranks run: GPUs, of which several ranks may share one, or the CPU for trying the benchmarks without any."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

#: NCCL refuses two ranks on one GPU of one host; with a host id of its own each is a host, and they talk over sockets
#: (plugins for other networks, and NVLink between "hosts", are out)
SHARED = {
    "NCCL_HOSTID": "host{rank}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_MNNVL_ENABLE": "0",
    "LOCAL_RANK": "0",
}
#: for the process that ranks are forked from: asking for GPUs must not begin CUDA in it
WITHOUT_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass(frozen=True)
class Place:
    """A kind of device, and how many of them there are."""

    #: "cuda" or "cpu"
    kind: str
    #: GPUs; with fewer than ranks, all ranks share the first one
    count: int = 0

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def backend(self) -> str:
        return "nccl" if self.is_cuda else "gloo"

    def environment(self, rank: int, world_size: int) -> dict[str, str]:
        """What a rank needs beside RANK and the other usual variables."""
        if not self.is_cuda:
            return {}
        if world_size > self.count:
            return {name: value.format(rank=rank) for name, value in SHARED.items()}
        return {"LOCAL_RANK": str(rank)}

    def enter(self, rank: int, world_size: int) -> torch.device:
        """In a rank, first of all: its device, with a CUDA context where it is a GPU."""
        os.dup2(2, 1)  # what NCCL and kernels print is no result
        os.environ.update(self.environment(rank, world_size))
        for name in WITHOUT_CUDA:
            os.environ.pop(name, None)
        torch.set_num_threads(1)
        if not self.is_cuda:
            return torch.device("cpu")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.ones(1, device=device).sum().item()
        return device

    def synchronize(self) -> None:
        """Until the device has done what it was given."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def init_process_group(self, store: str = "") -> None:
        """As a program does it; ``store``: a new file through which the ranks find each other, without a launcher."""
        if not store:
            dist.init_process_group(self.backend)
            return
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        found = dist.FileStore(store, world_size)  # type: ignore[attr-defined]
        dist.init_process_group(self.backend, store=found, rank=rank, world_size=world_size)
