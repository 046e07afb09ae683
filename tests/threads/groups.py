"""A world of one rank, and the end of what aborted groups leave to threads of their own."""

from __future__ import annotations

import datetime
import threading

import torch.distributed as dist

from inprocess.collectives.background import FREEING

#: ranks of Gloo in this process
Groups = list[dist.ProcessGroupGloo]


def connected() -> Groups:
    """Two ranks that are connected to each other."""
    store = dist.HashStore()
    made: dict[int, dist.ProcessGroupGloo] = {}

    def make(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=60))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made.pop(0), made.pop(1)]


def init() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def settle() -> None:
    """Steps of an abort and the ends of groups, which threads of their own take."""
    for thread in threading.enumerate():
        if thread.name in (FREEING, "inprocess-abort"):
            thread.join()


def end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    settle()
