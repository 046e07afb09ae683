"""Opens and closes windows, interrupts them from another thread, and judges each.

Two ways of interrupting. *Aimed*: the function itself says when, so that its interruption is under way for sure; every
shape, each moment. *Storms*: cheap functions one after the other as fast as they go, while the asker interrupts
whichever runs, at moments that nobody chose. Both ask in the way of the MonitorThread: close, park, interrupt until
left.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import gc
import logging
import queue
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from inprocess.call_wrapper import CallWrapper, Controls
from inprocess.exception import RankShouldRestart
from inprocess.interrupt.gate import Gate, Interrupted, Outcome, Raised, Returned
from inprocess.interrupt.signals import Interrupter
from inprocess.monitor.board import Board
from inprocess.system.interpreter import interpreter

from . import shapes
from .run import Order, Run
from .shapes import SHAPES, Shape

#: seconds; an interruption that takes longer is lost
BOUND = 30.0
#: windows in one batch, during which the surroundings stay the same, and seconds that it takes at most
STORM, AIMED, LONGEST = 20_000, 200, 2.0


class Lost(AssertionError):
    """The torture has found something; the text says what and in which window."""


class Moment(enum.Enum):
    """When the interruption of a window is asked for."""

    NEVER = "never"
    BEFORE = "before it is entered"
    ENTRY = "as it is entered"
    INSIDE = "inside"
    LEAVING = "as it returns"
    AFTER = "after it was left"


class Asker(threading.Thread):
    """Plays the MonitorThread: carries out orders, or strikes at whatever window is open."""

    def __init__(self) -> None:
        super().__init__(name="asker", daemon=True)
        self.orders: SimpleQueue[Order | None] = SimpleQueue()
        self.answers: SimpleQueue[None] = SimpleQueue()
        #: a storm goes on; set by the main thread
        self.striking = False
        self.current: Run | None = None
        self.parked = self.carried_out = 0
        self.problems: list[str] = []
        self._main = threading.main_thread().ident

    def run(self) -> None:
        while (order := self.orders.get()) is not None:
            self._carry_out(order, self.current)
            self.answers.put(None)

    def storm(self, interrupter: Interrupter, chance: random.Random) -> threading.Thread:
        """Strike until `striking` is unset; in a thread of its own."""

        def strike() -> None:
            while self.striking:
                gate = interrupter._gate
                if gate is None or gate.atomic.closed:
                    time.sleep(0)
                    continue
                shapes.spin(chance.randrange(100))
                park = chance.choice((None, 0.0, 0.0))
                self._carry_out(Order(gate, park=park), None)

        thread = threading.Thread(target=strike, name="storm", daemon=True)
        self.striking = True
        thread.start()
        return thread

    def _carry_out(self, order: Order, run: Run | None) -> None:
        try:
            self._interrupt(order, run)
        except BaseException as error:
            self.problems.append(f"the asker got {error!r}")
        self.carried_out += 1

    def _interrupt(self, order: Order, run: Run | None) -> None:
        gate = order.gate
        shapes.spin(order.spin)
        if order.sleep:
            time.sleep(order.sleep)
        if order.hurry:
            interpreter.hurry()
        gate.close_for_abort()
        begun = None if run is None else run.begun
        if run is not None and run.begun != run.ended:
            self.problems.append("the abort began while a section was held")
        if order.park is not None:
            with gate.parked():
                time.sleep(order.park)
                self._note_parked(gate)
        gate.interrupt_until_left(retry_after=order.retry_after)
        if run is not None and begun != run.begun:
            self.problems.append("a section began after the abort")

    def _note_parked(self, gate: Gate) -> None:
        frame = sys._current_frames().get(self._main or 0)
        self.parked += frame is not None and frame.f_code is Gate.park.__code__


class Noise(threading.Thread):
    """Wants the interpreter lock all the time."""

    def __init__(self, pause: float) -> None:
        super().__init__(name="noise", daemon=True)
        self.pause, self.over = pause, False

    def run(self) -> None:
        while not self.over:
            shapes.spin(500)
            if self.pause:
                time.sleep(self.pause)


class Counts(logging.Handler):
    """Counts what the library reports, and passes nothing on."""

    def __init__(self) -> None:
        super().__init__()
        self.unanswered = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.unanswered += "has not answered" in record.msg


class Torture:
    """One process's worth of it: ``with Torture(seed) as torture: torture.batch()`` as often as there is time."""

    def __init__(self, seed: int, names: Sequence[str] = tuple(SHAPES)) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self._inner = random.Random(seed)  # for the functions, which may be interrupted before they draw
        self.shapes = [SHAPES[name] for name in names]
        #: windows opened, by shape; of those, how many had an interruption under way when they closed
        self.opened: Counter[str] = Counter()
        self.under_way: Counter[str] = Counter()
        #: what came out, by (shape, kind); where it was raised, by file and function
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.places: Counter[str] = Counter()
        self.moments: Counter[str] = Counter()
        self.counts = Counts()
        self.asker = Asker()
        self._interrupter = Interrupter()
        self._board = Board.create()
        self._call = CallWrapper(self._board, lambda: None)
        self._stack = contextlib.ExitStack()

    @property
    def swallowed(self) -> int:
        """Interruptions that were raised again."""
        return sum(self._interrupter.swallowed.values())

    @property
    def windows(self) -> int:
        return self.opened.total()

    def __enter__(self) -> Torture:
        self.asker.start()
        self._stack.callback(self._board.close)
        self._stack.callback(self.asker.join)
        self._stack.callback(self.asker.orders.put, None)
        self._stack.enter_context(_surroundings_kept())
        self._stack.enter_context(watched(self.asker.problems, self.counts))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.__exit__(*exc_info)

    def batch(self, storm: bool, windows: int = 0) -> None:
        """Some windows in the same surroundings. Raises Lost with the seed and the story."""
        noise = self._surroundings()
        chosen = sys.getswitchinterval(), gc.isenabled()
        self._interrupter.install()
        interpreter.begin()
        end = time.monotonic() + LONGEST
        try:
            if storm:
                self._storm(windows or STORM, end)
            else:
                self._aim(windows or AIMED, end)
        except RankShouldRestart as error:
            raise Lost(f"{self._story()}: it was raised outside") from error
        finally:
            self._end_batch(noise)
        restored = signal.getsignal(self._interrupter.signum) == signal.SIG_DFL
        self._check("after a batch", "" if restored else "the handler is not what it was")
        found = sys.getswitchinterval(), gc.isenabled()
        self._check("after a batch", "" if found == chosen else f"the interpreter is at {found} instead of {chosen}")

    def _surroundings(self) -> list[Noise]:
        chance = self.chance
        sys.setswitchinterval(10 ** chance.uniform(-6, -2.3))
        gc.set_threshold(chance.choice((100, 700, 10_000)), 10, 10)
        (gc.enable if chance.random() < 0.7 else gc.disable)()
        noise = [Noise(chance.choice((0, 1e-5, 1e-3))) for _ in range(chance.choice((0, 0, 1, 2)))]
        for thread in noise:
            thread.start()
        return noise

    def _end_batch(self, noise: list[Noise]) -> None:
        self._interrupter.restore()
        interpreter.end()
        for thread in noise:
            thread.over = True
        for thread in noise:
            thread.join()

    # --- windows ------------------------------------------------------------------------------------------------

    def _storm(self, windows: int, end: float) -> None:
        cheap = [shape for shape in self.shapes if shape.cheap]
        thread = self.asker.storm(self._interrupter, random.Random(self.chance.random()))
        try:
            for number in range(windows if cheap else 0):
                self._window(self.chance.choice(cheap), self.chance.randrange(8), None, Moment.NEVER)
                if number % 256 == 0 and time.monotonic() > end:
                    break
            if self.chance.random() < 0.5:
                self._interrupter.restore()  # also while a signal is on its way
        finally:
            self.asker.striking = False
            thread.join(BOUND)
        self._check("after a storm", "an interruption does not end" if thread.is_alive() else "")

    def _aim(self, windows: int, end: float) -> None:
        for _ in range(windows):
            shape, moment = self.chance.choice(self.shapes), self.chance.choice(tuple(Moment))
            self._window(shape, 1 + self.chance.randrange(30), self._order(), moment)
            if time.monotonic() > end:
                return

    def _order(self) -> Order:
        chance = self.chance
        return Order(
            gate=self._interrupter.new_gate(),
            spin=int(10 ** chance.uniform(0, 3.5)) if chance.random() < 0.8 else 0,
            sleep=0.0 if chance.random() < 0.8 else 10 ** chance.uniform(-5, -3),
            park=chance.choice((None, 0.0, 1e-4, 1e-3)),
            hurry=chance.random() < 0.5,
            retry_after=10 ** chance.uniform(-3, -1.7),
        )

    def _window(self, shape: Shape, steps: int, order: Order | None, moment: Moment) -> None:
        gate = self._interrupter.new_gate() if order is None else order.gate
        run = Run(gate, self._inner, steps, self._call)
        Controls(self._call).gate = gate
        interpreter.relax()
        if order is not None:
            self._plan(run, order, moment)
        outcome = gate.run(_leaving if moment is Moment.LEAVING else _entering, (shape, run))
        handled = sys.exc_info()[1]
        under_way = gate.atomic.closed
        if moment is Moment.AFTER:
            run.ask()
        self._after(run)
        self._check(shape.name, "" if handled is None else f"{handled!r} is still being handled, says Python")
        self._note(shape, run, outcome, under_way, moment)

    def _plan(self, run: Run, order: Order, moment: Moment) -> None:
        self.asker.current = run
        run.order = order
        if moment in (Moment.NEVER, Moment.AFTER):
            run.tail = run.steps
            run.orders = self.asker.orders if moment is Moment.AFTER else None
            run.steps = 0
            return
        run.orders = self.asker.orders
        # one that does not end by itself must be left, the other one may return at the very moment
        run.endless = moment is not Moment.LEAVING and self.chance.random() < 0.7
        run.tail = 0 if run.endless else self.chance.choice((0, 1, 10, 100))
        if moment in (Moment.BEFORE, Moment.ENTRY):
            run.ask()
        while moment is Moment.BEFORE and not run.gate.interrupting:
            time.sleep(0)

    def _after(self, run: Run) -> None:
        """The caller's code: whatever is raised here has come too late. Undo what the function did."""
        if run.asked:
            try:
                self.asker.answers.get(timeout=BOUND)
            except queue.Empty:
                faulthandler.dump_traceback(all_threads=True)
                raise Lost(f"{self._story()}: the function was left, and interrupt_until_left() goes on") from None
        for undo in reversed(run.after):
            undo()
        if run.after and signal.getsignal(self._interrupter.signum) != self._interrupter._handle:
            raise Lost(f"{self._story()}: the handler is not ours")

    def _note(self, shape: Shape, run: Run, outcome: Outcome, under_way: bool, moment: Moment) -> None:
        name, gate = shape.name, run.gate
        self._check(name, judge(shape, run, outcome))
        self.opened[name] += 1
        self.under_way[name] += under_way
        kind = type(outcome).__name__
        if not run.entered:
            kind = "skipped"
        elif gate._raised_at:
            kind = f"{kind}, raised"
            self.places[gate.raised_where.rpartition(" in ")[2]] += 1
        self.outcomes[name, kind] += 1
        if run.order is not None:
            self.moments[moment.value] += 1
            self._check(name, left_as_it_was(run, self._call, self._interrupter))

    def _check(self, where: str, problem: str) -> None:
        problems = [problem] if problem else []
        problems += self.asker.problems
        if problems:
            raise Lost(f"{self._story()}, {where}: {'; '.join(problems)}")

    def _story(self) -> str:
        return f"seed {self.seed}, window {self.windows + 1}"


def _entering(shape: Shape, run: Run) -> Run:
    run.entered = True
    return shape.function(run)


def _leaving(shape: Shape, run: Run) -> Run:
    run.entered = True
    shape.function(run)
    run.ask()
    return run


def judge(shape: Shape, run: Run, outcome: Outcome) -> str:
    """What is wrong with the outcome of a window, in words; empty where nothing is."""
    gate = run.gate
    if run.begun != run.ended:
        return f"{run.begun} sections began, {run.ended} ended"
    if isinstance(outcome, Raised):
        return "" if run.error is not None and outcome.exception is run.error else f"it raised {outcome.exception!r}"
    if run.raising and sys.version_info >= (3, 11):  # 3.10 looks for signals where an exception is raised again
        return f"{run.error!r} was on its way out, and the outcome is {outcome}"
    if isinstance(outcome, Interrupted):
        if not gate.atomic.closed:
            return "interrupted, and nobody had asked"
        return "" if outcome.instead.startswith(shape.instead) else f"it raised {outcome.instead} instead"
    if not isinstance(outcome, Returned) or outcome.value is not run or not run.entered:
        return f"the outcome is {outcome}"
    if gate._raised_at and not shape.swallows and not gate._dropped:  # garbage collection may run anywhere
        return f"it was raised at {gate.raised_where}, and lost"
    return "a function without end has returned" if run.endless and run.asked and not shape.swallows else ""


def left_as_it_was(run: Run, call: CallWrapper, interrupter: Interrupter) -> str:
    """What a window has left behind, in words."""
    gate = run.gate
    if gate._abort_ends.locked():
        return "the lock of the abort is held"
    if gate.atomic.depth or gate.atomic._holder:
        return "the lock of atomic is held"
    if interrupter._sending.locked():
        return "the lock of the signal is held"
    if not gate.left.is_set():
        return "the gate is not left"
    call._board.begin(0)
    seen = call._board.snapshot()
    return "" if seen.hang_protection and not seen.atomic and not seen.soft_timeout else f"the board shows {seen}"


# --- what must be as before -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _surroundings_kept() -> Iterator[None]:
    interval, threshold, collects = sys.getswitchinterval(), gc.get_threshold(), gc.isenabled()
    alarm = signal.getsignal(signal.SIGALRM)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
        (gc.enable if collects else gc.disable)()
        signal.signal(signal.SIGALRM, alarm)


@contextlib.contextmanager
def watched(problems: list[str], counts: Counts) -> Iterator[None]:
    """Notice exceptions that end up anywhere else; count what the library reports."""

    def unraisable(info: Any) -> None:
        # the standard library's own destructors may complain of what was interrupted
        if isinstance(info.exc_value, RankShouldRestart) or "race condition" in str(info.exc_value):
            problems.append(f"Python dropped {info.exc_value!r} of {info.object!r}")

    def excepthook(info: Any) -> None:
        problems.append(f"thread {info.thread.name!r} raised {info.exc_value!r}")

    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook, threading.excepthook = unraisable, excepthook
    library, loop = logging.getLogger("inprocess.interrupt.signals"), logging.getLogger("asyncio")
    propagate, level = (library.propagate, loop.propagate), loop.level
    library.propagate = loop.propagate = False
    loop.setLevel(logging.CRITICAL + 1)  # "Task exception was never retrieved"
    library.addHandler(counts)
    try:
        yield
    finally:
        library.removeHandler(counts)
        library.propagate, loop.propagate = propagate
        loop.setLevel(level)
        sys.unraisablehook, threading.excepthook = hooks
