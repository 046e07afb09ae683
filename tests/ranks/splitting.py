"""A function that splits its default group, as a DeviceMesh does where the group is bound to a device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.harness.child import Context

from . import targets


def run(context: Context) -> Any:
    return context.wrap(_body)()


def _body(context: Context, call: Any) -> Any:
    _, size = targets.place_in_world()
    dist.init_process_group("gloo", timeout=targets.LONG)
    default = dist.group.WORLD
    assert default is not None
    # torch's own function wants a group that is bound to an accelerator
    part: Any = default.split_group(list(range(size)), None, None, "part", "")  # type: ignore[attr-defined]
    value = torch.ones(1)
    part.allreduce([value]).wait()
    context.point("fault")
    dist.destroy_process_group()
    return [call.iteration, int(value)]
