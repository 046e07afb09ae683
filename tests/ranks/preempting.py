"""Bodies for ranks that a signal asks to leave: they train until a restart, or for as long as they are let."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from inprocess import LiveState
from inprocess.exception import Preempted
from inprocess.testing.faults import wait_forever
from tests.harness.child import Context
from tests.harness.launch import PATIENT

from .targets import LONG, check_sum, place_in_world, two_active


def options(context: Context) -> dict[str, Any]:
    """The hook reports itself; what the test gives as ``args["options"]`` comes on top."""

    def note(state: Any) -> None:
        context.emit("hook", rank=state.rank, iteration=state.iteration)

    def fail(state: Any) -> None:
        raise ValueError("no time")

    def warm_up(state: Any) -> None:
        context.emit("warming")
        for _ in range(6000):
            time.sleep(0.01)
        context.emit("warm")

    def long(state: Any) -> None:
        context.emit("long hook")
        wait_forever("sleep")

    hooks = {"raises": fail, "slow": warm_up, "long": long}
    given = {
        name: hooks.get(value, value) if isinstance(value, str) else value
        for name, value in context.args.get("options", {}).items()
    }
    return {**PATIENT, "on_preemption": note, "terminate": lambda state: context.emit("terminated"), **given}


def spare_options(context: Context) -> dict[str, Any]:
    return {**two_active(context), **options(context)}


class _Asked(logging.Handler):
    """Reports that the rank has noted a signal; not from the handler, which may strike inside of a report."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    def emit(self, record: logging.LogRecord) -> None:
        if "asks this rank to leave" in record.getMessage():
            self._context.emit("asked")


def run_steady(context: Context) -> Any:
    logger, handler, got = logging.getLogger("inprocess"), _Asked(context), []
    logger.addHandler(handler)
    if context.args.get("handler", False):
        signal.signal(signal.SIGTERM, lambda signum, _: got.append(signum))
    before = signal.getsignal(signal.SIGTERM)
    try:
        return context.wrap(_steady)()
    finally:
        context.emit("after", kept=signal.getsignal(signal.SIGTERM) is before, got=len(got))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        logger.removeHandler(handler)


def run_calls(context: Context) -> Any:
    """Several calls; as the first one completes, some ranks are asked to leave."""

    def asks(state: Any) -> None:
        if context.rank in context.args["asked"] and not done:
            os.kill(os.getpid(), signal.SIGTERM)

    done: list[int] = []
    for number in range(context.args["calls"]):
        context.wrap(_brief, completion=asks)()
        done.append(number)
        context.emit("completed")
    return done


def run_late(context: Context) -> None:
    """The last rank comes when there is a file."""
    if context.rank == 2:
        while not os.path.exists(context.args["go"]):
            time.sleep(0.01)
    else:
        threading.Thread(target=_tell_when_asked_is_heard, args=(context,), daemon=True).start()
    context.wrap(_brief)()
    context.emit("completed")


def _tell_when_asked_is_heard(context: Context) -> None:
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.001)
    context.emit("joins")


def _brief(context: Context, call: Any) -> None:
    _, size = place_in_world()
    dist.init_process_group("gloo", timeout=LONG)
    check_sum(size)
    dist.destroy_process_group()


def _steady(context: Context, call: Any) -> list[int]:
    """Steps until so many iterations were interrupted, one if nothing else is said; then three."""
    rank, size = place_in_world()
    dist.init_process_group("gloo", timeout=LONG)
    step, style = 0, context.args.get("style", "")
    while call.iteration < context.args.get("interruptions", 1) or step < 3:
        context.point(step)
        if style != "silent":
            call.ping()
        check_sum(size)
        time.sleep(0.005)  # stands for the rest of the step
        step += 1
        if step == 3:
            context.emit("steady")
            if call.iteration == 0 and context.rank == context.args.get("odd"):
                _odd(context, call, style)
    dist.destroy_process_group()
    return [call.iteration, rank, size]


def _odd(context: Context, call: Any, style: str) -> None:
    """What one rank does in place of its steps."""
    if style == "stuck":
        wait_forever("lock")
    elif style == "atomic":
        with call.atomic():
            context.emit("atomic_begin")
            while call.leaving is None:
                time.sleep(0.01)
            time.sleep(2.0)  # longer than the others of a host are waited for
            context.emit("atomic_end")
    elif style == "fork":
        child = os.fork()
        if child == 0:
            wait_forever("lock")
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        context.emit("child", signal=os.WTERMSIG(status), asked=call.leaving is not None)
        os.kill(os.getpid(), signal.SIGTERM)
    elif style == "raises":
        while call.leaving is None:
            time.sleep(0.01)
        context.emit("left", seconds=call.leaving.seconds_left)
        raise Preempted(call.leaving.signum)


def run_slow_start(context: Context) -> Any:
    """``initialize`` takes three seconds on one rank, the first time, or it raises there what a rank leaves with."""

    def initialize(state: Any) -> None:
        if state.iteration == 0 and context.rank == context.args["slow"]:
            context.emit("initializing")
            if context.args["raises"]:
                raise Preempted
            for _ in range(300):
                time.sleep(0.01)

    return context.wrap(_train_after, initialize=initialize)()


def _train_after(context: Context, call: Any) -> list[int]:
    rank, size = place_in_world()
    dist.init_process_group("gloo", timeout=LONG)
    while size == 3:
        call.ping()
        check_sum(size)
        time.sleep(0.005)
    check_sum(size)
    dist.destroy_process_group()
    return [call.iteration, rank, size]


def run_learning(context: Context) -> Any:
    """Trains with a LiveState whose checkpoints are due only when all ranks leave."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    live = LiveState(model=model, optim=optim, folder=context.args["folder"], save_every=1000)

    def body(context: Context, call: Any) -> list[int]:
        dist.init_process_group("gloo", timeout=LONG)
        step = live.recover(call)
        context.emit("recovered", step=step, source=live.source)
        ddp = DistributedDataParallel(model)
        while step < context.args["steps"]:
            torch.manual_seed(step)
            loss = ddp(torch.randn(4, 6)).square().sum()
            optim.zero_grad()
            loss.backward()
            with live.commit(step + 1):
                optim.step()
            step += 1
            if step == context.args["report"]:
                context.emit("steady")
            if context.args["pause"]:
                time.sleep(context.args["pause"])
        live.wait()
        value = float(sum(parameter.double().abs().sum() for parameter in model.parameters()))
        dist.destroy_process_group()
        return [step, value]

    try:
        return context.wrap(body)()
    finally:
        context.emit("at", step=live.step)
