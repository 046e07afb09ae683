"""A world of one rank, and the end of what aborted groups leave to threads of their own."""

from __future__ import annotations

import threading

import torch.distributed as dist

from inprocess.collectives.deferred_release import FREEING


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
