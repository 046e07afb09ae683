"""Runs inside a rank: replaces the environment, calls the test's function, reports events, looks for leftovers.

Every event is one JSON line of at most PIPE_BUF bytes, written with one write: no lock that an interruption could leave
held, no half event when the process is killed.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import json
import logging
import os
import random
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from . import leaks
from .faults import At, Fault, Returns, When

#: each report of an event takes up to so long (seconds), which shows what a test takes for granted; see CONTRIBUTING
LATE = float(os.environ.get("INPROCESS_TESTS_LATE", "0"))
#: how long what a rank holds may be in use by others (seconds): its monitor, where that serves the store, leaves last
SETTLE = 10.0
#: less than PIPE_BUF (4096), so that one write is never split
LONGEST_EVENT = 3500
#: the hooks of `Wrapper` that take a state
STATE_HOOKS = ("initialize", "abort", "finalize", "health_check", "completion", "terminate")

Options = Mapping[str, Any] | Callable[["Context"], Mapping[str, Any]]


@dataclass(frozen=True)
class Spec:
    """What a rank needs to know; travels to it by pickle, from the test's own process."""

    rank: int
    target: Callable[[Context], Any]
    environment: Mapping[str, str]
    log: str
    faults: Mapping[At, Fault]
    wrapper: Options
    args: Mapping[str, Any]
    #: called with the rank before anything else: takes the process to where it is to live
    place: Callable[[int], None] | None = None


@dataclass
class Context:
    """What a test's function gets: the rank, the arguments, the fault schedule, and the way to report."""

    spec: Spec
    events: Connection
    control: Connection
    #: number of the wrapped call that runs or ran last, -1 before the first
    calls: int = -1
    #: iteration in which the function was last entered
    iteration: int | None = None
    #: how often it waited for others, up to 255
    waits: int = 0
    fired: set[At] = field(default_factory=set)
    reported: set[str] = field(default_factory=set)
    #: results of the wrapped calls that ended with a value, for tests that look at more than the last one
    values: list[Any] = field(default_factory=list)
    #: called at each point with its step; a test may strike there by rules of its own
    at_point: Callable[[int | str], None] = lambda step: None

    @property
    def rank(self) -> int:
        """The initial rank."""
        return self.spec.rank

    @property
    def args(self) -> Mapping[str, Any]:
        return self.spec.args

    def emit(self, event: str, **fields: Any) -> None:
        """Report an event to the test; `t` is CLOCK_MONOTONIC, which all processes share."""
        fields = {"event": event, "call": self.calls, "iteration": self.iteration} | fields
        fields["t"] = time.monotonic()
        line = json.dumps(fields, default=repr)
        if len(line) > LONGEST_EVENT:
            longest = max(fields, key=lambda name: len(str(fields[name])))
            fields[longest] = str(fields[longest])[-1500:]
            line = json.dumps(fields, default=repr)
        os.write(self.events.fileno(), line.encode() + b"\n")
        self.reported.add(event)
        if LATE:
            time.sleep(random.uniform(0, LATE))

    def has_reported(self, event: str) -> bool:
        """Whether this process has reported such an event."""
        return event in self.reported

    def point(self, step: int | str, iteration: int | None = None) -> None:
        """A place where the schedule may have a fault for this rank."""
        at = At(self.rank, self.iteration if iteration is None else iteration, step, self.calls)
        fault = self.spec.faults.get(at)
        if fault is None or at in self.fired:
            self.at_point(step)
            return
        self.fired.add(at)
        if fault.when is not None:
            self.wait_for(fault.when)
        self.emit("fault", step=step, fault=repr(fault))
        fault.fire(self)

    def trace(self, owner: Any, method: str, step: str) -> None:
        """A `point` before each call of this method, or function of a module."""
        original = getattr(owner, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.point(step)
            return original(*args, **kwargs)

        setattr(owner, method, wrapped)

    def wait_for(self, when: When) -> None:
        """Return once `when.count` other ranks have reported the event.

        An answer is one byte, which names what it answers: a wait that is interrupted leaves no half of it behind, and
        its answer is not taken for that of the next one.
        """
        self.waits = (self.waits + 1) % 256
        self.emit("wait_for", awaited=when.event, count=when.count, number=self.waits)
        while (answer := os.read(self.control.fileno(), 1)) != bytes([self.waits]):
            if not answer:
                raise EOFError("the test has ended")

    @contextmanager
    def entered(self, iteration: int) -> Iterator[None]:
        """Around the body of a wrapped function: reports entry and exit, with the ranks of the environment."""
        self.iteration = iteration
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.emit("enter", rank=rank, world_size=size, pid=os.getpid())
        try:
            self.point("enter")
            yield
        finally:
            self.emit("leave")

    def options(self, **more: Any) -> dict[str, Any]:
        """The options of the test's `wrapper=`, with the harness's hooks where the schedule has a fault for one."""
        given = self.spec.wrapper(self) if callable(self.spec.wrapper) else self.spec.wrapper
        monitor_log = f"{os.path.dirname(self.spec.log)}/monitor{{rank}}.log"
        options: dict[str, Any] = {"monitor_process_logfile": monitor_log} | dict(given) | more
        steps = {at.step for at in self.spec.faults} | set(self.args.get("trace", ()))
        for name in STATE_HOOKS:
            if name in steps:
                options[name] = self._with_hook(name, options.get(name))
        if "rank_assignment" in steps:
            options["rank_assignment"] = self._with_assignment(options.get("rank_assignment"))
        return options

    def wrap(self, body: Callable[[Context, Any], Any], **options: Any) -> Callable[[], Any]:
        """The wrapped form of `body(context, call)`; calling it reports how it ended."""
        from inprocess import CallWrapper, Wrapper

        @Wrapper(**self.options(**options))
        def entry(call: CallWrapper | None = None) -> Any:
            assert call is not None
            with self.entered(call.iteration):
                try:
                    return body(self, call)
                except Returns:
                    return None

        return lambda: self.called(entry)

    def called(self, function: Callable[[], Any]) -> Any:
        """Call a wrapped function and report what came out."""
        self.calls += 1
        self.iteration = None
        self.emit("call")
        try:
            value = function()
        except BaseException as error:
            self.emit("raised", type=type(error).__name__, message=str(error))
            raise
        self.emit("returned", value=value)
        self.values.append(value)
        return value

    def _with_hook(self, name: str, given: Any) -> Any:
        from inprocess import Compose
        from inprocess.abort import AbortTorchDistributed

        def point(state: Any) -> Any:
            self.emit("phase", name=name, iteration=state.iteration)
            self.point(name, state.iteration)
            return state

        if given is None and name == "abort":
            given = AbortTorchDistributed()
        return point if given is None else Compose(given, point)

    def _with_assignment(self, given: Any) -> Any:
        from inprocess.rank_assignment import ShiftRanks

        inner = ShiftRanks() if given is None else given

        def assign(context: Any) -> Any:  # not a Compose: a Tree cannot be part of one
            self.emit("phase", name="rank_assignment", iteration=context.state.iteration)
            self.point("rank_assignment", context.state.iteration)
            return inner(context)

        return assign


def rank_main(spec: Spec, events: Connection, control: Connection) -> None:
    """What the forkserver's child runs."""
    gc.freeze()  # what the server imported is not worth collecting again
    _prepare(spec)
    context = Context(spec, events, control)
    before = leaks.Snapshot.take()
    context.emit("start", pid=os.getpid())
    _call(context)
    gc.collect()
    left = leaks.settled(before, _snapshot, float(spec.args.get("settle", SETTLE)))
    if left:
        context.emit("leftovers", lines=left)
    context.emit("done")
    _exit(full=bool(spec.args.get("full_exit")))


def _snapshot() -> leaks.Snapshot:
    # a monitor that others still needed may have ended meanwhile; the next call would reap it
    if "inprocess.monitor_process" in sys.modules:
        sys.modules["inprocess.monitor_process"].reap_lingering()
    return leaks.Snapshot.take()


def _exit(full: bool) -> None:
    """Leave with Python's exit handlers; `full` also tears down all of torch (0.4 s), so only some tests do it."""
    if full:
        ctypes.pythonapi.Py_Exit(0)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _prepare(spec: Spec) -> None:
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(spec.environment)
    if spec.place is not None:
        spec.place(spec.rank)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(file=2, all_threads=True)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(threadName)s %(levelname)s %(name)s: %(message)s"))
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(logging.INFO)


def _call(context: Context) -> None:
    try:
        value = context.spec.target(context)
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        print(text, file=sys.stderr, flush=True)
        context.emit(
            "exception", type=type(error).__name__, message=str(error), trace=text[-2000:], iteration=context.iteration
        )
    else:
        context.emit("value", value=value)
