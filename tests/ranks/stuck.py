"""Bodies that train with a checkpoint at each step, on a disk that does not answer for a while."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from inprocess import LiveState
from inprocess.live import patience
from tests.harness.child import Context
from tests.harness.launch import HASTY
from tests.harness.stuck import Stuck, install

from .targets import LONG

#: how long the disk hangs, and a step takes (seconds): a hang of a rank would be noticed in between
HANGS, STEP = 2.0 * HASTY["soft_timeout"], 0.005
#: the step after which it hangs
LAST = 3


class Training:
    """Of one rank."""

    def __init__(self, context: Context) -> None:
        install()
        self.context = context
        self.model = torch.nn.Module()
        self.model.value = torch.nn.Parameter(torch.zeros(()), requires_grad=False)
        self.live = LiveState(model=self.model, folder=f"stuck://{context.args['folder']}", save_every=1, keep=2)

    @property
    def saved(self) -> int:
        """The newest step that is."""
        assert self.live._saving.disk is not None
        return self.live._saving.disk.newest

    def step(self, call: Any, step: int) -> int:
        call.ping()
        time.sleep(STEP)
        with self.live.commit(step + 1):
            self.model.value += 1
        return step + 1

    def all_agree(self, over: bool) -> bool:
        votes = torch.tensor(int(over))
        dist.all_reduce(votes, op=dist.ReduceOp.MIN)
        return bool(votes)


def run_until_it_is_back(context: Context) -> Any:
    """One rank's disk hangs for longer than the soft timeout. Returns iteration, last step, newest checkpoint."""
    training = Training(context)

    def learn(context: Context, call: Any) -> list[int]:
        dist.init_process_group("gloo", timeout=LONG)
        step, back = training.live.recover(call), 0
        while step < LAST:
            step = training.step(call, step)
        training.live.wait()
        begin = time.monotonic()
        if context.rank == context.args["victim"]:
            Stuck.hang()
        while not training.all_agree(bool(back) and training.saved > back):
            step = training.step(call, step)
            if not back and training.all_agree(time.monotonic() - begin > HANGS):
                Stuck.come_back()
                back = step
        training.live.wait()
        dist.destroy_process_group()
        return [call.iteration, step, training.saved]

    return context.wrap(learn)()


def run_to_the_end(context: Context) -> Any:
    """The disk hangs, and the training ends without it."""
    training = Training(context)

    def learn(context: Context, call: Any) -> list[int]:
        dist.init_process_group("gloo", timeout=LONG)
        step = training.live.recover(call)
        while step < LAST:
            step = training.step(call, step)
        training.live.wait()
        if context.rank == context.args["victim"]:
            Stuck.hang()
        while step < 2 * LAST:
            step = training.step(call, step)
        training.live.wait(timeout=1.0)
        dist.destroy_process_group()
        return [call.iteration, step, training.saved]

    found = context.wrap(learn)()
    context.emit("ended beside it", busy=not training.live._saving.disk.writer.ended(0))
    Stuck.come_back()
    assert training.live._saving.disk.writer.ended(60)
    return found


def run_recover(context: Context) -> Any:
    """The disk hangs when there is nothing but the disk. Returns iteration, step and source."""
    training = Training(context)
    patience.SAID_EVERY = 1.0

    def learn(context: Context, call: Any) -> list[Any]:
        dist.init_process_group("gloo", timeout=LONG)
        timer = threading.Timer(HANGS, Stuck.come_back)
        if context.rank == context.args["victim"]:
            Stuck.hang()
            timer.start()
        step = training.live.recover(call)
        training.live.wait()
        dist.destroy_process_group()
        return [call.iteration, step, training.live.source]

    return context.wrap(learn)()
