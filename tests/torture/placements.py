"""Has the interruption come at every single instruction of a window, one after the other; nothing is left to chance.

`sys.settrace` stops the main thread before each instruction of ``Gate.run`` and of all that it calls. At the chosen one
the asker, a real thread, begins to close, park and interrupt; its signals are caught on their way, and the handler is
called as Python would call it, with the frame that it interrupts. Python itself looks for signals at some of these
places only, and at other ones in each version; never before `RERAISE` (from 3.11 on), so that one is left out.

Whether the handler may raise there is said by `expected`, which knows nothing of how the handler finds out.
"""

from __future__ import annotations

import dis
import os
import random
import sys
import threading
import time
from types import FrameType
from typing import Any

from inprocess import interrupt
from inprocess.call_wrapper import CallWrapper, Controls, _Atomic
from inprocess.exception import RankShouldRestart
from inprocess.interrupt.frames import call
from inprocess.interrupt.gate import Outcome
from inprocess.interrupt.signals import Interrupter
from inprocess.monitor.board import Board

from .engine import BOUND, Lost, judge, left_as_it_was
from .run import Run
from .shapes import Shape

RERAISE = dis.opmap["RERAISE"]
#: the room whose lines are not interrupted, and those of the call's sections
OURS = os.path.dirname(interrupt.__file__) + os.sep
SECTION = (_Atomic.__enter__.__code__, _Atomic.__exit__.__code__)
#: the standard library's files of weak references
WEAK = ("weakref.py", "_weakrefset.py")
#: an asker that does not come to its next step within this many seconds is stuck
STUCK = BOUND
#: seconds; an interruption that the function swallows, or a destructor, comes again by a real signal
RETRY_AFTER = 0.02


def expected(frame: FrameType) -> bool:
    """Whether the function may be left at this frame: it is the user's, and nothing of ours waits below for its end."""
    here: FrameType | None = frame
    while here is not None and here.f_code is not call.__code__:
        ours = here.f_code.co_filename.startswith(OURS) or here.f_code in SECTION
        # below something of the program's own the handler only waits for a handler that was there before it
        if ours and (here is frame or here.f_code is not Interrupter._handle.__code__):
            return False
        here = here.f_back
    return here is not None


def may_wait(frame: FrameType) -> bool:
    """Whether it may be raised later, since Python would drop it: in a destructor, or what follows a weak reference."""
    here: FrameType | None = frame
    while here is not None and here.f_code is not call.__code__:
        if here.f_code.co_name == "__del__" or os.path.basename(here.f_code.co_filename) in WEAK:
            return True
        here = here.f_back
    return False


class Placement(threading.Thread):
    """One window whose interruption comes before the instruction with that number. Use once: `play`."""

    def __init__(self, interrupter: Interrupter, board: Board, shape: Shape, number: int, park: bool) -> None:
        super().__init__(name="asker", daemon=True)
        self._interrupter, self._shape, self._number, self._park = interrupter, shape, number, park
        self._gate = interrupter.new_gate()
        self._call = CallWrapper(board, lambda: None)
        Controls(self._call).gate = self._gate
        self._run = Run(self._gate, random.Random(number), 1, self._call)
        self._run.tail = 1
        self._go, self._posted = threading.Event(), threading.Event()
        self._tracing = False
        #: instructions so far; what went wrong; whether it was raised
        self.seen, self.problem = 0, ""
        self.raised = False

    def run(self) -> None:
        self._go.wait()
        self._gate.close_for_abort()
        if self._park:
            with self._gate.parked():
                time.sleep(0)
        self._gate.interrupt_until_left(retry_after=RETRY_AFTER)

    def play(self) -> str:
        """What went wrong, in words."""
        send = self._interrupter.send
        self._interrupter.send = self._post(send)  # type: ignore[method-assign]
        self.start()
        try:
            outcome = self._play()
        finally:
            self._interrupter.send = send  # type: ignore[method-assign]
            self._go.set()
            self.join(STUCK)
        for undo in reversed(self._run.after):
            undo()
        return self.problem or self._judge(outcome)

    def _post(self, send: Any) -> Any:
        def post(again: bool) -> None:
            self._posted.set()
            if not self._tracing:  # Python stops tracing where the trace function raises
                send(again)

        return post

    def _play(self) -> Outcome:
        trace = sys.gettrace()
        self._tracing = True
        sys.settrace(self._trace)
        try:
            return self._gate.run(_function(self._shape), (self._run,))
        finally:
            sys.settrace(trace)
            self._tracing = False

    def _judge(self, outcome: Outcome) -> str:
        if self.is_alive():
            return "interrupt_until_left() goes on"
        if sys.exc_info()[1] is not None:
            return f"{sys.exc_info()[1]!r} is still being handled, says Python"
        wrong = judge(self._shape, self._run, outcome)
        return wrong or left_as_it_was(self._run, self._call, self._interrupter)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] != RERAISE:
            self.seen += 1
            if self.seen > self._number:
                self._strike(frame)
        return self._trace

    def _strike(self, frame: FrameType) -> None:
        self._go.set()
        if not self._waits_for_signal():
            return
        try:
            self._interrupter._handle(self._interrupter.signum, frame)
        except RankShouldRestart:
            self.raised, self._tracing = True, False
            if not expected(frame):
                self.problem = f"raised at instruction {self.seen}, {_place(frame)}"
            raise
        if self._gate._armed and expected(frame) and not may_wait(frame):
            self.problem = f"not raised at instruction {self.seen}, {_place(frame)}"

    def _waits_for_signal(self) -> bool:
        """Let the asker come as far as it can; whether it has sent its signal by then."""
        end = time.monotonic() + STUCK
        while not self._posted.is_set():
            in_section = self._gate.atomic.closed and self._gate.atomic._lock._is_owned()  # type: ignore[attr-defined]
            if in_section or self._gate.left.is_set():
                return False  # it waits for the end of the section, or has nothing to send any more
            if time.monotonic() > end:
                raise Lost(f"the asker is stuck before instruction {self.seen}")
            time.sleep(0)
        return True


def _function(shape: Shape) -> Any:
    def function(run: Run) -> Run:
        run.entered = True
        return shape.function(run)

    return function


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def everywhere(shape: Shape) -> int:
    """Play each placement there is. Returns how many; raises Lost for those that went wrong."""
    interrupter, board, wrong = Interrupter(), Board.create(), list[str]()
    interrupter.install()
    number = 0
    try:
        while True:
            placement = Placement(interrupter, board, shape, number, park=number % 2 == 1)
            problem = placement.play()
            if problem:
                wrong.append(f"{shape.name}, instruction {number}: {problem}")
            if placement.seen <= number:  # the function is over before
                break
            number += 1
    finally:
        interrupter.restore()
        board.close()
    if wrong:
        raise Lost("\n".join(wrong[:20]))
    return number
