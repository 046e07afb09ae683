"""A DataLoader starts its workers before it notes them: an interruption just then would leave them to nobody."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, dataloader

from inprocess.call_wrapper import Controls
from inprocess.testing import leaks
from tests.harness import When
from tests.harness.child import Context
from tests.harness.launch import PATIENT

from . import targets

#: one restart for each line at which the constructor is interrupted: it runs 80 for two workers
LINES = range(2, 78, 4)
CONSTRUCTOR: Any = dataloader._MultiProcessingDataLoaderIter.__init__


def run(context: Context) -> Any:
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        return context.wrap(_body)()
    finally:
        signal.signal(signal.SIGCHLD, handler)  # torch's own, which stays


def _body(context: Context, call: Any) -> int:
    children = leaks.children_of(os.getpid())  # the monitor, and no worker
    context.emit("held", children=len(children), descriptors=len(os.listdir("/proc/self/fd")))
    if call.iteration == len(LINES):
        return call.iteration
    if context.rank == 1:
        context.wait_for(When(f"constructs {call.iteration}", 1))
        raise ValueError("while rank 0 makes a DataLoader's iterator")
    sys.settrace(_Strike(context, call).enter)
    try:
        for _ in DataLoader(range(64), num_workers=2, multiprocessing_context="fork"):  # type: ignore[arg-type]
            pass
    finally:
        sys.settrace(None)
    return targets.faults.spin()


class _Strike:
    """Stops the constructor at one of its lines until the interruption has begun, then signals at each line."""

    def __init__(self, context: Context, call: Any) -> None:
        self._context, self._iteration, self._gate = context, call.iteration, Controls(call).gate
        self._lines = 0

    def enter(self, frame: FrameType, event: str, argument: object) -> Any:
        return self.step if frame.f_code is CONSTRUCTOR.__code__ else None

    def step(self, frame: FrameType, event: str, argument: object) -> Any:
        self._lines += event == "line"
        if self._lines == LINES[self._iteration] and not self._gate.interrupting:
            self._context.emit(f"constructs {self._iteration}")
            while not self._gate.interrupting:
                time.sleep(0.001)
        if self._gate.interrupting:
            signal.raise_signal(self._gate._interrupter.signum)
        return self.step


def test_workers_of_a_constructor_that_is_interrupted_end(launch):
    ranks = launch(run, 2, wrapper=PATIENT | {"max_repeats": None}).wait(100)
    assert ranks.values == [len(LINES)] * 2
    held = ranks[0].of("held")
    assert [event["children"] for event in held] == [1] * len(held)
    descriptors = [event["descriptors"] for event in held]
    assert min(descriptors[-5:]) <= max(descriptors[1:6]), descriptors
