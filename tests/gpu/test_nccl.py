"""NCCL on one GPU: two ranks that NCCL takes for two hosts restart after an exception and after a kill."""

from __future__ import annotations

import signal

import pytest
import torch
import torch.distributed as dist

from tests.harness import At, Kill, Raise
from tests.ranks import checks, targets

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL"),
]
#: a host id of its own for each rank lets two ranks share one GPU, over sockets on loopback
TWO_HOSTS = {"NCCL_HOSTID": "host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "LOCAL_RANK": "0"}


def start(launch, faults):
    return launch(targets.run_nccl, 2, faults=faults, env=TWO_HOSTS).wait(110)


def test_restart_after_an_exception(launch):
    checks.went_on(start(launch, {At(1, step=1): Raise()}))


def test_restart_after_a_kill(launch):
    ranks = start(launch, {At(1, step=1): Kill()})
    checks.died(ranks, {1: -signal.SIGKILL})
    checks.went_on(ranks, without=[1])


def test_peers_in_an_all_reduce_are_released(launch):
    """Rank 0 waits on the GPU for rank 1, which raised instead of joining."""
    checks.went_on(start(launch, {At(1, step="skip"): Raise()}))
