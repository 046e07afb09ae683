"""The functions that are interrupted: all that people do in a training function, as far as it matters here.

Each gets a `Run`, goes on while ``run.on()``, and returns the run. It is called inside the window, thousands of times
in one process, so it leaves nothing behind but what it has put on ``run.after``.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import functools
import gc
import importlib
import io
import itertools
import json
import logging
import os
import queue
import re
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from inprocess.exception import RankShouldRestart, RestartAbort
from inprocess.system.logs import end, get_logger

from .run import FOR_EVER, Run

Function = Callable[[Run], Run]
LOG = get_logger("inprocess.torture")
LOG.propagate = False


@dataclass(frozen=True)
class Shape:
    """A function and what may come out of it."""

    name: str
    function: Function
    #: a few microseconds at most, and touches nothing outside itself
    cheap: bool
    #: it, or Python on its behalf, may swallow an interruption
    swallows: bool
    #: what it may raise in place of an interruption begins with one of these
    instead: tuple[str, ...]


SHAPES: dict[str, Shape] = {}


def shape(
    *, cheap: bool = False, swallows: bool = False, instead: tuple[str, ...] = ()
) -> Callable[[Function], Function]:
    def add(function: Function) -> Function:
        name = function.__name__
        SHAPES[name] = Shape(name, function, cheap, swallows, ("", *instead))
        return function

    return add


def spin(rounds: int = 5) -> None:
    for _ in range(rounds):
        pass


# --- plain code, exceptions -----------------------------------------------------------------------------------------


@shape(cheap=True)
def loop(run: Run) -> Run:
    while run.on():
        pass
    return run


@shape(cheap=True)
def calls(run: Run) -> Run:
    def tower(levels: int) -> int:
        try:
            return tower(levels - 1) + 1 if levels else 0
        finally:
            spin(1)

    while run.on():
        assert tower(3) == 3
    return run


@shape(cheap=True)
def except_exception(run: Run) -> Run:
    while run.on():
        try:
            spin()
            raise ValueError
        except Exception:
            spin()
    return run


@shape(cheap=True, swallows=True)
def except_base_exception(run: Run) -> Run:
    run.swallows = run.chance.randrange(3)
    while run.on():
        try:
            while run.on():
                spin()
        except BaseException:
            run.swallows -= 1
            if run.swallows < 0:
                raise
    return run


@shape(cheap=True)
def finally_blocks(run: Run) -> Run:
    try:
        try:
            while run.on():
                spin()
        finally:
            spin()
    finally:
        spin()
    return run


@shape(cheap=True, instead=("KeyError: 'torn'",))
def answers_with_another(run: Run) -> Run:
    try:
        while run.on():
            spin()
    except RankShouldRestart as interruption:
        raise KeyError("torn") from interruption
    return run


@shape(cheap=True, swallows=True)
def answers_with_return(run: Run) -> Run:
    try:
        while run.on():
            spin()
    except RankShouldRestart:
        return run
    return run


@shape(cheap=True, instead=("SystemExit: 1",))
def answers_with_exit(run: Run) -> Run:
    try:
        while run.on():
            spin()
    except RankShouldRestart:
        sys.exit(1)
    return run


@shape(cheap=True, instead=("ValueError: its own",))
def fails(run: Run) -> Run:
    run.error = ValueError("its own")
    while run.on():
        spin()
    raise run.error


@shape(cheap=True)
def leaves_the_job(run: Run) -> Run:
    """What is under way when the interruption comes is the outcome: Ctrl-C, sys.exit(), RestartAbort."""
    run.error = run.chance.choice([KeyboardInterrupt(), SystemExit(3), RestartAbort("enough")])
    try:
        raise run.error
    finally:
        run.raising = sys.exc_info()[1] is run.error
        while run.on():
            spin()


@shape()
def near_the_recursion_limit(run: Run) -> Run:
    def down() -> None:
        spin(1)
        down()

    while run.on():
        with contextlib.suppress(RecursionError):
            down()
    return run


# --- context managers, generators -----------------------------------------------------------------------------------


@contextlib.contextmanager
def managed() -> Iterator[None]:
    try:
        yield
    finally:
        spin()


@shape(cheap=True)
def context_managers(run: Run) -> Run:
    while run.on():
        with contextlib.suppress(ValueError), managed(), contextlib.ExitStack() as stack:
            stack.enter_context(managed())
            stack.callback(spin)
            spin()
            raise ValueError
    return run


def numbers() -> Iterator[int]:
    try:
        while True:
            yield 1
    finally:
        spin()


def through() -> Iterator[int]:
    try:
        yield from numbers()
    finally:
        spin()


@shape(cheap=True, swallows=True)
def generators(run: Run) -> Run:
    """Left half way, closed, thrown into, and dropped: then Python swallows what its `finally` block raises."""
    while run.on():
        half, closed, thrown = through(), through(), numbers()
        next(half), next(closed), next(thrown)
        closed.close()  # type: ignore[attr-defined]
        with contextlib.suppress(ValueError):
            thrown.throw(ValueError)  # type: ignore[attr-defined]
        del half
    return run


# --- atomic, and the rest of the call object ------------------------------------------------------------------------


@shape(cheap=True)
def sections(run: Run) -> Run:
    while run.on():
        with run.gate.atomic:
            run.begun += 1
            with run.gate.atomic:
                spin(2)
            run.ended += 1
    return run


@shape(cheap=True, swallows=True)
def sections_that_are_insisted_on(run: Run) -> Run:
    """A refusal is caught, and the section tried again."""
    run.swallows = run.chance.randrange(4)
    while run.on():
        try:
            with run.gate.atomic:
                run.begun += 1
                spin()
                run.ended += 1
        except RankShouldRestart:
            run.swallows -= 1
            if run.swallows < 0:
                raise
    return run


@shape(cheap=True)
def sections_of_the_call(run: Run) -> Run:
    assert run.call is not None
    while run.on():
        with run.call.atomic(), run.call.atomic():
            run.begun += 1
            spin(2)
            run.ended += 1
        run.call.ping()
        with run.call.disable_hang_protection(), run.call.section("step", 5):
            spin(2)
    return run


@shape(swallows=True)
def sections_left_half_way(run: Run) -> Run:
    """A generator that is suspended in a section when the function is left."""
    suspended: list[Iterator[None]] = []

    def half() -> Iterator[None]:
        with run.gate.atomic:
            yield

    run.after.append(suspended.clear)
    run.tail += run.steps
    run.endless = False  # the section is held: no abort begins before the function is left
    suspended.append(half())
    next(suspended[0])
    while run.on():
        spin()
    return run


@shape()
def sections_of_threads(run: Run) -> Run:
    def work() -> None:
        with contextlib.suppress(RankShouldRestart):
            for _ in range(20):
                with run.gate.atomic:
                    run.begun += 1
                    spin()
                    run.ended += 1

    threads = [run.starts(work) for _ in range(2)]
    while run.on():
        with run.gate.atomic:
            run.begun += 1
            spin()
            run.ended += 1
    for thread in threads:
        thread.join()
    return run


# --- callbacks from C, destructors ----------------------------------------------------------------------------------


@shape(cheap=True)
def callbacks(run: Run) -> Run:
    def key(number: int) -> int:
        spin(2)
        return -number

    while run.on():
        assert sorted([1, 2, 3], key=key) == [3, 2, 1]
        [2, 1, 3].sort(key=functools.cmp_to_key(lambda a, b: key(a) - key(b)))
        functools.reduce(lambda a, b: key(a) + b, [1, 2, 3])
        re.sub("a", lambda match: str(key(len(match[0]))), "banana")
        list(filter(key, map(key, [1, 2, 3])))
        max([1, 2, 3], key=key)
    return run


class Awkward:
    """Everything that Python calls by itself takes a while."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        spin()
        return isinstance(other, Awkward) and self.number == other.number

    def __hash__(self) -> int:
        spin()
        return hash(self.number)

    def __lt__(self, other: Awkward) -> bool:
        spin()
        return self.number < other.number

    def __getattr__(self, name: str) -> Any:
        spin()
        raise AttributeError(name)

    def __deepcopy__(self, memo: object) -> Awkward:
        spin()
        return Awkward(self.number)


@shape(swallows=True)  # before 3.13, parts of C code clear any exception of `__getattr__`
def special_methods(run: Run) -> Run:
    while run.on():
        things = {Awkward(number): number for number in (2, 1, 2)}
        sorted(things)
        assert not hasattr(next(iter(things)), "missing")
        copy.deepcopy(list(things))
        json.dumps([Awkward(1)], default=lambda thing: thing.number)
    return run


_COMPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
_qsort = ctypes.CDLL(None).qsort
_qsort.restype = None


@shape(swallows=True)
def callbacks_of_ctypes(run: Run) -> Run:
    @_COMPARE
    def compare(a: Any, b: Any) -> int:
        spin(10)
        return int(a[0]) - int(b[0])

    while run.on():
        array = (ctypes.c_int * 4)(4, 2, 3, 1)
        _qsort(array, len(array), ctypes.sizeof(ctypes.c_int), compare)
    return run


class Deleted:
    def __del__(self) -> None:
        spin(20)


@shape(cheap=True, swallows=True)
def destructors(run: Run) -> Run:
    while run.on():
        thing, other = Deleted(), Deleted()
        weakref.finalize(other, spin, 10)
        watched = weakref.ref(thing, lambda ref: spin(10))
        del thing, other
        # a thread that looks where this one is, to report it, keeps the frame of a destructor, and what is in it, for
        # that moment
        end = time.monotonic() + 10
        while watched() is not None:
            assert time.monotonic() < end
    return run


@shape(swallows=True)
def collections_of_garbage(run: Run) -> Run:
    def collected(phase: str, info: dict[str, int]) -> None:
        spin(10)

    run.after.append(lambda: collected not in gc.callbacks or gc.callbacks.remove(collected))
    gc.callbacks.append(collected)
    while run.on():
        cycle: Any = Deleted()
        cycle.itself = cycle
        del cycle
        gc.collect(0)
    return run


# --- waiting --------------------------------------------------------------------------------------------------------


@shape()
def sleep(run: Run) -> Run:
    while run.on():
        time.sleep(1e-6)
        if run.blocks():
            time.sleep(FOR_EVER)
    return run


@shape()
def locks(run: Run) -> Run:
    lock, again, condition = threading.Lock(), threading.RLock(), threading.Condition()
    while run.on():
        with lock, again, again:
            spin()
        with condition:
            condition.notify_all()
            condition.wait(1e-6)
            if run.blocks():
                condition.wait(FOR_EVER)
    return run


@shape()
def lock_that_is_taken(run: Run) -> Run:
    lock = threading.Lock()
    with lock:
        while run.on():
            lock.acquire(timeout=1e-6)
            if run.blocks():
                lock.acquire()
    return run


@shape()
def events_and_queues(run: Run) -> Run:
    event, items, simple = threading.Event(), queue.Queue[int](), queue.SimpleQueue[int]()
    wait = run.chance.choice(
        [event.wait, lambda seconds: items.get(timeout=seconds), lambda seconds: simple.get(True, seconds)]
    )
    while run.on():
        items.put(1)
        items.get()
        with contextlib.suppress(queue.Empty):
            wait(1e-6)
            if run.blocks():
                wait(FOR_EVER)
    return run


@shape()
def pipes(run: Run) -> Run:
    ends: list[int] = []
    run.after.append(lambda: [os.close(end) for end in ends])
    # made and kept by one call in C: an interruption between the two would lose them
    ends.extend(itertools.chain.from_iterable(itertools.starmap(os.pipe, [()])))
    reading, writing = ends
    while run.on():
        os.write(writing, b"x")
        select.select([reading], [], [])
        os.read(reading, 1)
        if run.blocks():
            run.chance.choice([lambda: os.read(reading, 1), lambda: select.select([reading], [], [])])()
    return run


@shape()
def lines_of_the_library(run: Run) -> Run:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(handler)

    def still_written() -> None:
        assert end(20)  # what a full queue drops need not be written
        LOG.error("last")
        assert end(20)
        LOG.removeHandler(handler)
        assert seen[-1] == "last"

    run.after.append(still_written)
    while run.on():
        LOG.error("%d", 1)
    return run


@shape()
def threads(run: Run) -> Run:
    over = threading.Event()
    while run.on():
        run.starts(spin).join()
        if run.blocks():
            run.starts(over.wait, over.set).join()
    return run


# --- the standard library -------------------------------------------------------------------------------------------


async def ticks() -> AsyncIterator[int]:
    try:
        while True:
            await asyncio.sleep(0)
            yield 1
    finally:
        spin()


@shape(swallows=True)  # a callback's or another task's exception stays in the event loop
def coroutines(run: Run) -> Run:
    async def other() -> None:
        await asyncio.sleep(0)

    async def main() -> None:
        async for _ in ticks():
            await asyncio.gather(other(), other())
            if not run.on():
                return
            if run.blocks():
                await asyncio.sleep(FOR_EVER)

    # asyncio.run() itself puts a handler on while it runs, and an interruption may come before its `finally` block
    run.after.append(lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    asyncio.run(main())
    return run


logger = logging.getLogger("tests.torture.shapes")
logger.propagate = False
logger.setLevel(logging.INFO)
handler = logging.StreamHandler(io.StringIO())
logger.addHandler(handler)


@shape()
def logs(run: Run) -> Run:
    while run.on():
        logger.info("round %d", run.steps)
        handler.stream.seek(0)
        time.sleep(0.0001)
    return run


@shape()
def imports(run: Run) -> Run:
    """Never half done."""
    while run.on():
        sys.modules.pop("colorsys", None)
        module = importlib.import_module("colorsys")
        assert module.hsv_to_rgb(0, 0, 0) == (0, 0, 0)
        time.sleep(0.001)  # an import is left alone for ten seconds
    return run


@shape()
def writes_files(run: Run) -> Run:
    while run.on():
        with open(os.devnull, "w") as file, io.StringIO() as text:
            text.write("x" * 10)
            print(text.getvalue(), file=file)
    return run


@shape()
def tracing(run: Run) -> Run:
    def trace(frame: Any, event: str, argument: object) -> Any:
        spin(1)
        return trace

    def profile(frame: Any, event: str, argument: object) -> None:
        spin(1)

    run.after += [lambda: sys.settrace(None), lambda: sys.setprofile(None)]
    run.chance.choice([lambda: sys.settrace(trace), lambda: sys.setprofile(profile)])()
    while run.on():
        spin()
    sys.settrace(None)
    sys.setprofile(None)
    return run


# --- signals --------------------------------------------------------------------------------------------------------


@shape()
def handlers_of_its_own(run: Run) -> Run:
    def handle(signum: int, frame: object) -> None:
        spin(20)

    run.after.append(lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL))
    signal.signal(signal.SIGUSR1, handle)
    while run.on():
        signal.raise_signal(signal.SIGUSR1)
        with run.gate.atomic:
            run.begun += 1
            signal.raise_signal(signal.SIGUSR1)
            run.ended += 1
    return run


@shape()
def timer_of_its_own(run: Run) -> Run:
    """Its handler is called anywhere, also on top of `atomic`'s own lines."""

    def handle(signum: int, frame: object) -> None:
        spin(50)

    def undo() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, lambda signum, frame: None)  # one may be on its way

    run.after.append(undo)
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    while run.on():
        with run.gate.atomic:
            run.begun += 1
            spin()
            run.ended += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    return run


@shape(cheap=True)
def signals_of_ours(run: Run) -> Run:
    """As if many came late, or somebody else used the same one."""
    while run.on():
        signal.raise_signal(run.gate._interrupter.signum)
    return run


@shape()
def handler_of_ours_replaced(run: Run) -> Run:
    interrupter = run.gate._interrupter

    def undo() -> None:
        interrupter._previous = signal.SIG_DFL
        signal.signal(interrupter.signum, interrupter._handle)

    run.after.append(undo)
    signal.signal(interrupter.signum, lambda signum, frame: None)
    while run.on():
        spin()
        if run.blocks():
            time.sleep(FOR_EVER)
    return run


@shape()
def signals_blocked(run: Run) -> Run:
    signum = run.gate._interrupter.signum
    run.after.append(lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum}))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signum})
    while run.on():
        spin()
    return run
