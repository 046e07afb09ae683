"""inject_fault inside the wrapper: real ranks whose sums are wrong if a collective is ever paired with another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from inprocess.tools.inject_fault import Fault
from tests.harness.child import Context
from tests.harness.launch import HASTY, KILLING

from . import checks, targets
from .test_hangs import KILLED


def run_injected(context: Context) -> Any:
    return context.wrap(injected)()


def injected(context: Context, call: Any) -> list[int]:
    """Each step is a forward and an all-reduce; the victim's fault strikes in the first iteration, before step 1."""
    rank, size = targets.place_in_world()
    dist.init_process_group("gloo", timeout=targets.LONG)
    model = torch.nn.Linear(2, 2)
    for step in range(3):
        if (step, call.iteration, context.rank) == (1, 0, context.args["victim"]):
            targets.strike(Fault(context.args["fault"]))
        model(torch.ones(2))
        targets.check_sum(size)
    dist.destroy_process_group()
    return [call.iteration, rank, size]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    "fault", [Fault.STUCK_COLLECTIVE, Fault.WORKLOAD_EXC, Fault.ASYNC_EXC], ids=lambda it: it.value
)
def test_all_go_on(launch, fault, victim):
    args = {"fault": fault.value, "victim": victim}
    checks.went_on(launch(run_injected, 2, args=args, wrapper=HASTY).wait())


def test_a_stopped_process_is_killed_and_only_it(launch):
    args = {"fault": Fault.SIGSTOP.value, "victim": 1}
    ranks = launch(run_injected, 3, args=args, wrapper=KILLING).wait()
    assert ranks[1].exitcode in KILLED
    checks.went_on(ranks, without=[1])
