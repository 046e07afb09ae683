"""A restart, the begin of a call and its end in a process with a million objects: nothing looks at them."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests import growth
from tests.harness.child import Context

OBJECTS = 1_000_000
RESTARTS = 3
#: what takes longer, the more objects there are; to freeze and to thaw them does not
SEARCHES = ("get_objects", "get_referrers")


class Watch:
    """Notes searches of the heap, and full collections of one that is not frozen, but for those of the function."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.inside = False

    def searched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def search(*args: Any) -> Any:
            self.found.append(name)
            return original(*args)

        return search

    def collected(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "stop" and info["generation"] == 2 and not self.inside and gc.get_freeze_count() < OBJECTS:
            self.found.append("a full collection")

    @contextmanager
    def over(self) -> Iterator[None]:
        gc.callbacks.append(self.collected)
        with mock.patch.multiple(gc, **{name: self.searched(name, getattr(gc, name)) for name in SEARCHES}):
            yield
        gc.callbacks.remove(self.collected)


def run(context: Context) -> list[str]:
    """Answers what was noted from before the call until after it."""
    heap = [[number] for number in range(OBJECTS)]
    watch, body = Watch(), BODIES[context.args["kind"]]

    def function(context: Context, call: Any) -> None:
        watch.inside = True
        try:
            dist.init_process_group("gloo")
            body(raises=call.iteration < RESTARTS and call.iteration % dist.get_world_size() == dist.get_rank())
            if call.iteration < RESTARTS:
                dist.all_reduce(torch.ones(1))  # without the one that raised
            dist.destroy_process_group()
        finally:
            watch.inside = False

    gc.unfreeze()  # the server that forks ranks has frozen what it imported; a user's program has not
    gc.collect()
    call = context.wrap(function, max_repeats=None)
    with watch.over():
        call()
    assert len(heap) == OBJECTS
    return watch.found


def _ddp(raises: bool) -> None:
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    model(torch.ones(4, 8)).sum().backward()
    if raises:
        raise ValueError("a fault")


BODIES: dict[str, Callable[..., None]] = {"ddp": _ddp, "sharded": growth._sharded}


@pytest.mark.parametrize("kind", BODIES)
def test_nothing_looks_at_all_objects(launch: Any, kind: str) -> None:
    ranks = launch(run, 2, args={"kind": kind}).wait()
    assert ranks.values == [[], []]


def import_inside(context: Context) -> list[bool]:
    """Whether torch's default argument stands for the default group of the moment, in each iteration."""
    seen: list[bool] = []

    def function(context: Context, call: Any) -> None:
        dist.init_process_group("gloo")
        if not call.iteration:
            sys.modules.pop("torch.distributed.nn.functional", None)
        functional = importlib.import_module("torch.distributed.nn.functional")
        seen.append(functional.all_reduce.__defaults__[-1] is None)
        functional.all_reduce(torch.ones(1))
        if call.iteration < 2 and dist.get_rank() == 0:
            raise ValueError("a fault")
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()

    context.wrap(function, max_repeats=None)()
    return seen


def test_torchs_default_arguments_let_go_of_the_first_group(launch: Any) -> None:
    """A module of torch's that is imported inside the function has the group of the moment in its default arguments."""
    ranks = launch(import_inside, 2).wait()
    assert ranks.values == [[False, True, True]] * 2
